"""Laws of callbacks and loggers: they work in every run, change nothing, and close what they open.

>>> import pure_loop as pl
>>> from pure_loop.testing import laws
>>> laws.of_callbacks.closing(pl.callbacks.SpeedMonitor, max_examples=2)
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TypedDict

from hypothesis.strategies import SearchStrategy

from pure_loop.algorithm import Algorithm, Composition
from pure_loop.callback import Callback, CallbackLike, Logger, LoggerGroup
from pure_loop.entry.evaluate import evaluate, predict
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.hooks import Observer
from pure_loop.observer import observers
from pure_loop.order import BOUNDARIES, EvaluatorPlan, Plan, expected, expected_evaluate, expected_predict
from pure_loop.random.guards import guard
from pure_loop.state import State
from pure_loop.testing._surroundings import Surroundings
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.comparison import Snapshot
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_events, same_stream, without_error
from pure_loop.testing.report import LawViolation, broken_off, moment, written_to
from pure_loop.testing.subject import Problems, Subject, assigned, drawn_from, fresh_copies

__all__ = ["closing", "completion", "joining", "observer_invariance", "purity"]


class Attached(TypedDict, total=False):
    """Arguments of ``fit`` that attach observers."""

    callbacks: list[CallbackLike]
    loggers: list[Logger]


class CallbackSubject(Subject):
    """A callback on trial; every run gets a fresh instance.

    Args:
        value: a function without arguments that makes a callback, a logger or a function of ``(event, state)``; or a
            callback, which is copied as it is now.
        problems, plans: of the cases, as in :func:`pure_loop.testing.check_callback`.

    Raises:
        ArgumentTypeError: ``value`` is not, and does not make, a callback.

    >>> import pure_loop as pl
    >>> CallbackSubject(pl.callbacks.SpeedMonitor).name
    'SpeedMonitor'
    """

    kind = "callback"
    laws = "testing.laws.of_callbacks"
    called = "make_callback"

    def __init__(self, value: object, problems: Problems = None, plans: SearchStrategy[Plan] | None = None) -> None:
        if isinstance(value, Algorithm | Composition) or not (callable(value) or isinstance(value, Callback)):
            raise ArgumentTypeError(
                f"check_callback({value!r}): give a function that makes a callback, such as its class. For an "
                "algorithm, use check_algorithm."
            )
        self._make: Callable[[], CallbackLike] = fresh_copies(value) if isinstance(value, Callback) else value
        result = self.make()
        name = getattr(result, "__name__", type(result).__name__)
        super().__init__(
            name,
            ((name, event) for event in self.table(result)),
            drawn_from(problems, plans),
            assigned(self.called, value),
        )

    @classmethod
    def made_of(cls, value: object) -> CallbackSubject:
        return value if isinstance(value, cls) else cls(value)

    def make(self) -> CallbackLike:
        """A fresh instance."""
        result = self._make()
        if not isinstance(result, Callback) and (not callable(result) or isinstance(result, type | Algorithm)):
            raise ArgumentTypeError(
                f"the factory returned {result!r} of type {type(result).__name__}; it must return a pl.Callback, a "
                "pl.Logger or a function of (event, state)."
            )
        return result

    def table(self, observer: object) -> Mapping[Event, Sequence[Observer]]:
        """The observers that the loop calls for it, by event."""
        is_logger = isinstance(observer, Logger)
        return observers([] if is_logger else [observer], [observer] if is_logger else [])[0]

    def arguments(self) -> Attached:
        """The arguments of ``fit`` that attach a fresh instance."""
        observer = self.make()
        if isinstance(observer, Logger):
            return {"loggers": [observer]}
        return {"callbacks": [observer], "loggers": [Logger()]}

    def plain(self, case: Case, fit: Fit) -> Pairs:
        """A run without it, with which those with it are compared."""
        return case.run(fit=fit, **self.without())

    def without(self) -> Attached:
        """The arguments of the runs that those with it are compared with.

        A callback with ``needs_grad_norm`` is the reason that States have a ``grad_norm``; they have one there, too.
        """
        return {"callbacks": [_Norm()]} if getattr(self.make(), "needs_grad_norm", False) else {}


class _Norm(Callback):
    """Has ``state.grad_norm`` computed, and does nothing."""

    all_ranks = needs_grad_norm = True

    def fit_start(self, state: State, logger: LoggerGroup) -> None: ...


@law("it raises no error in fit, evaluate or predict", of=CallbackSubject)
def completion(subject: CallbackSubject, case: Case, fit: Fit) -> None:
    """Runs all three, each with a fresh instance."""
    events: list[Event] = []
    data = case.problem.batches((2, 1), seed=7)
    try:
        for event, state in case.stream(fit=fit, **subject.arguments()):
            events.append(event)
            last = state
        same_events(events, expected(case.plan), "the order of events")
        loss = case.problem.loss
        # Not strict: the law `purity` compares.
        evaluation = evaluate(last, {"test": data}, loss=loss, strict=False, **subject.arguments())
        evaluated = [event for event, _ in evaluation]
        predicted = [event for event, _ in predict(last, data, strict=False, **subject.arguments())]
    except LawViolation:
        raise
    except Exception as error:
        raise broken_off(events, error) from error
    plan = EvaluatorPlan(batches=(2, 1))
    same_events(evaluated, expected_evaluate({"test": plan}), "the order of events in evaluation")
    same_events(predicted, expected_predict(2), "the order of events in prediction")


@law("it changes no State, and no setting of the process", rests_on=("completion",), of=CallbackSubject)
def purity(subject: CallbackSubject, case: Case, fit: Fit) -> None:
    """Compares the State and the settings of the process before and after each call."""
    observer = subject.make()
    table = subject.table(observer)
    subject.watched = True
    for event, state in case.stream(fit=fit):
        for handler in table.get(event, ()):
            subject.fired[subject.name, event] += 1
            snapshot, around = Snapshot(state), Surroundings()
            with nullcontext() if handler.path is None else guard(state, handler.path):
                handler.observe(event, state)
            changed, difference = around.changed(), snapshot.changed()
            at = moment(state)
            if difference is not None:
                raise written_to(
                    f"callback {subject.name} changed a leaf of the State that was passed to it, at {at}.",
                    event,
                    difference,
                    "A callback only reads. To change training, write an algorithm.",
                )
            if changed is not None:
                raise LawViolation(f"callback {subject.name} changed {changed} at {at}.", event=event)
    if isinstance(observer, Callback):
        observer.close()


@law("training is the same with it and without it", rests_on=("completion", "purity"), of=CallbackSubject)
def observer_invariance(subject: CallbackSubject, case: Case, fit: Fit) -> None:
    """Runs with and without it."""
    same_stream(
        case.run(fit=fit, **subject.arguments()), subject.alone(case, fit), "with the callback, the run differed"
    )


@law(
    "a fresh instance can join when training resumes",
    rests_on=("completion", "purity", "observer_invariance"),
    of=CallbackSubject,
)
def joining(subject: CallbackSubject, case: Case, fit: Fit) -> None:
    """Resumes from two of the boundaries, each time with a fresh instance."""
    boundaries = [state for event, state in case.run(fit=fit) if event in BOUNDARIES]
    for start in {boundaries[case.seed % len(boundaries)], boundaries[len(boundaries) // 2]}:
        event, what = start.event, f"joining at {moment(start)}"
        advice = (
            "An attribute set at FIT_START, EPOCH_START or BATCH_START may be missing: those events came before the "
            "callback joined."
        )
        with without_error(f"{what}, the run", event, advice):
            again = case.run(fit=fit, start=start, **subject.arguments())
        same_stream(again, case.run(fit=fit, start=start, **subject.without()), what)


@law(
    "left at any event, it leaves no thread, no process and no open file", rests_on=("completion",), of=CallbackSubject
)
def closing(subject: CallbackSubject, case: Case, fit: Fit) -> None:
    """Leaves the loop at an event that the case's seed chooses."""
    last = len(expected(case.plan))
    position = (case.seed * 31 + 17) % last
    threads, files = set(threading.enumerate()), _open_files()
    stream = case.stream(fit=fit, **subject.arguments())
    left: Event | None = None
    for index, (event, _) in enumerate(stream):
        left = event
        if index >= position:
            break
    stream.close()
    del stream
    if _open_files() - files:
        gc.collect()  # unreachable objects are closed
    name = left.name if left else "the end"
    running = [thread.name for thread in threading.enumerate() if thread not in threads]
    opened = _open_files() - files
    what = (
        f"a thread: {', '.join(running)}"
        if running
        else "a process"
        if multiprocessing.active_children()
        else f"an open file: {', '.join(sorted(path for _, path in opened))}"
        if opened
        else ""
    )
    if what:
        raise LawViolation(
            f"after the loop was left at {name}, callback {subject.name} left {what}.",
            event=left,
            advice="Close it in close(self), which is called once however the stream ends.",
        )


def _open_files() -> set[tuple[str, str]]:
    """Open files of this process, where the system shows them."""
    folder = "/proc/self/fd"
    result = set()
    for number in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            path = os.readlink(f"{folder}/{number}")
        except OSError:
            continue  # the descriptor of the listing itself
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/")):
            result.add((number, path))
    return result


def __dir__() -> list[str]:
    return list(__all__)
