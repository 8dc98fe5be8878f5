"""``pl.diff``: where two runs part, after which algorithm or part of the loop, in which leaf, by which operation.

Two streams are compared step by step. Two recorded runs have kept States: the last that both have alike is found by
bisection, and from there one run of each is compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from typing import Literal, TypeAlias, overload

import attrs
from torch import Tensor, nn

from pure_loop._internal.arguments import check_flag, check_number
from pure_loop._internal.closing import closing
from pure_loop._internal.reprs import shown
from pure_loop._internal.suggestions import teaching
from pure_loop._internal.torch_private import Operation
from pure_loop.checkpoint.files import load
from pure_loop.checkpoint.flight import Flight, read_flight
from pure_loop.entry.arguments import NO_DIFFERENCE, Arguments, SettingsDifference
from pure_loop.errors import ArgumentError, ArgumentTypeError, RewindError
from pure_loop.event import Event
from pure_loop.loop.stream import Stream
from pure_loop.state import State
from pure_loop.time import Timestamp
from pure_loop.tools.steps import Parts, Step, is_same, steps
from pure_loop.verify.leaves import distance, leaves_of


@attrs.frozen(eq=False, repr=False)
class Divergence:
    """Where two runs part.

    Attributes:
        event: the first at which a leaf differs.
        timestamp: of the first run there.
        by: the algorithm, or the part of the loop, after which it does: ``"forward"``, ``"optimizer"``.
        leaf: the first leaf that differs: ``"grads/0.weight"``; ``"events"``: the runs have other events or algorithms.
        leaves: all leaves that differ after that step.
        a, b: the leaf in each run; None where it is not there.
        norm: the L2 norm of the difference; None where it has none.
        operation: the first operation of torch that gave other numbers; None: not recorded, or all gave the same.
        settings: the arguments of ``fit`` that differ.
    """

    event: Event
    timestamp: Timestamp
    by: str
    leaf: str
    leaves: tuple[str, ...]
    a: object
    b: object
    norm: float | None
    operation: str | None = None
    settings: SettingsDifference = NO_DIFFERENCE

    def __bool__(self) -> Literal[True]:  # so that type checkers tell it from NoDivergence
        return True

    def __str__(self) -> str:
        size = "" if self.norm is None else f", {self.norm:.3g} apart"
        more = f" and {len(self.leaves) - 1} more" if len(self.leaves) > 1 else ""
        place = _first_place(self.a, self.b)
        a, b = (
            _text(value) if place is None else f"{_text(value)}, number {place[0]} is {number!r}"
            for value, number in zip((self.a, self.b), place[1:] if place else (None, None), strict=True)
        )
        return (
            f"The runs part at {self.event.name}, {self.timestamp}, after {self.by}: {self.leaf}{more}{size}."
            f"\n  a: {a}\n  b: {b}"
            + ("" if self.operation is None else f"\n  operation: {self.operation}")
            + self.settings.below
        )

    __repr__ = __str__


@attrs.frozen(repr=False)
class NoDivergence:
    """Two runs in which nothing differs: it is false, so that ``if pl.diff(a, b)`` asks whether they part.

    Attributes:
        events: how many were compared; of recorded runs those after the last kept State that both have alike.
        tolerance: up to which; 0: bit for bit.
        settings: the arguments of ``fit`` that differ.
    """

    events: int
    tolerance: float = 0.0
    settings: SettingsDifference = NO_DIFFERENCE

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        how = f"up to a tolerance of {self.tolerance:g}" if self.tolerance else "bit for bit"
        text = f"The runs do not part: all {self.events:,} events that were compared are equal {how}."
        return text + self.settings.below

    __repr__ = __str__


def _first_place(a: object, b: object) -> tuple[int, object, object] | None:
    """Where two tensors of one shape differ first, and the numbers there."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
        return None
    first, second = a.detach().flatten(), b.detach().to(a.device).flatten()
    index = int(((first != second) & ~((first != first) & (second != second))).nonzero()[0])
    return index, first[index].item(), second[index].item()


