"""From the ``parallel=`` argument to an engine, and how each dataloader is read then."""

from __future__ import annotations

from typing import Any, Literal

import torch

from pure_loop.distributed.launchers import launched, world
from pure_loop.distributed.multi_rank import MultiRankEngine
from pure_loop.distributed.parallel import Parallel, rank, world_size
from pure_loop.distributed.ranks import Ranks
from pure_loop.errors import ArgumentError, DistributedError

__all__ = ["device_of_rank", "engine_of", "reads_its_own"]


def engine_of(parallel: Parallel, device: torch.device) -> MultiRankEngine:
    """The engine; it meets the other ranks when it starts."""
    ranks = Ranks(rank(), world_size(), device, parallel.seconds)
    if parallel.kind == "shard":
        from pure_loop.distributed.shard import ShardEngine

        return ShardEngine(parallel, ranks)
    from pure_loop.distributed.replicate import ReplicateEngine

    return ReplicateEngine(parallel, ranks)


def device_of_rank(device: Any) -> Any:
    """``device=``, in which "cuda" is this rank's own.

    Raises:
        DistributedError: nothing says which rank this is on its machine.
    """
    if device is None or torch.device(device).type == "cpu" or torch.device(device).index is not None:
        return device
    kind, here = torch.device(device).type, world()
    if kind == "cuda" and launched().size > 1 and torch.cuda.device_count() == 1:
        # Slurm and MPI may show each process its own GPU alone (srun --gpus-per-task=1).
        return "cuda:0"
    if here.local_rank is None:
        raise DistributedError(
            f"device={device!r}: nothing says which rank this is on its machine, and so which device is its own: set "
            f'LOCAL_RANK in the environment, or pass the device with its number, device="{kind}:0".'
        )
    return f"{kind}:{here.local_rank}"


def reads_its_own(parallel: Parallel, dataloader: Any) -> bool:
    """Whether this rank's dataloader gives a part of its own, which is not to be split again.

    Raises:
        ArgumentError: its DistributedSampler is for another number of ranks, or another rank.
    """
    from torch.utils.data.distributed import DistributedSampler

    value: Literal["split", "own"] | None = parallel.data
    samplers = [getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)]
    samplers.append(getattr(samplers[1], "sampler", None))
    result = next((item for item in samplers if isinstance(item, DistributedSampler)), None)
    if result is None:
        return value == "own"
    if value == "split":
        raise ArgumentError(
            "the DataLoader has a DistributedSampler, which gives each rank its part, and Parallel(data='split') would "
            "split that again: leave out one of the two."
        )
    if (result.num_replicas, result.rank) != (world_size(), rank()):
        raise ArgumentError(
            f"the DataLoader's DistributedSampler is that of rank {result.rank} of {result.num_replicas}, and this is "
            f"rank {rank()} of {world_size()}."
        )
    return True
