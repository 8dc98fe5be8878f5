"""Laws of callbacks and loggers: they observe, at every event, in every run, and leave nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.algorithm import Algorithm, Composition
from pure_loop.callback import Callback, Logger, observers
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, expected, expected_evaluate, expected_predict
from pure_loop.testing._surroundings import Surroundings
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.comparison import Snapshot
from pure_loop.testing.law import EXAMPLES, law
from pure_loop.testing.laws._streams import same_events, same_stream
from pure_loop.testing.problems import Problem
from pure_loop.testing.report import Report
from pure_loop.testing.subject import fresh_copies
from pure_loop.testing.trial import Trial, drawn_from
from pure_loop.testing.violation import LawViolation, broken_off, moment, written_to

__all__ = ["check_callback"]


def check_callback(
    make_callback: Any,
    *,
    problems: Problem | str | Iterable[Problem | str] | None = None,
    plans: st.SearchStrategy[Any] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int = EXAMPLES,
) -> Report:
    """Try the laws of callbacks, and raise if one doesn't hold.

    Args:
        make_callback: a function without arguments that makes a fresh callback, logger or function of
            ``(event, state)``.
        problems, plans, expected_failures, skip, max_examples: as in :func:`pure_loop.testing.check_algorithm`.

    Returns:
        What was tried: ``print(report)`` is a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.
        ArgumentTypeError: ``make_callback`` makes something else.

    >>> import pure_loop as pl
    >>> check_callback(pl.callbacks.SpeedMonitor, problems="linear", max_examples=2).ok
    True
    """
    subject, draw = _Observing(make_callback), drawn_from(problems, plans)
    return Trial(subject, _LAWS, {}, draw, pl.fit, expected_failures, skip, max_examples).report()


class _Observing:
    """A callback on trial, made anew for every run."""

    def __init__(self, given: Any) -> None:
        if isinstance(given, Algorithm | Composition) or not (callable(given) or isinstance(given, Callback)):
            raise ArgumentTypeError(
                f"check_callback({given!r}): give a function that makes a callback, such as its class; an algorithm is "
                "for check_algorithm."
            )
        self._make: Callable[[], Any] = fresh_copies(given) if isinstance(given, Callback) else given
        made = self.make()
        self.name = getattr(made, "__name__", type(made).__name__)
        self.is_logger = isinstance(made, Logger)
        table, _, _ = observers([] if self.is_logger else [made], [made] if self.is_logger else [])
        self.bound = tuple((self.name, event) for event in table)
        self.fired: Counter[tuple[str, Event]] = Counter()
        self.watched = False
        self.kind = "callback"
        self.runs: Any = None

    def make(self) -> Any:
        made = self._make()
        if not isinstance(made, Callback) and (not callable(made) or isinstance(made, type | Algorithm)):
            raise ArgumentTypeError(
                f"the factory returned {made!r} of type {type(made).__name__}, and makes a pl.Callback, a pl.Logger, "
                "or a function of (event, state)."
            )
        return made

    def arguments(self, observer: Any = None) -> dict[str, Any]:
        """What ``fit`` is given, so that a fresh one takes part."""
        observer = self.make() if observer is None else observer
        if self.is_logger:
            return {"loggers": [observer]}
        return {"callbacks": [observer], "loggers": [pl.Logger()]}

    def reproduction(self, law: str, case: Case, *, standard: bool) -> str:
        return (
            "from hypothesis.strategies import just\nfrom pure_loop import testing\n"
            "from pure_loop.order import EvaluatorPlan, Plan\n\nmake_callback = ...  # what was checked\n"
            f"case = testing.{case!r}\n"
            "testing.check_callback(make_callback, problems=case.problem, plans=just(case.plan))"
        )


@law("it takes part in every run without an error, and in evaluation and prediction by themselves")
def completion(subject: Any, case: Case, fit: Fit) -> None:
    """Runs all three, each with a fresh one."""
    events: list[Event] = []
    data = case.problem.batches((2, 1), seed=7)
    try:
        last: Any = None
        for event, state in case.stream(fit=fit, **subject.arguments()):
            events.append(event)
            last = state
        same_events(events, expected(case.plan), "the order of events")
        loss = case.problem.loss
        evaluated = [event for event, _ in pl.evaluate(last, {"test": data}, loss=loss, **subject.arguments())]
        predicted = [event for event, _ in pl.predict(last, data, **subject.arguments())]
    except LawViolation:
        raise
    except Exception as error:
        raise broken_off(events, error) from error
    plan = pl.order.EvaluatorPlan(batches=(2, 1))
    same_events(evaluated, expected_evaluate({"test": plan}), "the order of events in evaluation")
    same_events(predicted, expected_predict(2), "the order of events in prediction")


@law("it changes no State, and nothing around it", rests_on=("completion",))
def purity(subject: Any, case: Case, fit: Fit) -> None:
    """Looks at the State and around before and after each call."""
    observer = subject.make()
    table, _, _ = observers([] if subject.is_logger else [observer], [observer] if subject.is_logger else [])
    subject.watched = True
    for event, state in case.stream(fit=fit):
        for each in table.get(event, ()):
            subject.fired[subject.name, event] += 1
            snapshot, around = Snapshot(state), Surroundings()
            each.observe(event, state)
            changed, difference = around.changed(), snapshot.changed()
            at = moment(state)
            if difference is not None:
                raise written_to(
                    f"callback {subject.name} changed a leaf of the State that it was shown, at {at}.",
                    event,
                    difference,
                    "A callback observes. What changes training is an algorithm.",
                )
            if changed is not None:
                raise LawViolation(f"callback {subject.name} changed {changed} at {at}.", event=event)
    if isinstance(observer, Callback):
        observer.close()


@law("training is what it is without it", rests_on=("completion", "purity"))
def observer_invariance(subject: Any, case: Case, fit: Fit) -> None:
    """Runs with and without."""
    same_stream(case.run(fit=fit, **subject.arguments()), case.run(fit=fit), "with the callback, the run was another")


@law("a fresh one can join when training goes on", rests_on=("completion", "purity", "observer_invariance"))
def joining(subject: Any, case: Case, fit: Fit) -> None:
    """Goes on from two of the boundaries, each with a fresh one."""
    whole = case.run(fit=fit)
    boundaries = [state for event, state in whole if event in BOUNDARIES]
    for kept in {boundaries[case.seed % len(boundaries)], boundaries[len(boundaries) // 2]}:
        event, what = kept.event, f"joining at {moment(kept)}"
        try:
            again = case.run(fit=fit, start=kept, **subject.arguments())
        except Exception as error:
            raise LawViolation(
                f"{what}, it ended in an error: {type(error).__name__}: {error}",
                event=event,
                advice="What it keeps since FIT_START, EPOCH_START or BATCH_START may be missing: those events came "
                "before it was there.",
            ) from error
        same_stream(again, case.run(fit=fit, start=kept), what)


@law("left at any event, it leaves no thread, no process and no open file", rests_on=("completion",))
def closing(subject: Any, case: Case, fit: Fit) -> None:
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
        gc.collect()  # what nobody holds any more is closed
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
            f"after the loop was left at {name}, callback {subject.name} left behind {what}.",
            event=left,
            advice="close(self) is called once however the stream ends: close there what was opened.",
        )


def _open_files() -> set[tuple[str, str]]:
    """Open files of this process, where the system shows them."""
    folder = "/proc/self/fd"
    found = set()
    for number in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            path = os.readlink(f"{folder}/{number}")
        except OSError:
            continue  # the one through which the folder was read
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/")):
            found.add((number, path))
    return found


_LAWS = (completion, purity, observer_invariance, joining, closing)
