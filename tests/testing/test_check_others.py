"""check_callback and check_script: what keeps the laws, and what breaks each of them."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import EvaluatorPlan, Plan, expected
from pure_loop.random import seeded
from pure_loop.testing import Case, CheckFailed, LawViolation, Scripted, Seed, check_callback, check_script, laws
from tests.support.refused import Refusal, check, rows

PLAN = Plan(batches=(3, 2), max_duration="2ep", evaluators={"val": EvaluatorPlan(batches=(2,), interval="1ba")})
FEW: dict[str, Any] = {"problems": "linear", "plans": st.just(PLAN), "max_examples": 2}


def failure_of(check: Callable[..., Any], *subject: Any, **options: Any) -> LawViolation:
    """The one violation, which its code reproduces."""
    with pytest.raises(CheckFailed) as caught:
        check(*subject, **options)
    (failure,) = caught.value.report.failures
    assert failure.violation is not None
    with pytest.raises(LawViolation, match=f"{failure.law} does not hold"):
        exec(failure.violation.code, {})
    return failure.violation


# Callbacks


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


class Closes(LeavesAFile):
    kept: list[Any] = []  # noqa: RUF012

    def close(self) -> None:
        while self.kept:
            self.kept.pop().close()


class MovesTheSeed(pl.Callback):
    """Behind the back of the State's class, where a comparison of tensors doesn't look."""

    def epoch_start(self, state: pl.State, logger: Any) -> None:
        object.__setattr__(state, "seed", state.seed + 1)


WRONG_CALLBACKS: dict[Callable[[], Any], str] = {
    Raises: "completion",
    Returns: "completion",
    Writes: "purity",
    SetsAVariable: "purity",
    MovesTheSeed: "purity",
    NeedsTheStart: "joining",
    LeavesAThread: "closing",
    LeavesAFile: "closing",
}


def test_exactly_the_intended_law_catches_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURE_LOOP_BATCH", "0")
    for make, law in WRONG_CALLBACKS.items():
        violation = failure_of(check_callback, make, **FEW)
        assert violation.law == law, make
        assert f"testing.laws.of_callbacks.{law}(make_callback, case)" in violation.code
    while LeavesAFile.kept:
        LeavesAFile.kept.pop().close()


def test_a_right_callback_keeps_every_law_and_sees_every_event() -> None:
    """A function, an instance, which is copied, and one that closes its file."""
    seen: set[Event] = set()
    report = check_callback(lambda: lambda event, state: seen.add(event), **FEW)
    assert {outcome.result for outcome in report.outcomes} == {"passed"}
    assert {Event.EVAL_STANDALONE_END, Event.PREDICT_END, Event.FIT_END} <= seen
    assert check_callback(pl.callbacks.SpeedMonitor(), **FEW).ok
    assert check_callback(Closes, **FEW).ok


class Sly(pl.Callback):
    """Waits until it is in a run, which it sees by the logger that it is handed."""

    def batch_start(self, state: pl.State, logger: Any) -> None:
        if logger.loggers:
            object.__setattr__(state, "seed", state.seed + 1)


class Ends(pl.Callback):
    def iteration_end(self, state: pl.State, logger: Any) -> None:
        pass


class NeedsTheNorm(pl.Callback):
    all_ranks = needs_grad_norm = True

    def batch_end(self, state: pl.State, logger: Any) -> None:
        assert state.grad_norm is not None


class WritesAndNeedsTheNorm(NeedsTheNorm):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        next(iter(state.params.values())).data.add_(1)


def test_what_changes_training_only_when_it_takes_part_and_what_never_runs() -> None:
    with pytest.raises(CheckFailed) as caught:
        check_callback(Sly, **FEW)
    assert [outcome.law for outcome in caught.value.report.failures] == ["observer_invariance"]
    with pytest.raises(CheckFailed, match="The callback 'Ends' never ran"):
        check_callback(Ends, **FEW)


def test_a_norm_that_is_needed_is_no_difference() -> None:
    """It is in the States of the runs with the callback and of those without it; every other difference counts."""
    laws.of_callbacks.observer_invariance(NeedsTheNorm, problems="linear", max_examples=4)
    laws.of_callbacks.joining(NeedsTheNorm, problems="linear", max_examples=4)
    with pytest.raises(CheckFailed, match="purity does not hold"):
        check_callback(WritesAndNeedsTheNorm, **FEW)


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
    script = Scripted(breaks_with_an_odd_seed, start)
    laws.of_scripts.completion(script, Seed(2))
    with pytest.raises(LawViolation, match=r"(?s)completion does not hold.*AssertionError: odd.*Seed\(1\)") as caught:
        laws.of_scripts.completion(script)  # the smallest
    assert "testing.laws.of_scripts.completion(script, testing.Seed(1))" in caught.value.code
    with pytest.raises(LawViolation, match="completion does not hold"):
        exec(caught.value.code, {})


# Scripts


def start(seed: int) -> pl.State:
    with seeded(seed):
        return pl.State.create(nn.Linear(2, 1), seed=seed)


def shrink(state: pl.State, factor: float = 0.9) -> pl.State:
    return state.replace(params={name: factor * tensor for name, tensor in state.params.items()})


def right(state: pl.State) -> pl.Script:
    while state.timestamp < "4ba":
        noise = torch.rand(1, generator=pl.random.generator(state.seed, "noise", state.timestamp.batch))
        state = yield Event.BATCH_START, state
        state = shrink(state, 0.9 + 0.1 * float(noise)).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


def raises(state: pl.State) -> pl.Script:
    state = yield Event.BATCH_START, state
    raise RuntimeError("out of data")


def yields_nothing(state: pl.State) -> pl.Script:
    return state
    yield Event.BATCH_END, state


def never_ends(state: pl.State) -> pl.Script:
    while True:
        state = yield Event.BATCH_END, state


def writes_in_place(state: pl.State) -> pl.Script:
    for _ in range(2):
        for tensor in state.params.values():
            tensor.mul_(0.9)
        state = yield Event.BATCH_END, state.count_batch(samples=1)
    return state


def draws_from_the_global_generator(state: pl.State) -> pl.Script:
    while state.timestamp < "2ba":
        state = shrink(state, float(torch.rand(1))).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


def takes_nothing_back(state: pl.State) -> pl.Script:
    while state.timestamp < "3ba":
        yield Event.BATCH_START, state
        state = shrink(state).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


def makes_its_state_anew(state: pl.State) -> pl.Script:
    """Nothing is lost by way of the values, and yet what an algorithm put in is dropped."""
    while state.timestamp < "3ba":
        fresh = state
        yield Event.BATCH_START, fresh
        state = yield Event.BATCH_END, shrink(fresh).count_batch(samples=1)
    return state


def counts_in_a_variable(state: pl.State) -> pl.Script:
    for _ in range(3):
        state = shrink(state).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


def changes_with_an_equal_state(state: pl.State) -> pl.Script:
    """What it is sent back is equal, but another object, and it takes that for a change."""
    while state.timestamp < "3ba":
        given = state.count_batch(samples=1)
        back = yield Event.BATCH_END, given
        state = shrink(back) if back.buffers is not given.buffers else back
    return state


def looks_who_watches(state: pl.State) -> pl.Script:
    while state.timestamp < "3ba":
        frame: Any = sys._getframe()
        while frame is not None and not frame.f_locals.get("observers"):
            frame = frame.f_back
        state = shrink(state, 0.9 if frame is None else 0.8).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


WRONG_SCRIPTS: dict[Callable[..., pl.Script], str] = {
    raises: "completion",
    yields_nothing: "completion",
    writes_in_place: "value",
    draws_from_the_global_generator: "determinism",
    takes_nothing_back: "sending_back",
    makes_its_state_anew: "sending_back",
    changes_with_an_equal_state: "identity",
    looks_who_watches: "observer_invariance",
    counts_in_a_variable: "resumption",
}


def breaks_with_an_odd_seed(state: pl.State) -> pl.Script:
    assert state.seed % 2 == 0, "odd"
    state = yield Event.BATCH_END, state
    return state


def test_exactly_the_intended_law_catches_the_script() -> None:
    for script, law in WRONG_SCRIPTS.items():
        violation = failure_of(check_script, script, start, max_examples=2)
        assert violation.law == law, script
        assert f"testing.laws.of_scripts.{law}(script, testing.Seed(0))" in violation.code


def test_a_right_script_keeps_every_law() -> None:
    report = check_script(right, start)
    assert {outcome.result for outcome in report.outcomes} == {"passed"}
    assert report["resumption"].examples == 5
    assert str(report).startswith("right: 7 passed")
    assert check_script(right, start(3))["resumption"].examples == 1  # one State is one example
    assert check_script(right, start(0), boundaries=["batch_end"]).ok


def test_what_can_t_be_imported_is_left_to_the_reader() -> None:
    script = Scripted(lambda state: raises(state), start(0), boundaries=["epoch_end", Event.BATCH_END])
    with pytest.raises(LawViolation) as caught:
        laws.of_scripts.completion(script)
    code = "make_script = ...  # the function that was checked\nstart = ...  # the function that was checked\n"
    assert code in caught.value.code
    assert "testing.Scripted(make_script, start, boundaries=['batch_end', 'epoch_end'])" in caught.value.code


@rows(
    [
        Refusal(says, lambda check=check, given=given: check(*given), pl.ArgumentTypeError, (says,))
        for says, check, *given in [
            ("give a function that makes a callback", check_callback, 3),
            ("For an algorithm, use check_algorithm", check_callback, pl.algorithms.sam()),
            ("must return a pl.Callback, a pl.Logger", check_callback, lambda: pl.callbacks.SpeedMonitor),
            ("give a function of a State that makes the generator", check_script, 3, start),
            ("give the first State", check_script, right, None),
            ("not a State", check_script, right, lambda seed: seed),
        ]
    ]
)
def test_it_is_refused(refusal: Refusal) -> None:
    check(refusal)


def test_a_script_that_does_not_end_or_come_to_a_boundary_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pure_loop.testing.laws.of_scripts._LONGEST", 100)
    with pytest.raises(CheckFailed, match="did not end; give check_script a shorter script"):
        check_script(never_ends, start(0))
    with pytest.raises(CheckFailed, match="the script yields none of EPOCH_END"):
        check_script(right, start(0), boundaries=[Event.EPOCH_END])


def test_the_example_keeps_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "gan.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("gan", path)
    assert spec is not None
    assert spec.loader is not None
    gan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gan)
    assert check_script(lambda state: gan.script(state, batch_size=8), lambda seed: gan.fresh_state(seed, 3)).ok
