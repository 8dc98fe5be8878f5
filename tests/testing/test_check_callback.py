"""check_callback: callbacks and loggers that keep the laws, and some that break each of them."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import EvaluatorPlan, Plan, expected
from pure_loop.testing import Case, CheckFailed, LawViolation, check_callback, laws

PLAN = Plan(batches=(3, 2), max_duration="2ep", evaluators={"val": EvaluatorPlan(batches=(2,), interval="1ba")})
FEW: dict[str, Any] = {"problems": "linear", "plans": st.just(PLAN), "max_examples": 4}


@pytest.mark.slow
def test_a_function_that_only_looks_keeps_every_law() -> None:
    report = check_callback(lambda: lambda event, state: None, max_examples=5)
    assert report.ok
    assert {outcome.result for outcome in report.outcomes} == {"passed"}


class Raises(pl.Callback):
    def eval_end(self, state: pl.State, logger: Any) -> None:
        raise ValueError("no disk")


class Returns(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        return state  # type: ignore[return-value]


class Writes(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        state.params["bias"].data.mul_(1.5)


class SetsAVariable(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        os.environ["PURE_LOOP_BATCH"] = str(state.timestamp.batch)


class NeedsTheStart(pl.Callback):
    def epoch_start(self, state: pl.State, logger: Any) -> None:
        self.began = state.timestamp

    def batch_end(self, state: pl.State, logger: Any) -> None:
        assert state.timestamp.batch > self.began.batch


class LeavesAThread(pl.Callback):
    def fit_start(self, state: pl.State, logger: Any) -> None:
        threading.Thread(target=threading.Event().wait, args=(1,), daemon=True).start()


class LeavesAFile(pl.Callback):
    kept: list[Any] = []  # noqa: RUF012

    def fit_start(self, state: pl.State, logger: Any) -> None:
        self.kept.append(tempfile.TemporaryFile())  # noqa: SIM115

    def __del__(self) -> None:
        pass


class Closes(LeavesAFile):
    kept: list[Any] = []  # noqa: RUF012

    def close(self) -> None:
        while self.kept:
            self.kept.pop().close()


class MovesTheSeed(pl.Callback):
    """Behind the back of the State's class, where a comparison of tensors doesn't look."""

    def epoch_start(self, state: pl.State, logger: Any) -> None:
        object.__setattr__(state, "seed", state.seed + 1)


WRONG: dict[Callable[[], Any], str] = {
    Raises: "completion",
    Returns: "completion",
    Writes: "purity",
    SetsAVariable: "purity",
    MovesTheSeed: "purity",
    NeedsTheStart: "joining",
    LeavesAThread: "closing",
    LeavesAFile: "closing",
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "law"), WRONG.items(), ids=lambda value: getattr(value, "__name__", value))
def test_exactly_the_intended_law_catches_the_callback(make: Callable[[], Any], law: str) -> None:
    try:
        with pytest.raises(CheckFailed) as caught:
            check_callback(make, **FEW)
        assert [outcome.law for outcome in caught.value.report.failures] == [law]
        violation = caught.value.report.failures[0].violation
        assert violation is not None
        assert f"testing.laws.of_callbacks.{law}(make_callback, case)" in violation.code
        with pytest.raises(LawViolation, match=f"{law} does not hold"):
            exec(violation.code, {})
    finally:
        os.environ.pop("PURE_LOOP_BATCH", None)
        while LeavesAFile.kept:
            LeavesAFile.kept.pop().close()


class LeavesAThreadAtTheEnd(pl.Callback):
    def epoch_end(self, state: pl.State, logger: Any) -> None:
        threading.Thread(target=threading.Event().wait, args=(1,), daemon=True).start()


def test_the_code_that_reproduces_a_failure_has_the_seed() -> None:
    """By which the law chose the event at which it left the loop."""
    plan = Plan(batches=(2,), max_duration="1ep")
    events = expected(plan)
    left = {seed: events[(seed * 31 + 17) % len(events)] for seed in range(40)}
    early = next(seed for seed, event in left.items() if event is Event.BATCH_START)
    late = next(seed for seed, event in left.items() if event is Event.FIT_END)
    laws.of_callbacks.closing(LeavesAThreadAtTheEnd, Case(plan=plan, seed=early))
    with pytest.raises(LawViolation, match="left at FIT_END") as caught:
        laws.of_callbacks.closing(LeavesAThreadAtTheEnd, Case(plan=plan, seed=late))
    with pytest.raises(LawViolation, match="left at FIT_END"):
        exec(caught.value.code, {})


def test_a_law_alone_draws_its_cases() -> None:
    laws.of_callbacks.joining(pl.callbacks.SpeedMonitor, problems="linear", max_examples=2)
    with pytest.raises(LawViolation, match="joining does not hold"):
        laws.of_callbacks.joining(NeedsTheStart, problems="linear")


def test_one_that_closes_its_file_leaves_none() -> None:
    assert check_callback(Closes, **FEW).ok


def test_what_changes_training_only_when_it_takes_part() -> None:
    """A callback that waits until it is in a run, which it sees by the logger that it is handed."""

    class Sly(pl.Callback):
        def batch_start(self, state: pl.State, logger: Any) -> None:
            if logger.loggers:
                object.__setattr__(state, "seed", state.seed + 1)

    with pytest.raises(CheckFailed) as caught:
        check_callback(Sly, **FEW)
    assert [outcome.law for outcome in caught.value.report.failures] == ["observer_invariance"]


def test_a_callback_that_never_runs_fails() -> None:
    class Ends(pl.Callback):
        def iteration_end(self, state: pl.State, logger: Any) -> None:
            pass

    with pytest.raises(CheckFailed, match="The callback 'Ends' never ran"):
        check_callback(Ends, **FEW)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "give a function that makes a callback"),
        (pl.algorithms.sam(), "For an algorithm, use check_algorithm"),
        (lambda: 3, "must return a pl.Callback, a pl.Logger"),
        (lambda: pl.callbacks.SpeedMonitor, "must return a pl.Callback, a pl.Logger"),
    ],
)
def test_bad_input(given: Any, message: str) -> None:
    with pytest.raises(pl.ArgumentTypeError, match=message):
        check_callback(given)


def test_an_instance_is_copied() -> None:
    assert check_callback(pl.callbacks.SpeedMonitor(), **FEW).ok


def test_events_of_a_function_are_all() -> None:
    seen: set[Event] = set()
    check_callback(lambda: lambda event, state: seen.add(event), **FEW)
    assert {Event.EVAL_STANDALONE_END, Event.PREDICT_END, Event.FIT_END} <= seen


class NeedsTheNorm(pl.Callback):
    all_ranks = needs_grad_norm = True

    def batch_end(self, state: pl.State, logger: Any) -> None:
        assert state.grad_norm is not None


class WritesAndNeedsTheNorm(NeedsTheNorm):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        next(iter(state.params.values())).data.add_(1)


def test_a_norm_that_is_needed_is_no_difference() -> None:
    """It is in the States of the runs with the callback and of those without it; every other difference counts."""
    laws.of_callbacks.observer_invariance(NeedsTheNorm, problems="linear", max_examples=4)
    laws.of_callbacks.joining(NeedsTheNorm, problems="linear", max_examples=4)
    with pytest.raises(CheckFailed, match="purity does not hold"):
        check_callback(WritesAndNeedsTheNorm, **FEW)
