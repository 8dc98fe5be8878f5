"""Laws of invariance: what must make no difference to training."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs

import pure_loop as pl
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.comparison import close, differences
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import found, nosy_run, same_stream, training_states
from pure_loop.testing.problems import PROBLEMS
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation, moment

__all__ = ["evaluation_invariance", "microbatch_invariance", "observer_invariance"]

_SOUND = ("purity", "memory", "order", "value")

# In float64 another order of the sums is off by 1e-16; a few steps make it more, and a wrong weight makes it 1e-2.
_ROUNDING = 1e-9


@law(
    "training does not depend on the microbatch size, ragged last microbatches included",
    rests_on=_SOUND,
    serves=lambda problem: problem.separable,
    serves_what="separable: the loss of a batch is the mean of those of its samples",
)
def microbatch_invariance(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains in whole batches and in microbatches, in float64; bitwise equal gradients where all sums are exact."""
    if case.problem is PROBLEMS["exact"] and not subject.names:
        _exactly(case, fit)
    # Momentum instead of AdamW, which makes a whole step of what is rounding where a gradient should be zero.
    case = attrs.evolve(case, problem=case.problem.in_float64(), optimizer="sgd", precision="fp32")
    whole = _at_batches(case.run(subject.make(), fit=fit, microbatch_size=None))
    for size in sorted({case.plan.microbatch_size or 1, 1, max(case.plan.batches) - 1} - {0}):
        split = _at_batches(case.run(subject.make(), fit=fit, microbatch_size=size))
        if len(split) != len(whole):
            raise LawViolation(
                f"in microbatches of {size} there were {len(split)} steps, and {len(whole)} in whole ones."
            )
        for given, wanted in zip(split, whole, strict=True):
            _close(given, wanted, size)
        for given, wanted in zip(split, whole, strict=True):
            if given.event is Event.BATCH_END:
                _close_memory(subject, given, wanted, size)


def _exactly(case: Case, fit: Fit) -> None:
    """Gradients where the parameters stay whole numbers."""

    def gradients(size: int | None) -> list[State]:
        still = pl.optim.sgd(lr=0.0)
        stream = case.stream(fit=fit, microbatch_size=size, optimizer=still, clip_grad=None, precision="fp32")
        return [state for event, state in stream if event is Event.AFTER_TRAIN_BATCH]

    whole = gradients(None)
    for size in range(1, max(case.plan.batches) + 1):
        for given, wanted in zip(gradients(size), whole, strict=True):
            for difference in differences(given.grads, wanted.grads, name="state.grads"):
                raise LawViolation(
                    f"in microbatches of {size} the gradient is another, at {moment(given)}, where all sums are exact.",
                    event=given.event,
                    difference=difference,
                    labels=("microbatches", "whole"),
                )


def _at_batches(pairs: Pairs) -> list[State]:
    """The States at AFTER_TRAIN_BATCH and BATCH_END."""
    return [state for event, state in pairs if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END)]


def _close(given: State, wanted: State, size: int) -> None:
    for field in ("grads", "loss", "params"):
        _refuse(given, getattr(given, field), getattr(wanted, field), f"state.{field}", size, _OF_TRAINING)


def _close_memory(subject: AlgorithmSubject, given: State, wanted: State, size: int) -> None:
    for name in subject.names:
        memories = given.algorithm_state.get(name), wanted.algorithm_state.get(name)
        _refuse(given, *memories, f"state.algorithm_state[{name!r}]", size, _OF_MEMORY)


def _refuse(state: State, given: Any, wanted: Any, name: str, size: int, advice: str) -> None:
    difference = close(given, wanted, tolerance=_ROUNDING, name=name)
    if difference is not None:
        raise LawViolation(
            f"in microbatches of {size} something else came out than in whole batches, at {moment(state)}.",
            event=state.event,
            difference=difference,
            labels=("microbatches", "whole"),
            advice=advice,
        )


_OF_TRAINING = (
    "What is a mean over a microbatch counts as many samples as that holds; what happens once a batch belongs to an "
    "event that comes once a batch, such as AFTER_TRAIN_BATCH or BATCH_END."
)
_OF_MEMORY = (
    "What it remembers when a batch is over must not tell how the batch was split. A mean over microbatches weighs "
    "each by the samples that it holds; what is counted within a batch is put back at AFTER_TRAIN_BATCH."
)


@law("evaluation changes nothing in training", rests_on=(*_SOUND, "determinism", "visibility"))
def evaluation_invariance(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains with and without evaluators."""
    if case.plan.evaluators:
        evaluated = subject.alone(case, fit)
    else:
        evaluators = {"val": pl.Evaluator(case.problem.batches((2, 1), seed=7), interval="1ba")}
        evaluated = case.run(subject.make(), fit=fit, evaluators=evaluators)
    _same_training(
        evaluated,
        case.run(subject.make(), fit=fit, evaluators=None),
        "with evaluators, training came to something else",
        "An algorithm may take part in evaluation (EMA hands over its average), and leaves no trace of it in what "
        "training reads: evaluation comes at other times, or not at all.",
        # What an algorithm remembers of evaluations matters where training reads it, and then there is more to see.
        frozenset({"metrics", *(("algorithm_state",) if subject.names else ())}),
    )


class _Raising(pl.Callback):
    """Raises at one call."""

    def __init__(self, calls: int) -> None:
        self._calls = calls

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        self._calls -= 1
        if self._calls < 0:
            raise _RaisedError


class _RaisedError(Exception):
    """What an observer raised."""


@law("callbacks, loggers and the loop's body change nothing", rests_on=(*_SOUND, "determinism"))
def observer_invariance(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains alone, watched by nosy observers, and with one that raises; what was yielded before stays what it is."""
    alone = subject.alone(case, fit)
    watched = nosy_run(lambda **arguments: case.stream(subject.make(), fit=fit, loggers=[pl.Logger()], **arguments))
    same_stream(watched, alone, "watched by callbacks, the run was another")
    raised: Pairs = []
    calls = (case.seed * 13 + 9) % (len(alone) + 1)
    with contextlib.suppress(_RaisedError):
        for pair in case.stream(subject.make(), fit=fit, callbacks=[_Raising(calls)]):
            raised.append(pair)
    same_stream(raised, alone[: len(raised)], "before a callback raised, the run was another")


def _same_training(given: Pairs, wanted: Pairs, what: str, advice: str, without: frozenset[str]) -> None:
    one, other = training_states(given), training_states(wanted)
    if len(one) != len(other):
        raise LawViolation(f"{what}: {len(one)} batches and epochs, not {len(other)}.")
    for a, b in zip(one, other, strict=True):
        for difference in differences(a, b, without=without):
            violation = found(what, a, difference)
            violation.advice = advice
            raise violation
