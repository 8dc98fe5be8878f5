"""What laws say of whole streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

import pure_loop as pl
from pure_loop.errors import PureLoopError
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.comparison import Comparer, Difference, differences
from pure_loop.testing.subject import Subject
from pure_loop.testing.violation import LawViolation, moment

__all__ = [
    "TRAINING",
    "as_far_as_it_goes",
    "found",
    "nosy_run",
    "outside_fit",
    "same_events",
    "same_state",
    "same_stream",
    "training_states",
]

TRAINING = frozenset({Event.BATCH_END, Event.EPOCH_END, Event.FIT_END})
"""The events at which training has come to something."""


def same_events(given: list[Event], wanted: list[Event], what: str) -> None:
    """
    Raises:
        LawViolation: names the first event that differs.
    """
    if given == wanted:
        return
    index = next(
        (i for i, (a, b) in enumerate(zip(given, wanted, strict=False)) if a is not b), min(len(given), len(wanted))
    )
    came = given[index].name if index < len(given) else "nothing"
    due = wanted[index].name if index < len(wanted) else "nothing"
    after = f"after {wanted[index - 1].name}" if index else "as the first event"
    raise LawViolation(
        f"{what}: {after} came {came}, and {due} should have come (event number {index}).",
        event=given[index] if index < len(given) else None,
    )


def same_state(given: State, wanted: State, what: str) -> None:
    """
    Raises:
        LawViolation: names the first leaf that differs.
    """
    for difference in differences(given, wanted):
        raise found(what, given, difference)


def found(what: str, state: State, difference: Difference) -> LawViolation:
    """A violation in a leaf of a State."""
    return LawViolation(f"{what}: at {moment(state)}, a leaf is another.", event=state.event, difference=difference)


def same_stream(given: Pairs, wanted: Pairs, what: str) -> None:
    """
    Raises:
        LawViolation: names the first event, or the first leaf of a State, that differs.
    """
    same_events([event for event, _ in given], [event for event, _ in wanted], what)
    comparer = Comparer()
    for (_, a), (_, b) in zip(given, wanted, strict=True):
        if not comparer.equal(a, b):
            same_state(a, b, what)
            raise LawViolation(f"{what}: at {moment(a)}, a container is of another kind.", event=a.event)


def training_states(pairs: Pairs) -> list[State]:
    """What training came to at each batch and epoch."""
    return [state for event, state in pairs if event in TRAINING]


def as_far_as_it_goes(subject: Subject, case: Case, fit: Fit, **arguments: Any) -> Pairs:
    """A run, and then an evaluation and a prediction with the same algorithms; ends early where something raises.

    For laws about single calls, which have nothing to say of errors: that a run comes to its end is another law.

    Raises:
        LawViolation: raised inside of it.
    """
    pairs: Pairs = []
    try:
        for pair in case.stream(fit=fit, **arguments):
            pairs.append(pair)
        for stream in outside_fit(subject, case, pairs[-1][1], arguments["algorithms"]):
            pairs.extend(stream)
    except LawViolation:
        raise
    except Exception as error:
        if not isinstance(error, PureLoopError) and not _raised_inside(error):
            raise
    return pairs


def outside_fit(subject: Subject, case: Case, state: State, algorithms: Any) -> Iterator[Any]:
    """Streams of an evaluation and a prediction by themselves, where the algorithms are bound to such events."""
    bound = {event for _, event in subject.bound}
    data = case.problem.batches((2, 1), seed=7)
    if any(event.is_eval for event in bound):
        yield pl.evaluate(state, {"test": data}, loss=case.problem.loss, algorithms=algorithms)
    if any(event.is_predict for event in bound):
        yield pl.predict(state, data, algorithms=algorithms)


def _raised_inside(error: BaseException) -> bool:
    """Whether an algorithm raised it, by the note that the driver leaves."""
    return any(note.startswith("raised by algorithm") for note in getattr(error, "__notes__", ()))


class _Nosy(pl.Callback):
    """Draws random numbers, keeps what it sees, computes with it, and changes nothing."""

    def __init__(self) -> None:
        self.kept: list[State] = []

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        torch.rand(3)
        random.random()
        self.kept.append(state)
        sum(float(tensor.detach().sum()) for tensor in state.params.values())
        logger.log_metrics({"nosy": 1.0}, state)


def nosy_run(stream: Callable[..., Any]) -> Pairs:
    """All pairs of a stream, watched by callbacks that draw random numbers, in a body that does too."""
    watched: Pairs = []
    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            for pair in stream(callbacks=[_Nosy(), lambda event, state: None]):
                torch.rand(5)
                watched.append(pair)
    finally:
        random.setstate(before)
    return watched
