"""From the ``parallel=`` argument to an engine, and how each dataloader is read then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import torch

from pure_loop._internal.processes import launched, rank, world, world_size
from pure_loop.distributed.multi_rank import MultiRankEngine
from pure_loop.distributed.parallel import Parallel
from pure_loop.distributed.ranks import Ranks
from pure_loop.errors import ArgumentError, DistributedError


def engine_of(parallel: Parallel, device: torch.device) -> MultiRankEngine:
    """The engine; it meets the other ranks when it starts."""
    ranks = Ranks(rank(), world_size(), device, parallel.seconds, parallel.layout)
    if parallel.parallelize is not None:
        from pure_loop.distributed.tensor_parallel import TensorParallelEngine

        return TensorParallelEngine(parallel, ranks)
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


def reads_its_own(parallel: Parallel, dataloader: Any, stream: str) -> bool:
    """Whether this rank's dataloader gives a part of its own, which is not to be split again.

    It does where a sampler in it divides the samples: a DistributedSampler, or another one with ``num_replicas`` and
    ``rank``, at any depth.

    Raises:
        ArgumentError: its sampler is for another number of ranks, or another rank, or one of an evaluation or a
            prediction that repeats samples, or leaves some out.
    """
    from pure_loop.data.copies import Private

    value: Literal["split", "own"] | None = parallel.data
    layout = parallel.layout
    ranks, mine = len(layout.ranks), layout.place(rank())[0]
    kind = "rank" if layout.cut == 1 else "data rank"
    parts = [dataloader] if type(dataloader) in (list, tuple) else Private(dataloader, seeds=False).parts
    samplers = [part for part in parts if _divides(part)]
    if not samplers:
        return value == "own"
    for sampler in samplers:
        name = type(sampler).__name__
        if value == "split":
            raise ArgumentError(
                f"the {stream} dataloader has a {name}, which gives each rank its part, and Parallel(data='split') "
                "would split that again: leave out one of the two."
            )
        if (sampler.num_replicas, sampler.rank) != (ranks, mine):
            raise ArgumentError(
                f"the {stream} dataloader's {name} is that of rank {sampler.rank} of {sampler.num_replicas}, and this "
                f"is {kind} {mine} of {ranks}."
            )
        if stream != "train":
            owner = next((part for part in parts if _indexed_by(part) is sampler), None)
            _refuse_uneven(sampler, getattr(sampler, "dataset", getattr(owner, "dataset", None)), stream)
    return True


def _divides(part: Any) -> bool:
    return all(isinstance(getattr(part, name, None), int) for name in ("num_replicas", "rank"))


def _indexed_by(loader: Any) -> Any:
    """The innermost sampler of a DataLoader."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if batches is None else batches
    return getattr(sampler, "sampler", sampler)


def _refuse_uneven(sampler: Any, dataset: Any, stream: str) -> None:
    """
    Raises:
        ArgumentError: the ranks together don't have each sample once.
    """
    counts: Counter[Any] = Counter()
    most = len(dataset) + 1 if hasattr(dataset, "__len__") else None  # a sampler may be endless
    for number in range(sampler.num_replicas):
        counts.update(islice(_indices_of(sampler, number), most))
    repeated = counts.total() - len(counts)
    left_out = len(dataset) - len(counts) if hasattr(dataset, "__len__") else 0
    if not repeated and left_out <= 0:
        return
    faults = [f"gives {repeated} of them twice or more"] * (repeated > 0) + [f"leaves out {left_out}"] * (left_out > 0)
    raise ArgumentError(
        f"the {stream} dataloader's {type(sampler).__name__} divides {len(counts) + max(left_out, 0)} samples over "
        f"{sampler.num_replicas} ranks, and {' and '.join(faults)}, so that results would not be those of the data: "
        "leave the sampler out. Without one each rank takes its part of each batch, and each sample counts once; "
        "batch_size is then that of the whole batch."
    )


def _indices_of(sampler: Any, number: int) -> Iterator[Any]:
    """What the sampler would give to a rank in its first pass."""
    from pure_loop.data.copies import Private
    from pure_loop.random.seeds import seeded_all

    copy = Private(sampler, seeds=True).begin(0, 0)
    if copy is sampler:
        raise ArgumentError(
            f"the {type(sampler).__name__} can't be copied, so that its samples can't be counted before an evaluation: "
            "leave it out, and each rank takes its part of each batch."
        )
    copy.rank = number
    with seeded_all(0):
        for item in copy:
            yield from item if isinstance(item, list | tuple) else [item]
