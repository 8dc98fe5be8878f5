"""Laws of invariance: training does not depend on microbatches, evaluation or observers."""

from __future__ import annotations

import contextlib

from pure_loop import optim
from pure_loop.callback import Callback, Logger
from pure_loop.evaluator import Evaluator
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.comparison import close, differences
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import (
    ROUNDING,
    in_float64,
    leaf_violation,
    observed_run,
    same_stream,
    training_states,
)
from pure_loop.testing.problems import PROBLEMS
from pure_loop.testing.report import LawViolation, moment
from pure_loop.testing.subject import AlgorithmSubject

__all__ = ["evaluation_invariance", "microbatch_invariance", "observer_invariance"]

_SOUND = ("purity", "memory", "order", "value")


@law(
    "training does not depend on the microbatch size, also where the last microbatch is smaller",
    rests_on=_SOUND,
    serves=lambda problem: problem.separable,
    serves_what="separable: the loss of a batch is the mean of the losses of its samples",
)
def microbatch_invariance(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains in whole batches and in microbatches, in float64; equal gradients where all sums are exact."""
    if case.problem is PROBLEMS["exact"] and not subject.names:
        _exactly(case, fit)
    case = in_float64(case)
    unsplit = _at_batches(case.run(subject.make(), fit=fit, microbatch_size=None))
    for size in sorted({case.plan.microbatch_size or 1, 1, max(case.plan.batches) - 1} - {0}):
        split = _at_batches(case.run(subject.make(), fit=fit, microbatch_size=size))
        if len(split) != len(unsplit):
            raise LawViolation(
                f"in microbatches of {size} there were {len(split)} steps, in whole batches {len(unsplit)}."
            )
        for value, wanted in zip(split, unsplit, strict=True):
            _close(value, wanted, size)
        for value, wanted in zip(split, unsplit, strict=True):
            if value.event is Event.BATCH_END:
                _close_algorithm_state(subject, value, wanted, size)


def _exactly(case: Case, fit: Fit) -> None:
    """Compares gradients number by number, on a problem of parameters that stay integers."""

    def gradients(size: int | None) -> list[State]:
        optimizer = optim.sgd(lr=0.0)
        stream = case.stream(fit=fit, microbatch_size=size, optimizer=optimizer, clip_grad=None, precision="fp32")
        return [state for event, state in stream if event is Event.AFTER_TRAIN_BATCH]

    unsplit = gradients(None)
    for size in range(1, max(case.plan.batches) + 1):
        for value, wanted in zip(gradients(size), unsplit, strict=True):
            # Not by bits: a sum of zeros has another sign in another order.
            difference = close(value.grads, wanted.grads, tolerance=0.0, name="state.grads")
            if difference is not None:
                raise LawViolation(
                    f"in microbatches of {size} the gradient differs at {moment(value)}, although all sums are exact.",
                    event=value.event,
                    difference=difference,
                    labels=("microbatches", "whole batch"),
                )


def _at_batches(pairs: Pairs) -> list[State]:
    """The States at AFTER_TRAIN_BATCH and BATCH_END."""
    return [state for event, state in pairs if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END)]


def _close(value: State, wanted: State, size: int) -> None:
    for field in ("grads", "loss", "params"):
        _refuse(value, getattr(value, field), getattr(wanted, field), f"state.{field}", size, _OF_TRAINING)


def _close_algorithm_state(subject: AlgorithmSubject, value: State, wanted: State, size: int) -> None:
    for name in subject.names:
        pair = value.algorithm_state.get(name), wanted.algorithm_state.get(name)
        _refuse(value, *pair, f"state.algorithm_state[{name!r}]", size, _OF_ALGORITHM_STATE)


def _refuse(state: State, value: object, wanted: object, name: str, size: int, advice: str) -> None:
    difference = close(value, wanted, tolerance=ROUNDING, name=name)
    if difference is not None:
        raise LawViolation(
            f"with microbatches of {size}, the result differs from that of whole batches at {moment(state)}.",
            event=state.event,
            difference=difference,
            labels=("microbatches", "whole batch"),
            advice=advice,
        )


_OF_TRAINING = (
    "Weight a mean over a microbatch by its number of samples. Do what should happen once a batch at an event that "
    "comes once a batch, such as AFTER_TRAIN_BATCH or BATCH_END."
)
_OF_ALGORITHM_STATE = (
    "At the end of a batch, the algorithm's state must not depend on how the batch was split. Weight a mean over "
    "microbatches by their numbers of samples, and reset counts within a batch at AFTER_TRAIN_BATCH."
)


@law("evaluation changes nothing in training", rests_on=(*_SOUND, "determinism", "visibility"))
def evaluation_invariance(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains with and without evaluators."""
    if case.plan.evaluators:
        evaluated = subject.alone(case, fit)
    else:
        evaluators = {"val": Evaluator(case.problem.batches((2, 1), seed=7), interval="1ba")}
        evaluated = case.run(subject.make(), fit=fit, evaluators=evaluators)
    _same_training(
        evaluated,
        case.run(subject.make(), fit=fit, evaluators=None),
        "with evaluators, training differed",
        "An algorithm may take part in evaluation (EMA puts in its average), but values that training reads must not "
        "depend on it: evaluation may come at other times, or not at all.",
        # An algorithm may count evaluations in its state; if training reads that, other fields differ as well.
        frozenset({"metrics", *(("algorithm_state",) if subject.names else ())}),
    )


class _Raising(Callback):
    """Raises at one of its calls."""

    def __init__(self, calls: int) -> None:
        self._calls = calls

    def run_event(self, event: Event, state: State, logger: object) -> None:
        self._calls -= 1
        if self._calls < 0:
            raise _RaisedError


class _RaisedError(Exception):
    """Raised by an observer."""


@law("callbacks, loggers and the loop's body change nothing", rests_on=(*_SOUND, "determinism"))
def observer_invariance(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains without observers, with busy ones, and with one that raises; the States up to the error must be equal."""
    alone = subject.alone(case, fit)
    observed = observed_run(lambda **arguments: case.stream(subject.make(), fit=fit, loggers=[Logger()], **arguments))
    same_stream(observed, alone, "with callbacks, the run differed")
    pairs: Pairs = []
    calls = (case.seed * 13 + 9) % (len(alone) + 1)
    with contextlib.suppress(_RaisedError):
        for pair in case.stream(subject.make(), fit=fit, callbacks=[_Raising(calls)]):
            pairs.append(pair)
    same_stream(pairs, alone[: len(pairs)], "before a callback raised, the run differed")


def _same_training(value: Pairs, wanted: Pairs, what: str, advice: str, without: frozenset[str]) -> None:
    states, wanted_states = training_states(value), training_states(wanted)
    if len(states) != len(wanted_states):
        raise LawViolation(f"{what}: {len(states)} batches and epochs, not {len(wanted_states)}.")
    for state, wanted_state in zip(states, wanted_states, strict=True):
        for difference in differences(state, wanted_state, without=without):
            violation = leaf_violation(what, state, difference)
            violation.advice = advice
            raise violation
