"""What a user chooses about many ranks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import attrs
from torch import nn

from pure_loop._values import as_float
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.time import Time, TimeUnit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Parallel", "rank", "read_parallel", "world_size"]


def rank() -> int:
    """This process among the ranks: that of the process group, or what ``torchrun`` says, or 0.

    >>> rank()
    0
    """
    return _of_group("get_rank", "RANK", 0)


def world_size() -> int:
    """How many ranks there are: of the process group, or what ``torchrun`` says, or 1.

    >>> world_size()
    1
    """
    return _of_group("get_world_size", "WORLD_SIZE", 1)


def _of_group(function: str, variable: str, alone: int) -> int:
    dist = sys.modules.get("torch.distributed")  # who has a group has imported it
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(getattr(dist, function)())
    return int(os.environ.get(variable, alone))


@attrs.frozen(kw_only=True)
class Parallel:
    """How several ranks train one model: ``fit(..., parallel=Parallel(...))``, started by ``torchrun``.

    ``parallel="replicate"`` is ``Parallel()``, and ``parallel="shard"`` is ``Parallel(kind="shard")``.

    Args:
        kind: ``"replicate"``: every rank holds the whole model (torch's DistributedDataParallel averages gradients);
            ``"shard"``: every rank holds a part of each parameter, gradient and memory of the optimizer (torch's
            ``fully_shard``). Given a mesh, its number of dimensions decides between sharding alone and both.
        mesh: for ``"shard"``: a DeviceMesh of one dimension, or of two: replicated over the first and sharded over the
            second (HSDP). None: one dimension, all ranks.
        data: ``"split"``: every rank is given the same dataloader, and takes its part of each batch, so that
            ``batch_size`` is that of the whole and n ranks train as one does; ``"own"``: each rank's dataloader gives
            its own part. None: ``"own"`` for a DataLoader with a DistributedSampler, or else ``"split"``.
        uneven: with data of its own a rank may have a batch less than another. ``"stop"``: the epoch ends for all when
            the first one has no more; ``"pad"``: when the last one has no more, and until then those without take
            part without counting.
        timeout: how long a rank waits for another one: seconds, or ``"5m"``.
        find_unused_parameters: for ``"replicate"``: whether some batches reach only some parameters. None: whether the
            first batch does. True costs a walk through the graph in every batch; with False a batch that leaves out a
            parameter is an error.
        bucket_cap_mb: for ``"replicate"``: how much gradient is exchanged at a time; None: torch's default.
        groups: for ``"shard"``: ``(name, module) -> bool``: which submodules are gathered as one. None: the elements of
            each ``nn.ModuleList`` and ``nn.Sequential`` that have parameters.

    Raises:
        ArgumentError, ArgumentTypeError: a value that can't be used.

    >>> Parallel(kind="shard", timeout="30s").seconds
    30.0
    """

    kind: Literal["replicate", "shard"] = "replicate"
    mesh: DeviceMesh | None = None
    data: Literal["split", "own"] | None = None
    uneven: Literal["stop", "pad"] = "stop"
    timeout: str | float = "5m"
    find_unused_parameters: bool | None = None
    bucket_cap_mb: float | None = None
    groups: Callable[[str, nn.Module], bool] | None = None

    def __attrs_post_init__(self) -> None:
        _one_of("kind", self.kind, ("replicate", "shard"))
        _one_of("data", self.data, ("split", "own", None))
        _one_of("uneven", self.uneven, ("stop", "pad"))
        _one_of("find_unused_parameters", self.find_unused_parameters, (True, False, None))
        if self.groups is not None and not callable(self.groups):
            raise ArgumentTypeError(f"Parallel(groups={self.groups!r}): give a function (name, module) -> bool.")
        cap = self.bucket_cap_mb
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float)):
            raise ArgumentTypeError(f"Parallel(bucket_cap_mb={cap!r}): give a number above 0, or None.")
        if cap is not None and not 0 < as_float(cap) < math.inf:
            raise ArgumentError(f"Parallel(bucket_cap_mb={self.bucket_cap_mb!r}): give a number above 0, or None.")
        if self.mesh is not None:
            _check_mesh(self.mesh, self.kind)
        others = ("mesh", "groups") if self.kind == "replicate" else ("bucket_cap_mb", "find_unused_parameters")
        for name in others:
            if getattr(self, name) is not None:
                raise ArgumentError(f"Parallel(kind={self.kind!r}, {name}=...): {self.kind!r} has no use for {name}.")
        _ = self.seconds

    @property
    def seconds(self) -> float:
        """The timeout in seconds."""
        given = self.timeout
        if isinstance(given, int | float) and not isinstance(given, bool):
            seconds = as_float(given)
        else:
            try:
                time = Time.parse(given)
            except (ArgumentError, ArgumentTypeError) as error:
                raise type(error)(f"Parallel(timeout={given!r}): {error}") from None
            if time.unit is not TimeUnit.SECOND:
                raise ArgumentError(f'Parallel(timeout={given!r}): give seconds, or a text such as "5m".')
            seconds = float(time.value)
        if not 0 < seconds < math.inf:
            raise ArgumentError(f'Parallel(timeout={given!r}): give seconds above 0, or a text such as "5m".')
        return seconds


def _one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise ArgumentError(f"Parallel({name}={value!r}): give one of {', '.join(map(repr, allowed))}.")


def _check_mesh(mesh: Any, kind: str) -> None:
    if not hasattr(mesh, "ndim") or not hasattr(mesh, "get_group"):
        raise ArgumentTypeError(
            f"Parallel(mesh={mesh!r}): give a DeviceMesh, torch.distributed.init_device_mesh('cuda', (2, 4))."
        )
    if mesh.ndim not in (1, 2) or (kind == "replicate" and mesh.ndim == 2):
        raise ArgumentError(
            f"Parallel(kind={kind!r}) with a mesh of {mesh.ndim} dimensions: sharding takes one dimension, or two, of "
            'which the first is replicated over: Parallel(kind="shard", mesh=init_device_mesh("cuda", (2, 4))).'
        )
    size = world_size()
    if mesh.size() != size:
        raise ArgumentError(f"Parallel(mesh=...): the mesh has {mesh.size()} ranks, and there are {size}.")


def read_parallel(given: Any) -> Parallel | None:
    """The ``parallel=`` argument.

    Raises:
        ArgumentError, ArgumentTypeError: it can't be read.
    """
    if given is None or isinstance(given, Parallel):
        return given
    if given == "replicate" or given == "shard":
        return Parallel(kind=given)
    if isinstance(given, str):
        raise ArgumentError(
            f'parallel={given!r}: write "replicate", "shard" or pl.distributed.Parallel(...); None for one rank.'
        )
    raise ArgumentTypeError(
        f"parallel={given!r} of type {type(given).__name__}: "
        'write "replicate", "shard" or pl.distributed.Parallel(...).'
    )
