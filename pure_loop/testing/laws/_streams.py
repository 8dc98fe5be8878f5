"""Comparisons and runs of whole streams, which several laws share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import nn

from pure_loop.algorithm import Algorithm
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.entry.evaluate import evaluate, predict
from pure_loop.errors import PureLoopError
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing._surroundings import Surroundings, reseeded
from pure_loop.testing.case import Case, Fit, Pairs, Running
from pure_loop.testing.comparison import Comparer, Difference, differences
from pure_loop.testing.report import LawViolation, moment
from pure_loop.testing.subject import Subject

__all__ = [
    "ROUNDING",
    "TRAINING",
    "ending_early",
    "in_float64",
    "leaf_violation",
    "observed_run",
    "run_until_error",
    "same_events",
    "same_state",
    "same_stream",
    "same_under_other_generators",
    "standalone_streams",
    "training_states",
    "without_error",
]

TRAINING = frozenset({Event.BATCH_END, Event.EPOCH_END, Event.FIT_END})
"""The events at which the results of training are compared."""


# In float64 another order of the sums, or of a graph's, is a relative error of 1e-16, which a few steps amplify; a
# wrong weight is 1e-2.
ROUNDING = 1e-9


def in_float64(case: Case) -> Case:
    """The case for a comparison up to :data:`ROUNDING`."""
    # Momentum instead of AdamW, which turns a rounding error in a gradient that should be zero into a full step.
    return attrs.evolve(case, problem=case.problem.in_float64(), optimizer="sgd", precision="fp32")


def same_events(value: list[Event], wanted: list[Event], what: str) -> None:
    """Refuse a stream with other events than ``wanted``.

    Args:
        value, wanted: the events of the stream, and those that it should have.
        what: what the stream is, for the message.

    Raises:
        LawViolation: names the first event that differs.
    """
    if value == wanted:
        return
    index = next(
        (i for i, (a, b) in enumerate(zip(value, wanted, strict=False)) if a is not b), min(len(value), len(wanted))
    )
    event = value[index].name if index < len(value) else "the end of the stream"
    due = wanted[index].name if index < len(wanted) else "the end of the stream"
    after = f"after {wanted[index - 1].name}" if index else "at the start"
    raise LawViolation(
        f"{what}: {after} came {event}, expected {due} (event number {index}).",
        event=value[index] if index < len(value) else None,
    )


def same_state(value: State, wanted: State, what: str) -> None:
    """Refuse a State that is not equal to ``wanted``.

    Raises:
        LawViolation: names the first leaf that differs.
    """
    for difference in differences(value, wanted):
        raise leaf_violation(what, value, difference)


def leaf_violation(what: str, state: State, difference: Difference) -> LawViolation:
    """A violation in a leaf of a State."""
    return LawViolation(f"{what}: at {moment(state)}, a leaf differs.", event=state.event, difference=difference)


def same_stream(value: Pairs, wanted: Pairs, what: str) -> None:
    """Refuse a stream with events or States that are not equal to those of ``wanted``.

    Raises:
        LawViolation: names the first event, or the first leaf of a State, that differs.
    """
    same_events([event for event, _ in value], [event for event, _ in wanted], what)
    comparer = Comparer()
    for (_, a), (_, b) in zip(value, wanted, strict=True):
        if not comparer.equal(a, b):
            same_state(a, b, what)
            raise LawViolation(f"{what}: at {moment(a)}, a container has another type.", event=a.event)


def training_states(pairs: Pairs) -> list[State]:
    """The States after each batch and each epoch."""
    return [state for event, state in pairs if event in TRAINING]


def run_until_error(
    subject: Subject, case: Case, fit: Fit, algorithms: Sequence[Algorithm], start: nn.Module | None = None
) -> Pairs:
    """A run, then an evaluation and a prediction with the same algorithms; an error of an algorithm ends it early.

    It serves laws about single calls. That a run reaches its end is a law of its own, ``order``.

    Raises:
        LawViolation: raised during the run.
    """
    pairs: Pairs = []
    with ending_early("raised by algorithm"):
        for pair in case.stream(algorithms, fit=fit, start=start):
            pairs.append(pair)
        for stream in standalone_streams(subject, case, pairs[-1][1], algorithms):
            pairs.extend(stream)
    return pairs


@contextmanager
def ending_early(note: str = "") -> Iterator[None]:
    """An error of an algorithm ends the body early: one of the library, or one that the loop gave such a note."""
    try:
        yield
    except LawViolation:
        raise
    except Exception as error:
        notes: list[str] = getattr(error, "__notes__", [])
        if not isinstance(error, PureLoopError) and not any(item.startswith(note) for item in notes):
            raise


@contextmanager
def without_error(what: str, event: Event | None = None, advice: str = "") -> Iterator[None]:
    """An error in the body is a violation: ``what``, the run ended in it."""
    try:
        yield
    except LawViolation:
        raise
    except Exception as error:
        raise LawViolation(f"{what} ended in {type(error).__name__}: {error}", event=event, advice=advice) from error


def standalone_streams(
    subject: Subject, case: Case, state: State, algorithms: Sequence[Algorithm]
) -> Iterator[Running]:
    """The streams of ``pl.evaluate`` and ``pl.predict``, each where the algorithms are bound to its events."""
    bound = {event for _, event in subject.bound}
    data = case.problem.batches((2, 1), seed=7)
    if any(event.is_eval for event in bound):
        yield evaluate(state, {"test": data}, loss=case.problem.loss, algorithms=algorithms)
    if any(event.is_predict for event in bound):
        yield predict(state, data, algorithms=algorithms)


def same_under_other_generators(
    stream: Callable[[], Iterable[tuple[Event, State]]], subject: str, *, hastily: bool, advice: str = ""
) -> None:
    """Refuse a stream that depends on the global random state, or changes it or another setting of the process.

    Args:
        stream: makes the stream.
        subject: what runs, for the message.
        hastily: whether the settings that are slow to read are left out.
        advice: what to write instead.

    Raises:
        LawViolation: names the setting, or the first difference of two runs under different random states.
    """
    streams = []
    for seed in (11, 12):
        with reseeded(seed):
            around = Surroundings()
            pairs: Pairs = []
            for pair in stream():
                pairs.append(pair)
                changed = around.changed(hastily=hastily)
                if changed is not None:
                    event = pair[0]
                    raise LawViolation(f"{subject} changed {changed} before {event.name}.", event=event, advice=advice)
            streams.append(pairs)
    same_stream(streams[1], streams[0], "the same run under another global random state")


class _BusyObserver(Callback):
    """Draws random numbers, keeps every State, computes with its tensors, and changes nothing."""

    def __init__(self) -> None:
        self.kept: list[State] = []

    def run_event(self, event: Event, state: State, logger: LoggerGroup) -> None:
        torch.rand(3)
        random.random()
        self.kept.append(state)
        sum(float(tensor.detach().sum()) for tensor in state.params.values())
        logger.log_metrics({"observer": 1.0}, state)


def observed_run(stream: Callable[..., Running]) -> Pairs:
    """All pairs of a stream with callbacks attached that draw random numbers, in a loop body that draws too."""
    pairs: Pairs = []
    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            for pair in stream(callbacks=[_BusyObserver(), lambda event, state: None]):
                torch.rand(5)
                pairs.append(pair)
    finally:
        random.setstate(before)
    return pairs
