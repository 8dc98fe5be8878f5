"""The benchmarks: that they measure what they say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from bench.performance import attached, costs, limits, members, parts, tables
from bench.performance.hand import hand_written
from bench.performance.loops import BASE, EPOCH, HAND, OURS, ours
from bench.performance.malloc import KEPT
from bench.performance.memory import peaks
from bench.performance.startup import output
from bench.performance.steps import in_turns, measure, paired
from bench.performance.turns import InThread, OfGenerator
from bench.performance.workloads import WORKLOADS, Workload
from pure_loop.loop.driver import measure_references
from tests.support.tiers import tiers

W1 = WORKLOADS[0]
DOCS = Path(__file__).parent.parent.parent / "docs"


def test_a_trainer_in_a_thread_makes_the_steps_that_it_is_asked_for() -> None:
    made: list[str] = []

    def train(tick: Callable[[], None]) -> None:
        while True:
            made.append(threading.current_thread().name)
            tick()

    loop = InThread(train)
    assert loop.run(7)[1] == 1, "its first turn is one step"
    assert len(made) == 1
    for steps in (3, 1, 5):
        before = len(made)
        seconds, done = loop.run(steps)
        assert (len(made) - before, done) == (steps, steps)
        assert seconds >= 0
    assert threading.current_thread().name not in made
    running = [thread for thread in threading.enumerate() if thread.name in made]
    assert running
    loop.close()
    assert not any(thread.is_alive() for thread in running)


@pytest.mark.parametrize("steps", [0, 2])
def test_what_a_trainer_raises_is_raised_where_its_turn_was_asked_for(steps: int) -> None:
    def train(tick: Callable[[], None]) -> None:
        for _ in range(steps):
            tick()
        raise ZeroDivisionError("in the trainer")

    loop = InThread(train)
    for _ in range(steps):
        loop.run(1)
    with pytest.raises(ZeroDivisionError, match="in the trainer"):
        loop.run(1)


def test_a_turn_counts_the_steps_that_a_generator_says() -> None:
    loop = OfGenerator(eight for eight in [8, 8, 8])
    assert loop.run(9)[1] == 16


def test_a_loop_twice_as_long_is_twice_as_long() -> None:
    def busy(times: int) -> Any:
        matrix = torch.ones(64, 64)
        while True:
            for _ in range(times):
                matrix @ matrix
            yield 1

    times = in_turns({BASE: OfGenerator(busy(20)), "twice": OfGenerator(busy(40))}, turns=9, seconds=0.01)
    assert paired(times, BASE)[BASE] == 1
    assert paired(times, BASE)["twice"] == pytest.approx(2, rel=0.3)


@pytest.mark.slow  # workloads of the benchmark
@pytest.mark.parametrize(
    "workload",
    tiers(WORKLOADS, [each for each in WORKLOADS if each.name not in ("W3", "W5")]),
    ids=lambda each: each.name,
)
def test_every_workload_trains_in_our_loop_and_by_hand(workload: Workload) -> None:
    found = measure(workload, [HAND[0], OURS[0]], turns=1, seconds=0.0)
    assert set(found) == {BASE, OURS[0].name}
    assert found[BASE]["ratio"] == 1


@pytest.mark.parametrize("name", costs.LOADERS)
def test_loaders_give_batches_of_the_workload_again_and_again(name: str) -> None:
    loader = costs.LOADERS[name]
    for loop in (hand_written(fused=True, loader=loader), ours(loader=loader), ours(loader=loader, read=True)):
        steps = loop(W1)
        assert [next(steps) for _ in range(EPOCH + 2)] == [1] * (EPOCH + 2)
    first, *rest = costs.LOADERS[name](W1)
    assert [tensor.shape for tensor in first] == [tensor.shape for tensor in W1.batch()]
    assert len(rest) == EPOCH - 1


@pytest.mark.slow  # processes of their own
def test_a_process_has_one_loop_and_the_variables_that_it_is_given() -> None:
    shown = output("-c", f"import os; print([os.environ[name] for name in {list(KEPT)}])", **KEPT)
    assert shown == str(list(KEPT.values()))
    found = json.loads(output("-m", "bench.performance.alone", "ours", "4", "W2", **KEPT))
    assert found["us"] > 0
    assert " ".join(f"{name}={value}" for name, value in KEPT.items()) in (DOCS / "performance.md").read_text()


def test_the_peak_of_the_loop_by_hand_is_what_adamw_needs() -> None:
    """Parameters, gradients and two moments, and activations of less than that."""
    parameters = sum(each.numel() for each in W1.model().parameters())
    first, later = peaks(partial(HAND[0].turns, W1))
    batches = sum(x.nbytes + y.nbytes for x, y in W1.data())
    for peak in (first, later):
        assert 4 * 4 * parameters < peak - batches < 2 * 4 * 4 * parameters


def test_the_peak_of_what_is_attached_is_beside_a_loop_that_does_the_same() -> None:
    found = attached.measure([W1])["W1"]
    parameters = sum(each.nbytes for each in W1.model().parameters()) / 1e6
    assert found[attached.AVERAGED]["mb"] - found[BASE]["mb"] == pytest.approx(parameters, rel=0.3)
    assert found[BASE]["ratio"] == found[attached.AVERAGED]["ratio"] == 1
    ratio = found["pl.fit, ema"]["mb"] / found[attached.AVERAGED]["mb"]
    assert found["pl.fit, ema"]["ratio"] == ratio
    assert {name for name in found if name.startswith("pl.fit")} >= {"pl.fit", "pl.fit, GradMonitor"}
    rows = tables.of("attached", {"attached": {"W1": found}})
    assert len(rows) == 1 + len(found)


def test_limits_are_of_loops_that_there_are() -> None:
    names = {loop.name for loop in OURS}
    assert set(limits.RATIOS) | {"pl.fit, watch={BATCH_END}"} <= names
    assert {each for found in limits.RATIOS.values() for each in found} <= {each.name for each in WORKLOADS}


def test_what_is_above_its_limit_is_named() -> None:
    watch = "pl.fit, watch={BATCH_END}"

    def results(scale: float) -> dict[str, Any]:
        steps: dict[str, Any] = {}
        for loop, found in limits.RATIOS.items():
            for workload, limit in found.items():
                steps.setdefault(workload, {})[loop] = {"ratio": limit * scale}
        ours, cost = OURS[0].name, limits.ATTACHED * scale
        for loops in steps.values():
            loops[watch] = {"ratio": loops[ours]["ratio"] * limits.WATCHED * scale}
        return {
            "steps": steps,
            "imports": {"pure_loop": {"cpu_seconds": 0.1 * scale, "mb": 15 * scale}},
            "memory": {ours: {"ratio": 1.02 * scale, "microbatches_ratio": 1.02 * scale}},
            "attached": {"W4": {BASE: {"ratio": 9.0}, "pl.fit, ema": {"ratio": limits.MEMORY * scale}}},
            "processes": {ours: {"peak_mb": 300 * scale}, BASE: {"peak_mb": 300}},
            "costs": {name: {"ratio": limit * scale} for name, limit in limits.COSTS.items()},
            "events": {"an algorithm, not due": {"us": 1.0, "of_a_step": cost}},
            "length": [
                {"steps": steps, "us": 100, "ratio": 1.0 * much, "python_blocks": 100 * much, "resident_mb": 100 * much}
                for steps, much in ((1000, 1), (10000, 1.1 * scale))
            ],
        }

    assert list(limits.exceeded(results(0.99))) == []
    counted = sum(map(len, limits.RATIOS.values()))
    assert (
        len(list(limits.exceeded(results(1.01))))
        == counted + len(WORKLOADS) + 2 + 2 + 1 + 1 + len(limits.COSTS) + 1 + 3
    )


def test_a_table_is_as_wide_in_all_rows() -> None:
    table = [["", "one"], ["a longer name", "1.00"], ["b", ""]]
    assert tables.as_text(table).splitlines() == ["                one", "a longer name  1.00", "b                  "]
    assert tables.as_markdown(table).splitlines()[1:3] == ["|---|---:|", "| a longer name | 1.00 |"]


def test_the_parts_of_a_step_are_all_there() -> None:
    """A function that a step no longer calls by this name would take no time."""
    measure_references()  # as a stream before has done
    found = parts._of(WORKLOADS[0], turns=2, seconds=0.005)
    assert len(found) == len(parts._PARTS) + 2
    # What others do on the machine meanwhile counts in the parts, and not in the step that the rest is the rest of.
    del found["the rest"]
    assert all(part > 0 for part in found.values()), found


MEMBERS = members.Problem("two members", 2, WORKLOADS[0], None, lambda rate: {"optimizer": pl.optim.adamw(lr=rate)})


def test_a_turn_of_members_alone_is_a_step_of_each() -> None:
    made: list[int] = []

    def steps() -> Any:
        while True:
            made.append(1)
            yield 1

    loop = members.Alone(OfGenerator(steps()), count=3)
    _, done = loop.run(4)
    assert (done, len(made)) == (4, 12)


def test_members_alone_hold_as_much_as_one_times_their_number() -> None:
    """Parameters, gradients and two moments of each, and those of the State that an epoch has ended with."""
    names = [members.INTERPRETED, members.ALONE]
    found = members.memory(MEMBERS, names)
    parameters = sum(each.nbytes for each in W1.model().parameters()) / 1e6
    assert set(found) == set(names)
    for megabytes in found.values():
        assert 2 * 4 * parameters < megabytes < 2 * 3 * 4 * parameters


@pytest.mark.parametrize(("scale", "lines"), [(0.99, 0), (1.01, 9)])
def test_of_an_ensemble_what_misses_its_limit_is_named(scale: float, lines: int) -> None:
    """A ratio to the ensemble is at least its limit, memory and the first epoch at most."""
    found: dict[str, Any] = {}
    for describe, least in limits.MEMBERS.items():
        loops = {name: {"ratio": limit / scale, "us": 1.0, "first_seconds": 1.0} for name, limit in least.items()}
        loops[members.COMPILED]["mb"] = 1.0
        ensemble = {"ratio": 1.0, "us": 1.0, "mb": limits.MEMORY_OF_MEMBERS * scale, "first_seconds": 20 * scale}
        found[describe] = {members.ENSEMBLE: ensemble, **loops}
    assert len(list(limits.exceeded({"members": found}))) == lines
    assert len(tables.of("members", {"members": found})) == 1 + sum(map(len, found.values()))


def test_jax_in_another_python_is_what_is_named() -> None:
    assert members.python_with_jax("/another/python") == "/another/python"
