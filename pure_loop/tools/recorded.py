"""``pl.diff`` of two recorded runs: the last kept State that both have alike, by bisection, and one run from there."""

from __future__ import annotations

import math
from typing import Any

import attrs
from torch import nn

from pure_loop.checkpoint.files import load
from pure_loop.checkpoint.flight import Flight, read_flight
from pure_loop.errors import ArgumentError, ArgumentTypeError, RewindError
from pure_loop.loop.stream import Stream
from pure_loop.state import State
from pure_loop.tools.divergence import Divergence, diff_streams, first_difference
from pure_loop.tools.parts import Parts
from pure_loop.tools.steps import Step

__all__ = ["diff_recorded"]


@attrs.frozen
class _Run:
    """A recorded run: its record, the module, and what makes its stream from a State."""

    flight: Flight
    model: nn.Module
    make: Any

    def state(self, batch: int) -> State:
        return load(self.flight.path(batch), model=self.model)

    def stream(self, batch: int) -> Stream:
        """
        Raises:
            ArgumentTypeError: what ``make`` returns is no stream.
            ArgumentError: it is not one of the State.
        """
        stream: Any = self.make(self.state(batch))
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


def diff_recorded(a: Any, b: Any, *, tolerance: float, operations: bool) -> Divergence | None:
    """:func:`pure_loop.diff` of two recorded runs."""
    one, other = (_read(name, item) for name, item in (("a", a), ("b", b)))
    common = sorted(one.flight.kept.keys() & other.flight.kept.keys())
    if not common:
        raise ArgumentError(
            "diff: both runs have kept no State after the same number of batches: a has those after "
            f"{_listed(one.flight)}, b those after {_listed(other.flight)}. Record both with the same keep=."
        )
    first = _first_other_line(one.flight, other.flight)
    start = _differ(one, other, common[0], tolerance)
    if start is not None:
        return start
    equal, end = _last_equal(one, other, common, first, tolerance)
    divergence = diff_streams(one.stream(equal), other.stream(equal), tolerance, end=end)
    if divergence is None:
        if math.isinf(end):
            return None
        raise RewindError(
            f"diff: the recorded runs differ with {int(end)} batches finished, and trained again from {equal} on they "
            "do not: the streams that were made are not those of the runs (other data, settings or code), or a "
            "difference of the machine did not come back."
        )
    if not operations:
        return divergence
    batch = divergence.timestamp.batch - 1  # its own, where the event is after its end
    return diff_streams(one.stream(equal), other.stream(equal), tolerance, batch)


def _read(name: str, recording: Any) -> _Run:
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
    return f"{', '.join(map(str, list(flight.kept)[:8])) or 'no'} batches"


def _first_other_line(one: Flight, other: Flight) -> float:
    """How many batches are finished at the first line of the journals that differs; infinite: none does."""
    for batch in sorted(one.lines.keys() & other.lines.keys()):
        a, b = one.lines[batch], other.lines[batch]
        digests = None not in (a.digest, b.digest) and a.digest != b.digest
        if digests or (a.loss != b.loss and not (math.isnan(a.loss) and math.isnan(b.loss))):
            return batch
    return math.inf


def _differ(one: _Run, other: _Run, batch: int, tolerance: float) -> Divergence | None:
    a, b = one.state(batch), other.state(batch)
    event: Any = a.position if a.event is None else a.event
    return first_difference(Step(event, "start", False, a), Step(event, "start", False, b), tolerance)


def _last_equal(one: _Run, other: _Run, common: list[int], first: float, tolerance: float) -> tuple[int, float]:
    """The last kept State that is the same, and after how many batches they surely differ; infinite: not known."""
    # With a tolerance a loss that differs by a bit says nothing.
    known = math.inf if tolerance else first
    low, high = 0, sum(batch < known for batch in common)
    while high - low > 1:
        middle = (low + high) // 2
        if _differ(one, other, common[middle], tolerance) is None:
            low = middle
        else:
            high, known = middle, min(known, common[middle])
    return common[low], known
