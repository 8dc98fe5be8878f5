"""check_callback and check_script: what keeps the laws, and what breaks each of them."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
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
from tests.support.refused import Refusal, check

PLAN = Plan(batches=(3, 2), max_duration="2ep", evaluators={"val": EvaluatorPlan(batches=(2,), interval="1ba")})
FEW: dict[str, Any] = {"problems": "linear", "plans": st.just(PLAN), "max_examples": 2}


def failure_of(check: Callable[..., Any], *subject: Any, **options: Any) -> LawViolation:
    """The one violation."""
    with pytest.raises(CheckFailed) as caught:
        check(*subject, **options)
    (failure,) = caught.value.report.failures
    assert failure.violation is not None
    return failure.violation


def reproduced(violation: LawViolation) -> None:
    with pytest.raises(LawViolation, match=f"{violation.law} does not hold"):
        exec(violation.code, {})


# Callbacks


def acts(act: Callable[[pl.State], Any], method: str = "batch_end", **more: Any) -> type[pl.Callback]:
    return type("Acts", (pl.Callback,), {method: lambda self, state, logger: act(state), **more})


def fails(state: pl.State) -> None:
    raise ValueError("no disk")


def writes(state: pl.State) -> None:
    next(iter(state.params.values())).data.mul_(1.5)


def sets_a_variable(state: pl.State) -> None:
    os.environ["PURE_LOOP_BATCH"] = str(state.timestamp.batch)


def moves_the_seed(state: pl.State) -> None:
    """Behind the back of the State's class, where a comparison of tensors doesn't look."""
    object.__setattr__(state, "seed", state.seed + 1)


def leaves_a_thread(state: pl.State) -> None:
    threading.Thread(target=threading.Event().wait, args=(1,), daemon=True).start()


KEPT: list[Any] = []


def leaves_a_file(state: pl.State) -> None:
    KEPT.append(tempfile.TemporaryFile())  # noqa: SIM115


def close(self: Any = None) -> None:
    while KEPT:
        KEPT.pop().close()


class NeedsTheStart(pl.Callback):
    def epoch_start(self, state: pl.State, logger: Any) -> None:
        self.began = state.timestamp

    def batch_end(self, state: pl.State, logger: Any) -> None:
        assert state.timestamp.batch > self.began.batch


class Sly(pl.Callback):
    """Waits until it is in a run, which it sees by the logger that it is handed."""

    def batch_start(self, state: pl.State, logger: Any) -> None:
        if logger.loggers:
            moves_the_seed(state)


WRONG_CALLBACKS: list[tuple[str, Callable[[], Any]]] = [
    ("completion", acts(fails, "eval_end")),
    ("completion", acts(lambda state: state)),
    ("purity", acts(writes)),
    ("purity", acts(writes, needs_grad_norm=True, all_ranks=True)),
    ("purity", acts(sets_a_variable)),
    ("purity", acts(moves_the_seed, "epoch_start")),
    ("joining", NeedsTheStart),
    ("observer_invariance", Sly),
    ("closing", acts(leaves_a_thread, "fit_start")),
    ("closing", acts(leaves_a_file, "fit_start")),
]


def test_exactly_the_intended_law_catches_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURE_LOOP_BATCH", "0")
    for law, make in WRONG_CALLBACKS:
        few = FEW if make is NeedsTheStart else {**FEW, "max_examples": 1}
        violation = failure_of(check_callback, make, **few)
        assert violation.law == law, make
        assert f"testing.laws.of_callbacks.{law}(make_callback, case)" in violation.code
        if make is NeedsTheStart:  # which can be imported
            reproduced(violation)
    close()


def needs_the_norm(state: pl.State) -> None:
    assert state.grad_norm is not None


def test_a_right_callback_keeps_every_law_and_sees_every_event() -> None:
    """A function; an instance, which is copied; one that closes its file; and one that needs the norm."""
    seen: set[Event] = set()
    report = check_callback(lambda: lambda event, state: seen.add(event), **FEW)
    assert {outcome.result for outcome in report.outcomes} == {"passed"}
    assert {Event.EVAL_STANDALONE_END, Event.PREDICT_END, Event.FIT_END} <= seen
    assert check_callback(pl.callbacks.SpeedMonitor(), **FEW).ok
    assert check_callback(acts(leaves_a_file, "fit_start", close=close), **FEW).ok
    # A norm that is needed is in the States of the runs with the callback and of those without it.
    needs = acts(needs_the_norm, needs_grad_norm=True, all_ranks=True)
    laws.of_callbacks.observer_invariance(needs, problems="linear", max_examples=4)
    laws.of_callbacks.joining(needs, problems="linear", max_examples=4)
    with pytest.raises(CheckFailed, match="The callback 'Acts' never ran"):
        check_callback(acts(fails, "iteration_end"), **FEW)


class LeavesAThreadAtTheEnd(pl.Callback):
    def epoch_end(self, state: pl.State, logger: Any) -> None:
        leaves_a_thread(state)


def test_the_code_that_reproduces_a_failure_has_the_seed() -> None:
    """By which the law chose the event at which it left the loop."""
    plan = Plan(batches=(2,), max_duration="1ep")
    events = expected(plan)
    left = {events[(seed * 31 + 17) % len(events)]: seed for seed in range(40)}
    laws.of_callbacks.closing(LeavesAThreadAtTheEnd, Case(plan=plan, seed=left[Event.BATCH_START]))
    with pytest.raises(LawViolation, match="left at FIT_END") as caught:
        laws.of_callbacks.closing(LeavesAThreadAtTheEnd, Case(plan=plan, seed=left[Event.FIT_END]))
    reproduced(caught.value)
    script = Scripted(breaks_with_an_odd_seed, start)
    laws.of_scripts.completion(script, Seed(2))
    with pytest.raises(LawViolation, match=r"(?s)completion does not hold.*AssertionError: odd.*Seed\(1\)") as caught:
        laws.of_scripts.completion(script)  # the smallest
    assert "testing.laws.of_scripts.completion(script, testing.Seed(1))" in caught.value.code
    reproduced(caught.value)


# Scripts


def start(seed: int) -> pl.State:
    with seeded(seed):
        return pl.State.create(nn.Linear(2, 1), seed=seed)


def shrink(state: pl.State, factor: float = 0.9) -> pl.State:
    return state.replace(params={name: factor * tensor for name, tensor in state.params.items()})


def breaks_with_an_odd_seed(state: pl.State) -> pl.Script:
    assert state.seed % 2 == 0, "odd"
    return (yield Event.BATCH_END, state)


def trains(change: Callable[[pl.State], pl.State]) -> Callable[[pl.State], pl.Script]:
    def script(state: pl.State) -> pl.Script:
        while state.timestamp < "4ba":
            state = yield Event.BATCH_START, state
            state = yield Event.BATCH_END, change(state).count_batch(samples=1)
        return state

    return script


def by_noise(state: pl.State) -> pl.State:
    noise = torch.rand(1, generator=pl.random.generator(state.seed, "noise", state.timestamp.batch))
    return shrink(state, 0.9 + 0.1 * float(noise))


right = trains(by_noise)


def raises(state: pl.State) -> pl.Script:
    state = yield Event.BATCH_START, state
    raise RuntimeError("out of data")


def yields_nothing(state: pl.State) -> pl.Script:
    yield from ()
    return state


def in_place(state: pl.State) -> pl.State:
    for tensor in state.params.values():
        tensor.mul_(0.9)
    return state


def by_who_watches(state: pl.State) -> pl.State:
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_locals.get("observers"):
        frame = frame.f_back
    return shrink(state, 0.9 if frame is None else 0.8)


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
        state = yield Event.BATCH_END, shrink(state).count_batch(samples=1)
    return state


def changes_with_an_equal_state(state: pl.State) -> pl.Script:
    """What it is sent back is equal, but another object, and it takes that for a change."""
    while state.timestamp < "3ba":
        given = state.count_batch(samples=1)
        back = yield Event.BATCH_END, given
        state = shrink(back) if back.buffers is not given.buffers else back
    return state


WRONG_SCRIPTS: dict[Callable[..., pl.Script], str] = {
    raises: "completion",
    yields_nothing: "completion",
    trains(in_place): "value",
    trains(lambda state: shrink(state, float(torch.rand(1)))): "determinism",
    takes_nothing_back: "sending_back",
    makes_its_state_anew: "sending_back",
    changes_with_an_equal_state: "identity",
    trains(by_who_watches): "observer_invariance",
    counts_in_a_variable: "resumption",
}


def test_exactly_the_intended_law_catches_the_script() -> None:
    for script, law in WRONG_SCRIPTS.items():
        violation = failure_of(check_script, script, start, max_examples=2)
        assert violation.law == law, script
        assert f"testing.laws.of_scripts.{law}(script, testing.Seed(0))" in violation.code


def test_a_right_script_keeps_every_law_and_one_that_never_ends_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_script(right, start)
    assert {outcome.result for outcome in report.outcomes} == {"passed"}
    assert report["resumption"].examples == 5
    assert str(report).startswith("script: 7 passed")
    assert check_script(right, start(3))["resumption"].examples == 1  # one State is one example
    assert check_script(right, start(0), boundaries=["batch_end"]).ok
    with pytest.raises(CheckFailed, match="the script yields none of EPOCH_END"):
        check_script(right, start(0), boundaries=[Event.EPOCH_END])
    monkeypatch.setattr("pure_loop.testing.laws.of_scripts._LONGEST", 3)
    with pytest.raises(CheckFailed, match="did not end; give check_script a shorter script"):
        check_script(right, start(0))


def test_what_can_t_be_imported_is_left_to_the_reader() -> None:
    script = Scripted(lambda state: raises(state), start(0), boundaries=["epoch_end", Event.BATCH_END])
    with pytest.raises(LawViolation) as caught:
        laws.of_scripts.completion(script)
    code = "make_script = ...  # the function that was checked\nstart = ...  # the function that was checked\n"
    assert code in caught.value.code
    assert "testing.Scripted(make_script, start, boundaries=['batch_end', 'epoch_end'])" in caught.value.code


def test_what_is_neither_a_callback_nor_a_script_is_refused() -> None:
    refused: list[Any] = [
        ("give a function that makes a callback", check_callback, 3),
        ("For an algorithm, use check_algorithm", check_callback, pl.algorithms.sam()),
        ("must return a pl.Callback, a pl.Logger", check_callback, lambda: pl.callbacks.SpeedMonitor),
        ("give a function of a State that makes the generator", check_script, 3, start),
        ("give the first State", check_script, right, None),
        ("not a State", check_script, right, lambda seed: seed),
    ]
    for says, call, *given in refused:
        check(Refusal(says, partial(call, *given), pl.errors.ArgumentTypeError, (says,)))
