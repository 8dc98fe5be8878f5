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
from pure_loop.algorithm import Algorithm
from pure_loop.data.samples import num_samples
from pure_loop.entry import hypothesis as entry_hypothesis
from pure_loop.order import Plan
from pure_loop.testing.strategies import BY_TYPE, batches, cases, plans
from tests.support.samples import sample, simplest
from tests.support.tiers import examples

ROOT = Path(__file__).resolve().parents[2]


# By type


@pytest.mark.parametrize("kind", BY_TYPE, ids=lambda kind: kind.__name__)
def test_every_type_is_found(kind: type) -> None:
    assert isinstance(simplest(st.from_type(kind)), kind)


def test_every_type_that_hypothesis_is_told_of_has_a_strategy() -> None:
    assert entry_hypothesis._told == set(BY_TYPE)


def test_types_are_found_in_annotations() -> None:
    seen: list[tuple[Any, ...]] = []

    @settings(max_examples=5, database=None)
    @given(...)
    def draw(state: pl.State, plan: Plan, one: Algorithm, names: pl.FrozenDict[str, int]) -> None:
        seen.append((state, plan, one, names))

    draw()
    for state, plan, one, names in seen:
        assert isinstance(state, pl.State)
        assert isinstance(plan, Plan)
        assert isinstance(one, Algorithm)
        assert isinstance(names, pl.FrozenDict)
        assert all(isinstance(value, int) for value in names.values())


@examples(10, 100)
@given(
    st.from_type(pl.Evaluator), st.from_type(pl.Optimizer), st.from_type(pl.Metric), st.from_type(pl.Task), st.data()
)
def test_what_is_found_by_type_works(
    evaluator: pl.Evaluator, optimizer: pl.Optimizer, metric: pl.Metric, task: pl.Task, data: st.DataObject
) -> None:
    case = data.draw(
        cases(problems=["linear", "tied"], plans=plans(units=["ba"], max_batches=2, max_evaluators=0, iterations=False))
    )
    state = case.run(optimizer=optimizer, task=task, loss=None)[-1][1]
    assert task.samples(case.data().__iter__().__next__()) >= 1
    assert num_samples(evaluator.dataloader[0]) >= 1
    held_out = pl.Evaluator(case.problem.batches([2], seed=0), metrics=[metric])
    measured = pl.run(pl.evaluate(state, held_out, loss=case.problem.loss))
    assert list(measured.metrics["eval"]) == [metric.name]


@pytest.mark.parametrize("kind", [Hashable, Sized, Callable, object, Mapping[str, int]], ids=str)
def test_other_types_draw_nothing_of_this_library(kind: Any) -> None:
    """Hypothesis looks for subclasses of what it is asked for; an unrelated test wants none of ours."""

    drawn = sample(st.from_type(kind), 100)
    assert not any(type(value).__module__.startswith("pure_loop") for value in drawn)


# Random numbers


def test_every_example_draws_the_same_random_numbers_and_leaves_none_behind() -> None:
    drawn = []

    @settings(max_examples=5, database=None)
    @given(st.integers(), batches())
    def draw(number: int, batch: Any) -> None:
        drawn.append(torch.rand(2).tolist())
        torch.randn(number % 7)

    torch.manual_seed(11)
    before = torch.get_rng_state()
    draw()
    assert len(drawn) == 5
    assert drawn.count(drawn[0]) == 5
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failure_that_depends_on_torchs_random_numbers_is_found_again() -> None:
    @settings(database=None, report_multiple_bugs=False)
    @given(st.floats(0, 1))
    def draw(bound: float) -> None:
        assert float(torch.rand(())) > bound

    before = torch.get_rng_state()
    with pytest.raises(AssertionError):  # and no hypothesis.errors.Flaky
        draw()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_of_random_numbers_can_be_drawn() -> None:
    drawn = set()

    @settings(max_examples=10, database=None)
    @given(st.random_module())
    def draw(seeded: Any) -> None:
        drawn.add(float(torch.rand(())))

    draw()
    assert len(drawn) > 1


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
as_installed = pytest.mark.skipif(not INSTALLED, reason="pure_loop is not installed, so it has no entry point")

REGISTERED = """
from hypothesis import find, settings, strategies as st
from hypothesis.internal.entropy import RANDOMS_TO_MANAGE
import pure_loop
assert sum(type(each).__name__ == "TorchRandom" for each in RANDOMS_TO_MANAGE.values()) == 1
assert "pure_loop.testing" not in sys.modules
quick = settings(max_examples=20, database=None)
assert find(st.from_type(pure_loop.Time), lambda time: True, settings=quick) == pure_loop.Time("0ba")
"""


def in_a_process(code: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys\n{code}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *variables.pop("path", "").split()]), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@as_installed
def test_hypothesis_alone_imports_neither_torch_nor_the_library_which_may_come_later() -> None:
    in_a_process(
        """
import hypothesis
assert "_hypothesis_pure_loop" in sys.modules
for name in ("torch", "attrs", "optree", "pure_loop"):
    assert name not in sys.modules, name
"""
        + REGISTERED
    )


@pytest.mark.thorough
@as_installed
def test_the_library_alone_does_not_import_hypothesis_which_may_come_later() -> None:
    in_a_process(
        """
import pure_loop
assert "hypothesis" not in sys.modules
assert "_hypothesis_pure_loop" not in sys.modules
"""
        + REGISTERED
    )


@pytest.mark.thorough
def test_without_entry_points_the_strategies_introduce_themselves() -> None:
    in_a_process(
        """
import pure_loop, hypothesis
from hypothesis import strategies as st
from hypothesis.strategies._internal.types import _global_type_lookup as known
assert pure_loop.State not in known
import pure_loop.testing.strategies
assert pure_loop.State in known
""",
        HYPOTHESIS_NO_PLUGINS="1",
    )


PLUGIN = """
[hypothesis]
another = another_plugin
"""


@pytest.mark.thorough
@as_installed
def test_the_library_may_be_imported_by_another_plugin_of_hypothesis(tmp_path: Path) -> None:
    """Then it finds Hypothesis half imported; the entry point is called before or after."""
    metadata = tmp_path / "another-1.0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text(PLUGIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (tmp_path / "another_plugin.py").write_text("import pure_loop\n")
    in_a_process("import hypothesis\nassert 'another_plugin' in sys.modules\n" + REGISTERED, path=str(tmp_path))


@pytest.mark.thorough
@as_installed
@pytest.mark.parametrize("when", ["pure_loop.event", "pure_loop.time"])
def test_hypothesis_may_be_imported_while_the_library_is(when: str) -> None:
    in_a_process(
        f"""
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {when!r}:
            import hypothesis
sys.meta_path.insert(0, Finder())
import pure_loop
assert "hypothesis" in sys.modules
"""
        + REGISTERED
    )