def _text(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def diff_streams(
    a: Stream, b: Stream, tolerance: float, operations_from: float = math.inf, end: float = math.inf
) -> Divergence | NoDivergence:
    """:func:`diff` of two streams, until ``end`` batches are finished; operations are recorded from a batch on."""
    settings = [stream.settings or {} for stream in (a, b) if isinstance(stream, Stream)]
    differing = SettingsDifference.of(*settings) if len(settings) == 2 else NO_DIFFERENCE
    return attrs.evolve(_diff_steps(a, b, tolerance, operations_from, end), settings=differing)


def _diff_steps(
    a: Stream, b: Stream, tolerance: float, operations_from: float, end: float
) -> Divergence | NoDivergence:
    with ExitStack() as closing_both:
        # Each ends its stream, in both: they may hold files, workers and ranks.
        run_a, run_b = (
            closing_both.enter_context(closing(steps(stream, "diff", operations_from, copied=True)))
            for stream in (a, b)
        )
        events = 0
        for step_a, step_b in zip_longest(run_a, run_b):
            if step_a is None or step_b is None or (step_a.event, step_a.by) != (step_b.event, step_b.by):
                step = next(
                    (item for item in (step_a, step_b) if item is not None and item.is_algorithm), step_a or step_b
                )
                mine, theirs = (_where(item) for item in (step_a, step_b))
                return Divergence(step.event, step.state.timestamp, step.by, "events", ("events",), mine, theirs, None)
            divergence = first_difference(step_a, step_b, tolerance)
            if divergence is not None:
                return divergence
            if step_a.state.timestamp.batch > end:
                break
            events += not step_a.is_algorithm  # the first step of each event is the loop's
    return NoDivergence(events, tolerance)


def _where(step: Step | None) -> str:
    return "it has ended" if step is None else f"{step.event.name}, {step.by}"


def first_difference(a: Step, b: Step, tolerance: float) -> Divergence | None:
    leaves_a, leaves_b = leaves_of(a.state), leaves_of(b.state)
    absent: object = None
    leaves = [
        leaf
        for leaf in dict.fromkeys([*leaves_a, *leaves_b])
        if not (leaf in leaves_a and leaf in leaves_b and is_same(leaves_a[leaf], leaves_b[leaf], tolerance))
    ]
    if not leaves:
        return None
    leaf = leaves[0]
    x, y = leaves_a.get(leaf, absent), leaves_b.get(leaf, absent)
    operation = _first_operation(a.operations, b.operations)
    return Divergence(a.event, a.state.timestamp, a.by, leaf, tuple(leaves), x, y, distance(x, y), operation)


def _first_operation(a: Sequence[Operation], b: Sequence[Operation]) -> str | None:
    """The first operation that is another one, or returns other numbers."""
    for number, (first, second) in enumerate(zip(a, b, strict=False)):
        if first.name != second.name:
            return f"{first.name} in a, {second.name} in b (operation {number} of the step)"
        # Not by what it takes: memory that is about to be filled has any numbers.
        if first.outputs != second.outputs and not first.name.startswith(_CHECKS):
            inputs_differ = "" if first.inputs == second.inputs else ", which takes other tensors already"
            return f"{first.name} (operation {number} of the step{inputs_differ})"
    return None


# What the loop runs after a step, to find numbers that are not finite.
_CHECKS = ("aten._amp_foreach_non_finite_check_and_unscale_", "aten.empty")


@attrs.frozen
class _Run:
    """A recorded run: its record, the module, and what makes its stream from a State."""

    flight: Flight
    model: nn.Module
    make: Callable[[State], object]

    def state(self, batch: int) -> State:
        return load(self.flight.path(batch), model=self.model)

    def stream(self, batch: int) -> Stream:
        """
        Raises:
            ArgumentTypeError: what ``make`` returns is no stream.
            ArgumentError: it is not one of the State.
        """
        stream = self.make(self.state(batch))
        if not isinstance(stream, Stream):
            raise ArgumentTypeError(
                f"diff: make(state) of {self.flight.folder} returned a {type(stream).__name__}: return a stream, "
                "lambda state: pl.fit(state, train_dataloader, ...)."
            )
        if Parts.of(stream, "diff").state.timestamp.batch != batch:
            raise ArgumentError(
                f"diff: make(state) of {self.flight.folder} was given the State after {batch} batches, and its stream "
                "begins elsewhere: pass the State on, lambda state: pl.fit(state, train_dataloader, ...)."
            )
        return stream


def diff_recorded(a: object, b: object, *, tolerance: float, operations: bool) -> Divergence | NoDivergence:
    """:func:`pure_loop.diff` of two recorded runs."""
    run_a, run_b = (_read(name, item) for name, item in (("a", a), ("b", b)))
    common = sorted(run_a.flight.files.keys() & run_b.flight.files.keys())
    if not common:
        raise ArgumentError(
            "diff: both runs have kept no State after the same number of batches: a has those after "
            f"{_listed(run_a.flight)}, b those after {_listed(run_b.flight)}. Record both with the same keep=."
        )
    first = _first_other_line(run_a.flight, run_b.flight)
    start = _differ(run_a, run_b, common[0], tolerance)
    if start is not None:
        return start
    equal, end = _last_equal(run_a, run_b, common, first, tolerance)
    divergence = diff_streams(run_a.stream(equal), run_b.stream(equal), tolerance, end=end)
    if not divergence:
        if math.isinf(end):
            return divergence
        raise RewindError(
            f"diff: the recorded runs differ with {int(end)} batches finished, and trained again from {equal} on they "
            "do not: the streams that were made are not those of the runs (other data, settings or code), or a "
            "difference of the machine did not come back."
        )
    if not operations:
        return divergence
    batch = divergence.timestamp.batch - 1  # its own, where the event is after its end
    return diff_streams(run_a.stream(equal), run_b.stream(equal), tolerance, batch)


def _read(name: str, recording: object) -> _Run:
    """
    Raises:
        ArgumentTypeError: it is no recorded run.
    """
    if not (isinstance(recording, tuple) and len(recording) == 3):
        raise ArgumentTypeError(
            f"diff: {name}={recording!r}: of recorded runs write each as (folder, model, make), make a function of a "
            "State: lambda state: pl.fit(state, train_dataloader, ...). A stream can only be compared with a stream."
        )
    folder, model, make = recording
    if not isinstance(model, nn.Module) or not callable(make):
        raise ArgumentTypeError(
            f"diff: {name}=(folder, model, make) has a {type(model).__name__} and a {type(make).__name__}: the module, "
            "built as it was then, and a function of a State that makes the stream."
        )
    return _Run(read_flight(folder), model, make)


def _listed(flight: Flight) -> str:
    return f"{', '.join(map(str, list(flight.files)[:8])) or 'no'} batches"


def _first_other_line(a: Flight, b: Flight) -> float:
    """How many batches are finished at the first line of the journals that differs; infinite: none does."""
    for batch in sorted(a.lines.keys() & b.lines.keys()):
        line_a, line_b = a.lines[batch], b.lines[batch]
        digests = None not in (line_a.digest, line_b.digest) and line_a.digest != line_b.digest
        if digests or (line_a.loss != line_b.loss and not (math.isnan(line_a.loss) and math.isnan(line_b.loss))):
            return batch
    return math.inf


def _differ(a: _Run, b: _Run, batch: int, tolerance: float) -> Divergence | None:
    state_a, state_b = a.state(batch), b.state(batch)
    event = state_a.event or state_a.position or Event.INIT
    return first_difference(Step(event, "start", False, state_a), Step(event, "start", False, state_b), tolerance)


def _last_equal(a: _Run, b: _Run, common: list[int], first: float, tolerance: float) -> tuple[int, float]:
    """The last kept State that is the same, and after how many batches they surely differ; infinite: not known."""
    # With a tolerance a loss that differs by a bit says nothing.
    different = math.inf if tolerance else first
    low, high = 0, sum(batch < different for batch in common)
    while high - low > 1:
        middle = (low + high) // 2
        if _differ(a, b, common[middle], tolerance) is None:
            low = middle
        else:
            high, different = middle, min(different, common[middle])
    return common[low], different


# (folder, model, a function of a State that makes the stream from there on)
Recording: TypeAlias = tuple[str | os.PathLike[str], nn.Module, Callable[[State], Stream]]


@overload
def diff(
    a: Stream | Recording, b: Stream | Recording, *, tolerance: float = 0.0, operations: bool = False
) -> Divergence | NoDivergence: ...
@overload
def diff(a: Arguments, b: Arguments) -> SettingsDifference: ...
@teaching
def diff(
    a: Stream | Recording | Arguments,
    b: Stream | Recording | Arguments,
    *,
    tolerance: float = 0.0,
    operations: bool = False,
) -> Divergence | NoDivergence | SettingsDifference:
    """The first step at which two runs differ: both are run side by side, until they do or end.

    Of two recipes, the settings that differ. Of two runs they are named below the step.

    If nothing differs, what is returned is false, and says how many events were equal: ``assert not pl.diff(a, b)``.

    Compared are all leaves of both States, by value, after what the loop computed before each event and after each
    algorithm: what is named is the first that made a difference, and not the first event at which it was seen. Times by
    the clock are left out. Values are compared on the host: this is to debug with.

    Two recorded runs are given as ``(folder, model, make)`` each: the folder of a
    :class:`pure_loop.callbacks.FlightRecorder`, the module, built as it was then, and a function of a State that makes
    the stream of the run from there on. Of the States that both have kept the last that is the same is found by
    bisection, and the batches after it are trained once more.

    Args:
        a, b: what ``pl.fit(...)`` returned, not begun and not compiled; or a recorded run; or a recipe.
        tolerance: for runs on other devices: leaves with a difference of at most this, relative to the larger norm, are
            equal; 0: bit for bit.
        operations: name the operation of torch, too, that first returned other numbers: checksums of all of them are
            compared, which is slow. Of recorded runs that is the batch alone, in a second run of it. Kernels that
            return nothing, such as those of optimizers, are not among them.

    Raises:
        ArgumentTypeError: one is no stream of ``fit``, and no recorded run.
        ArgumentError: one has begun, or is compiled; a negative tolerance; recorded runs that have kept no State after
            the same number of batches.
        CheckpointNotFoundError: a folder has no record.
        RewindError: recorded States differ, and the runs that were trained again do not.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> def train(lr):
    ...     net = torch.nn.Linear(2, 1)
    ...     _ = [torch.nn.init.ones_(parameter) for parameter in net.parameters()]
    ...     return pl.fit(net, data, loss=torch.nn.functional.mse_loss, max_duration="1ep",
    ...                   optimizer=pl.optim.sgd(lr=lr))
    >>> diff(train(0.1), train(0.1))
    The runs do not part: all 48 events that were compared are equal bit for bit.
    >>> where = diff(train(0.1), train(0.2))
    >>> if where:
    ...     print(where.event.name, where.timestamp, where.by, where.leaf)
    BATCH_END epoch 0, batch 1 optimizer params/weight
    """
    tolerance = check_number("tolerance", tolerance, least=0, where="diff")
    operations = check_flag("operations", operations, where="diff")
    if isinstance(a, Arguments) or isinstance(b, Arguments):
        if isinstance(a, Arguments) and isinstance(b, Arguments):
            return SettingsDifference.of(a.settings, b.settings)
        raise ArgumentTypeError("diff compares two recipes, or two runs: pl.diff(recipe.fit(model), ...).")
    if isinstance(a, tuple | str | os.PathLike) or isinstance(b, tuple | str | os.PathLike):
        return diff_recorded(a, b, tolerance=tolerance, operations=operations)
    return diff_streams(a, b, tolerance, -math.inf if operations else math.inf)
