"""check_script: scripts that keep the laws, and scripts that break each of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.testing import CheckFailed, LawViolation, Scripted, Seed, check_script, laws

Script = pl.Script


def start(seed: int) -> pl.State:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return pl.State.create(nn.Linear(2, 1), seed=seed)


def shrink(state: pl.State, factor: float = 0.9) -> pl.State:
    return state.replace(params={name: factor * tensor for name, tensor in state.params.items()})


def right(state: pl.State) -> Script:
    while state.timestamp < "4ba":
        noise = torch.rand(1, generator=pl.random.generator(state.seed, "noise", state.timestamp.batch))
        state = yield Event.BATCH_START, state
        state = shrink(state, 0.9 + 0.1 * float(noise)).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


def raises(state: pl.State) -> Script:
    state = yield Event.BATCH_START, state
    raise RuntimeError("out of data")


def yields_nothing(state: pl.State) -> Script:
    return state
    yield Event.BATCH_END, state


def never_ends(state: pl.State) -> Script:
    while True:
        state = yield Event.BATCH_END, state


def writes_in_place(state: pl.State) -> Script:
    for _ in range(2):
        for tensor in state.params.values():
            tensor.mul_(0.9)
        state = yield Event.BATCH_END, state.count_batch(samples=1)
    return state


def draws_from_the_global_generator(state: pl.State) -> Script:
    while state.timestamp < "2ba":
        state = shrink(state, float(torch.rand(1))).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


def takes_nothing_back(state: pl.State) -> Script:
    while state.timestamp < "3ba":
        yield Event.BATCH_START, state
        state = shrink(state).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


def makes_its_state_anew(state: pl.State) -> Script:
    """Nothing is lost by way of the values, and yet what an algorithm put in is dropped."""
    while state.timestamp < "3ba":
        fresh = state
        yield Event.BATCH_START, fresh
        state = yield Event.BATCH_END, shrink(fresh).count_batch(samples=1)
    return state


def counts_in_a_variable(state: pl.State) -> Script:
    for _ in range(3):
        state = shrink(state).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


def changes_with_an_equal_state(state: pl.State) -> Script:
    """What it is sent back is equal, but another object, and it takes that for a change."""
    while state.timestamp < "3ba":
        given = state.count_batch(samples=1)
        back = yield Event.BATCH_END, given
        state = shrink(back) if back.buffers is not given.buffers else back
    return state


def looks_who_watches(state: pl.State) -> Script:
    while state.timestamp < "3ba":
        frame: Any = sys._getframe()
        while frame is not None and not frame.f_locals.get("observers"):
            frame = frame.f_back
        state = shrink(state, 0.9 if frame is None else 0.8).count_batch(samples=1)
        state = yield Event.BATCH_END, state
    return state


WRONG: dict[Callable[..., Script], str] = {
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


def test_a_right_script_keeps_every_law() -> None:
    report = check_script(right, start)
    assert report.ok
    assert {outcome.result for outcome in report.outcomes} == {"passed"}
    assert report["resumption"].examples == 5
    assert str(report).startswith("right: 7 passed")


@pytest.mark.parametrize(("script", "law"), WRONG.items(), ids=lambda value: getattr(value, "__name__", value))
def test_exactly_the_intended_law_catches_the_script(script: Callable[..., Script], law: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        check_script(script, start, max_examples=2)
    assert [outcome.law for outcome in caught.value.report.failures] == [law]
    violation = caught.value.report.failures[0].violation
    assert violation is not None
    assert f"testing.laws.of_scripts.{law}(script, testing.Seed(0))" in violation.code
    with pytest.raises(LawViolation, match=f"{law} does not hold"):
        exec(violation.code, {})


def breaks_with_an_odd_seed(state: pl.State) -> Script:
    assert state.seed % 2 == 0, "odd"
    state = yield Event.BATCH_END, state
    return state


def test_the_code_that_reproduces_a_failure_has_the_seed() -> None:
    script = Scripted(breaks_with_an_odd_seed, start)
    laws.of_scripts.completion(script, Seed(2))
    with pytest.raises(LawViolation, match=r"(?s)completion does not hold.*AssertionError: odd.*Seed\(3\)") as caught:
        laws.of_scripts.completion(script, Seed(3))
    assert "testing.laws.of_scripts.completion(script, testing.Seed(3))" in caught.value.code
    with pytest.raises(LawViolation, match="completion does not hold"):
        exec(caught.value.code, {})


def test_a_law_alone_draws_its_seeds() -> None:
    with pytest.raises(LawViolation, match="completion does not hold") as caught:
        laws.of_scripts.completion(Scripted(breaks_with_an_odd_seed, start))
    assert caught.value.case == Seed(1), "the smallest"


def test_what_can_t_be_imported_is_left_to_the_reader() -> None:
    script = Scripted(lambda state: raises(state), start(0), boundaries=["epoch_end", Event.BATCH_END])
    with pytest.raises(LawViolation) as caught:
        laws.of_scripts.completion(script)
    code = "make_script = ...  # the function that was checked\nstart = ...  # the function that was checked\n"
    assert code in caught.value.code
    assert "testing.Scripted(make_script, start, boundaries=['batch_end', 'epoch_end'])" in caught.value.code


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"case": 3}, pl.ArgumentTypeError, r"a law of scripts is tried on a testing\.Seed"),
        ({"problems": "linear"}, pl.ArgumentError, "a script has its own model and data"),
    ],
)
def test_what_is_not_for_scripts(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        laws.of_scripts.value(Scripted(right, start), **arguments)


def test_one_state_is_one_example() -> None:
    assert check_script(right, start(3))["resumption"].examples == 1


def test_a_script_that_does_not_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pure_loop.testing.laws.of_scripts._LONGEST", 100)
    with pytest.raises(CheckFailed, match="did not end; give check_script a shorter script"):
        check_script(never_ends, start(0))


def test_boundaries_are_chosen() -> None:
    assert check_script(right, start(0), boundaries=["batch_end"]).ok
    with pytest.raises(CheckFailed, match="the script yields none of EPOCH_END"):
        check_script(right, start(0), boundaries=[Event.EPOCH_END])


@pytest.mark.parametrize(
    ("script", "first", "message"),
    [
        (3, start, "give a function of a State that makes the generator"),
        (right, None, "give the first State"),
        (right, lambda seed: seed, "not a State"),
    ],
)
def test_bad_input(script: Any, first: Any, message: str) -> None:
    with pytest.raises(pl.ArgumentTypeError, match=message):
        check_script(script, first)


def test_the_example_keeps_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "gan.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("gan", path)
    assert spec is not None
    assert spec.loader is not None
    gan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gan)
    assert check_script(lambda state: gan.script(state, batch_size=8), lambda seed: gan.fresh_state(seed, 3)).ok
