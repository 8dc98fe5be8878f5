"""``Parallel``: the settings of training on several ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import attrs
from torch import nn

from pure_loop._internal.arguments import as_float, check_callable, check_choice, check_number, is_number
from pure_loop._internal.processes import machines, others, rank, torch_distributed, world, world_size
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.time import Time, TimeUnit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from pure_loop.distributed.layout import Layout

_PARALLEL = "Parallel"  # in errors
_ON_PURPOSE = "or parallel=False, if each is a run of its own on purpose"


def refuse_lone(parallel: Parallel | None) -> None:
    """Refuse what would be n trainings of one model by n processes that a launcher started.

    Raises:
        ArgumentError: there are several ranks and no ``parallel=``, or a launcher started several processes that do not
            know of each other.
        DistributedError: what the launcher says can't be read, or not where rank 0 is.
    """
    grouped, size = torch_distributed() is not None, world_size()
    if size > 1 and parallel is None:
        source = "its process group" if grouped else world().launcher
        raise ArgumentError(
            f"parallel=None, and this process is rank {rank()} of {size}, by {source}: each rank would do all of the "
            f'work, apart from the others. Write parallel="replicate" or parallel="shard", and they do it together; '
            f"{_ON_PURPOSE}."
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE") == "1":
        for says, _ in machines():
            raise ArgumentError(
                f"{says}, and torchrun started this one, and knows of no other torchrun: each would train a model of "
                "its own. Give torchrun --nnodes, --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, and start one on "
                f"each machine; or let the launcher start the ranks, without torchrun; {_ON_PURPOSE}."
            )
    for says, remedy in others() if size == 1 else ():
        by = "by WORLD_SIZE=1" if os.environ.get("WORLD_SIZE") else "without RANK and WORLD_SIZE"
        raise ArgumentError(
            f"{says}, and {'by its process group' if grouped else by} this one is alone: each would train a model of "
            f"its own. {remedy}; {_ON_PURPOSE}."
        )
    if size > 1 and not grouped:
        _ = world().address


@attrs.frozen
class Parallel:
    """How several ranks train one model: ``fit(..., parallel=Parallel(...))``, started by a launcher.

    ``parallel="replicate"`` is ``Parallel()``, and ``parallel="shard"`` is ``Parallel(kind="shard")``.

    Args:
        kind: ``"replicate"``: every rank holds the whole model (torch's DistributedDataParallel averages gradients);
            ``"shard"``: every rank holds a shard of each parameter, gradient and tensor of the optimizer state (torch's
            ``fully_shard``). With a mesh of two dimensions, parameters are replicated and sharded.
        mesh: for ``"shard"``: a DeviceMesh of one dimension, or of two: replicated over the first and sharded over the
            second (HSDP). None: one dimension, all ranks. With ``parallelize``, for both kinds: one dimension is called
            "tp", and those besides are the data's: none, one, or with ``"shard"`` two. Ranks that differ in "tp" alone
            compute one model together, on the same samples.
        parallelize: tensor parallelism: ``(module, mesh) -> module``, or None where it changes the module in place, as
            torch's ``parallelize_module(module, mesh, plan)`` does; ``mesh`` is of one dimension, "tp". It is called
            with a copy of the module on the meta device, after INIT.
        data: ``"split"``: every rank is given the same dataloader, and takes its part of each batch, so that
            ``batch_size`` is that of the whole batch and n ranks train as one does; ``"own"``: each rank passes a
            dataloader of its own samples. None: ``"own"`` for a DataLoader with a DistributedSampler, else ``"split"``.
        uneven: with ``data="own"`` ranks may have different numbers of batches. ``"stop"``: the epoch ends on all
            ranks when the first one runs out; ``"pad"``: when the last one does, and until then the others take part
            with weight 0.
        timeout: how long a rank waits for another one: seconds, or ``"5m"``.
        find_unused_parameters: for ``"replicate"``: whether some batches don't reach all parameters. None: whether the
            first batch doesn't. If True, the graph of every batch is searched; if False, a batch that doesn't reach a
            parameter is an error.
        bucket_cap_mb: for ``"replicate"``: the megabytes of gradients that are exchanged at a time; None: torch's
            default.
        groups: for ``"shard"``: ``(name, module) -> bool``: the submodules that are gathered as one. None: the elements
            of each ``nn.ModuleList`` and ``nn.Sequential`` that have parameters.

    Raises:
        ArgumentError, ArgumentTypeError: a value out of range, or of another type.

    >>> Parallel("shard", timeout="30s").seconds
    30.0
    """

    kind: Literal["replicate", "shard"] = "replicate"
    mesh: DeviceMesh | None = attrs.field(default=None, kw_only=True)
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None] | None = attrs.field(default=None, kw_only=True)
    data: Literal["split", "own"] | None = attrs.field(default=None, kw_only=True)
    uneven: Literal["stop", "pad"] = attrs.field(default="stop", kw_only=True)
    timeout: str | float = attrs.field(default="5m", kw_only=True)
    find_unused_parameters: bool | None = attrs.field(default=None, kw_only=True)
    bucket_cap_mb: float | None = attrs.field(default=None, kw_only=True)
    groups: Callable[[str, nn.Module], bool] | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_choice("kind", self.kind, ("replicate", "shard"), where=_PARALLEL)
        check_choice("data", self.data, ("split", "own", None), where=_PARALLEL)
        check_choice("uneven", self.uneven, ("stop", "pad"), where=_PARALLEL)
        check_choice("find_unused_parameters", self.find_unused_parameters, (True, False, None), where=_PARALLEL)
        if self.groups is not None:
            check_callable("groups", self.groups, "a function (name, module) -> bool, or None", where=_PARALLEL)
        if self.bucket_cap_mb is not None:
            wanted = "a number above 0, or None"
            check_number("bucket_cap_mb", self.bucket_cap_mb, where=_PARALLEL, above=0, wanted=wanted)
        if self.parallelize is not None:
            wanted = "a function (module, mesh) that calls torch's parallelize_module, or None"
            check_callable("parallelize", self.parallelize, wanted, where=_PARALLEL)
        if self.mesh is not None or self.parallelize is not None:
            from pure_loop.distributed.layout import check_mesh  # no other run needs it

            check_mesh(self.mesh, self.kind, is_cut=self.parallelize is not None)
        unused = ("bucket_cap_mb", "find_unused_parameters") if self.in_parts else ("mesh", "groups")
        kind = f"{self.kind!r}" if self.parallelize is None else f"{self.kind!r}, parallelize=..."
        for name in unused:
            if getattr(self, name) is not None:
                raise ArgumentError(f"Parallel({kind}, {name}=...): {kind} has no use for {name}.")
        _ = self.seconds

    @property
    def in_parts(self) -> bool:
        """Whether a rank holds parts of parameters: of all of them, or of the layers that are cut."""
        return self.kind == "shard" or self.parallelize is not None

    @property
    def layout(self) -> Layout:
        """Which ranks have the same data."""
        from pure_loop.distributed.layout import Layout  # no run of one rank needs it

        return Layout.of(None if self.parallelize is None else self.mesh)

    @property
    def seconds(self) -> float:
        """The timeout in seconds."""
        argument = self.timeout
        if is_number(argument):
            seconds = as_float(argument)
        else:
            try:
                time = Time.parse(argument)  # type: ignore[arg-type]  # a text, or a bool, which it refuses
            except (ArgumentError, ArgumentTypeError) as error:
                raise type(error)(f"Parallel(timeout={argument!r}): {error}") from None
            if time.unit is not TimeUnit.SECOND:
                raise ArgumentError(f'Parallel(timeout={argument!r}): give seconds, or a text such as "5m".')
            seconds = float(time.value)
        if not 0 < seconds < math.inf:
            raise ArgumentError(f'Parallel(timeout={argument!r}): give seconds above 0, or a text such as "5m".')
        return seconds


def read_parallel(value: object) -> Parallel | None:
    """The ``parallel=`` argument.

    Raises:
        ArgumentError, ArgumentTypeError: it can't be read.
    """
    if value is None or value is False:
        return None
    if isinstance(value, Parallel):
        return value
    if value == "replicate" or value == "shard":
        return Parallel(kind=value)
    if isinstance(value, str):
        raise ArgumentError(f'parallel={value!r}: write "replicate", "shard" or pl.distributed.Parallel(...).')
    raise ArgumentTypeError(
        f"parallel={value!r} of type {type(value).__name__}: "
        'write "replicate", "shard" or pl.distributed.Parallel(...); False, if this process runs on its own.'
    )
