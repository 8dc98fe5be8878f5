"""Meeting Hypothesis: strategies by type, torch's random numbers, and the order of imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping, Sized
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.data.samples import num_samples
from pure_loop.entry import hypothesis as entry_hypothesis
from pure_loop.testing.strategies import BY_TYPE, batches, cases, plans
from tests.support.samples import sample, simplest
from tests.support.tiers import examples

ROOT = Path(__file__).resolve().parents[2]
SMALL = cases(problems=["linear", "tied"], plans=plans(units=["ba"], max_batches=2, max_evaluators=0, iterations=False))


def test_every_type_is_found_and_types_of_others_draw_nothing_of_this_library() -> None:
    """Hypothesis looks for subclasses of what it is asked for; an unrelated test wants none of ours."""
    assert entry_hypothesis._told == set(BY_TYPE)
    for kind in BY_TYPE:
        assert isinstance(simplest(st.from_type(kind)), kind)
    drawn = sample(st.from_type(pl.FrozenDict[str, int]), 20)
    assert {type(value) for names in drawn for value in names.values()} == {int}
    for other in (Hashable, Sized, Callable, object, Mapping[str, int]):
        drawn = sample(st.from_type(other), 50)  # type: ignore[arg-type]
        assert not any(type(value).__module__.startswith("pure_loop") for value in drawn)


@examples(10, 100)
@given(SMALL, *map(st.from_type, (pl.Evaluator, pl.Optimizer, pl.Metric, pl.Task)))
def test_what_is_found_by_type_works(case: Any, evaluator: Any, optimizer: Any, metric: Any, task: Any) -> None:
    state = case.run(optimizer=optimizer, loss=task)[-1][1]
    assert task.samples(next(iter(case.data()))) >= 1
    assert num_samples(evaluator.dataloader[0]) >= 1
    held_out = pl.Evaluator(case.problem.batches([2], seed=0), metrics=[metric])
    measured = pl.run(pl.evaluate(state, held_out, loss=case.problem.loss))
    assert list(measured.metrics["eval"]) == [metric.name]


def test_every_example_draws_the_same_random_numbers_and_leaves_none_behind() -> None:
    drawn, seeds = [], set()

    @settings(max_examples=5, database=None)
    @given(st.integers(), batches())
    def draw(number: int, batch: Any) -> None:
        drawn.append(torch.rand(2).tolist())
        torch.randn(number % 7)

    @settings(database=None, report_multiple_bugs=False)
    @given(st.floats(0, 1))
    def fails(bound: float) -> None:
        assert float(torch.rand(())) > bound

    @settings(max_examples=10, database=None)
    @given(st.random_module())
    def seed(seeded: Any) -> None:
        seeds.add(float(torch.rand(())))

    torch.manual_seed(11)
    before = torch.get_rng_state()
    draw()
    assert drawn == [drawn[0]] * 5
    with pytest.raises(AssertionError):  # found again, and no hypothesis.errors.Flaky
        fails()
    seed()
    assert len(seeds) > 1, "the seed can be drawn"
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_of_accelerators_take_part_once_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generators stand for accelerators: one in use before, one whose first use is in the test."""
    used, fresh = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    awake = [used]
    monkeypatch.setattr(entry_hypothesis, "_initialized_accelerators", lambda: tuple(awake))
    generators = entry_hypothesis.TorchRandom()
    before, kept = used.get_state(), generators.getstate()
    generators.seed(0)
    assert used.initial_seed() == torch.initial_seed() == 0
    awake.append(fresh)
    torch.rand(1, generator=used)
    torch.rand(1, generator=fresh)
    generators.setstate(kept)
    assert torch.equal(used.get_state(), before)
    assert fresh.initial_seed() == torch.initial_seed() != 0


# Meeting Hypothesis, each time in a process of its own

INSTALLED = any(entry.value == "_hypothesis_pure_loop:introduce" for entry in entry_points(group="hypothesis"))
REGISTERED = """
from hypothesis import find, strategies as st
from hypothesis.internal.entropy import RANDOMS_TO_MANAGE
import pure_loop
assert sum(type(each).__name__ == "TorchRandom" for each in RANDOMS_TO_MANAGE.values()) == 1
assert "pure_loop.testing" not in sys.modules
assert find(st.from_type(pure_loop.Time), lambda time: True) == pure_loop.Time("0ba")
"""
FIRST = (
    'assert "_hypothesis_pure_loop" in sys.modules and not {"torch", "attrs", "optree", "pure_loop"} & set(sys.modules)'
)
ORDERS: dict[str, str] = {
    "hypothesis first": f"import hypothesis\n{FIRST}\n{REGISTERED}",
    "library first": f'import pure_loop\nassert "hypothesis" not in sys.modules\n{REGISTERED}',
}


@pytest.mark.thorough  # a process for each order of imports
@pytest.mark.skipif(not INSTALLED, reason="pure_loop is not installed, so it has no entry point")
@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_imports(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", f"import sys\n{ORDERS[name]}"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
