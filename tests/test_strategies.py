"""Strategies: what they draw is valid, comes in all its kinds, and shrinks to the simplest."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sized
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import hypothesis
import optree
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, find, given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import _hypothesis
from pure_loop.algorithm import Algorithm, Composition
from pure_loop.data import num_samples, split
from pure_loop.errors import ArgumentError, ArgumentTypeError, PureLoopError
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, EvaluatorPlan, Plan, check, expected, going_on
from pure_loop.strict import same
from pure_loop.testing import strategies
from pure_loop.testing._plans import plans_with
from pure_loop.testing._times import timestamps_of
from pure_loop.testing._types import BY_TYPE
from pure_loop.testing.case import Case
from pure_loop.testing.problems import PROBLEMS
from pure_loop.testing.strategies import (
    algorithms,
    batches,
    cases,
    event_streams,
    plans,
    problems,
    state_at,
    states,
    times,
    timestamps,
)
from pure_loop.time import Time, Timestamp, TimeUnit
from tests.conftest import THOROUGH

ROOT = Path(__file__).resolve().parents[1]
SIMPLEST = Plan(batches=(1,), max_duration="1ba")


def examples(fast: int, thorough: int) -> settings:
    return settings(max_examples=thorough if THOROUGH else fast)


def simplest(strategy: st.SearchStrategy[Any], condition: Callable[[Any], Any] = lambda value: True) -> Any:
    options = settings(database=None, phases=[Phase.generate, Phase.shrink], max_examples=500)
    return find(strategy, condition, settings=options, random=random.Random(0))


def sample(strategy: st.SearchStrategy[Any], number: int = 50) -> list[Any]:
    """What is drawn; the same in every run."""
    drawn: list[Any] = []

    @settings(database=None, derandomize=True, phases=[Phase.generate], max_examples=number, suppress_health_check=SLOW)
    @given(strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def trained(plan: Plan) -> int:
    """How many batches."""
    return expected(plan).count(Event.BATCH_END)


def intervals(plan: Plan) -> set[TimeUnit]:
    return {plan.interval_of(evaluator).unit for evaluator in plan.evaluators.values()}


def has(first: Event, *then: Event) -> Callable[[Plan], bool]:
    """Whether these events come right after each other in a run."""
    wanted = [first, *then]

    def condition(plan: Plan) -> bool:
        events = expected(plan)
        return any(events[at : at + len(wanted)] == wanted for at in range(len(events)))

    return condition


# Plans


@examples(40, 1000)
@given(cases(plans=plans(orders=("current", "current", "2021"), min_batches=0)))
@example(Case(plan=Plan(batches=(1, 1), max_duration="1ba", order="2021")))
@example(Case(plan=Plan(batches=(1,), max_duration="1ba", sized=False, order="2021")))
def test_a_case_runs_as_its_plan_says(case: Case) -> None:
    pairs = case.run()
    assert [event for event, _ in pairs] == expected(case.plan)
    counted = [state.timestamp for event, state in pairs]
    assert list(dict.fromkeys(counted)) == list(dict.fromkeys(timestamps_of(case.plan)))


def test_plans_shrink_to_the_simplest() -> None:
    assert simplest(plans()) == SIMPLEST
    assert simplest(plans(min_batches=0)) == Plan(batches=(1,), max_duration="0ba")
    assert simplest(plans(), lambda plan: plan.evaluators) == Plan(
        batches=(1,), max_duration="1ba", evaluators={"val": EvaluatorPlan((1,))}
    )
    assert simplest(plans(), lambda plan: len(plan.batches) == 2) == Plan(batches=(1, 1), max_duration="1ba")
    assert simplest(plans(), lambda plan: not plan.sized) == Plan(batches=(1,), max_duration="1ba", sized=False)


@pytest.mark.parametrize(
    ("unit", "wanted"),
    [
        ("ep", Plan(batches=(1,), max_duration="1ep")),
        ("sp", Plan(batches=(1,), max_duration="1sp")),
        ("tok", Plan(batches=(1,), max_duration="1tok", tokens_per_sample=1)),
        ("s", Plan(batches=(1,), max_duration="1s", seconds_per_batch=1.0)),
        ("iter", Plan(batches=(1,), max_duration="1iter", iteration_length="1ep")),
    ],
)
def test_plans_of_one_unit(unit: str, wanted: Plan) -> None:
    assert simplest(plans(units=[unit])) == wanted
    assert {plan.max_duration.unit.value for plan in sample(plans(units=[unit]))} == {unit}


@functools.cache
def many_plans() -> list[Plan]:
    return sample(plans(), 300)


VARIETY: dict[str, Callable[[Plan], Any]] = {
    **{f"duration in {unit}": lambda p, unit=unit: p.max_duration.unit is unit for unit in TimeUnit if unit != "dur"},
    **{f"interval in {unit}": lambda p, unit=unit: unit in intervals(p) for unit in TimeUnit if unit != "iter"},
    "fractions of epochs": lambda p: "dur" in intervals(p) and p.max_duration.unit == "ep",
    "an interval of 0": lambda p: any(not p.interval_of(each) for each in p.evaluators.values()),
    "intervals of their own and none": lambda p: (
        {each.interval is None for each in p.evaluators.values()} == {True, False}
    ),
    "two evaluators": lambda p: len(p.evaluators) == 2,
    "an evaluator in microbatches": lambda p: any(each.microbatch_size for each in p.evaluators.values()),
    "no length": lambda p: not p.sized,
    "a length": lambda p: p.sized,
    "cut": lambda p: p.batches_per_epoch and p.batches_per_epoch < len(p.batches),
    "shorter than known": lambda p: not p.sized and p.batches_per_epoch and p.batches_per_epoch > len(p.batches),
    "ragged batches": lambda p: len(set(p.batches)) > 1,
    "ragged microbatches": lambda p: (
        p.microbatch_size and any(size > p.microbatch_size and size % p.microbatch_size for size in p.batches)
    ),
    "whole batches": lambda p: p.microbatch_size is None,
    "iterations in epochs": lambda p: p.iteration_length and p.iteration_length.unit == "ep",
    "iterations in tokens": lambda p: p.iteration_length and p.iteration_length.unit == "tok",
    "two epochs": lambda p: expected(p).count(Event.EPOCH_END) == 2 and len(p.batches) > 1,
    "ended in an epoch": has(Event.BATCH_CHECKPOINT, Event.FIT_END),
    "ended in a batch": lambda p: p.max_duration.unit == "s" and p.max_duration.value % p.seconds_per_batch,
    "a duration on the last batch": has(Event.BATCH_CHECKPOINT, Event.EPOCH_END),
    "an iteration ends in an epoch": has(Event.ITERATION_CHECKPOINT, Event.ITERATION_START, Event.BEFORE_DATALOADER),
    "a batch that never gets there": lambda p: p.iteration_length and Event.ITERATION_END not in expected(p),
    "a last evaluation": lambda p: Event.EVAL_START in expected(p) and expected(p)[-2] is Event.EVAL_AFTER_ALL,
    "evaluation in an epoch": has(Event.BATCH_END, Event.EVAL_BEFORE_ALL),
    "many batches": lambda p: trained(p) == 9,
}


@pytest.mark.parametrize("kind", VARIETY)
def test_plans_come_in_all_kinds(kind: str) -> None:
    assert any(VARIETY[kind](plan) for plan in many_plans())


def _subsets(options: Any) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from(options), min_size=1, unique=True)


@st.composite
def _options(draw: st.DrawFn) -> dict[str, Any]:
    orders = draw(_subsets(["current", "2021"]))
    interval_units = draw(_subsets(["ep", "ba", "sp", "tok", "s", "dur"]))
    units = draw(_subsets(["ep", "ba", "sp", "tok", "s", "iter"]))
    iterations = draw(st.booleans()) or "iter" in units
    if ("2021" in orders and units == ["iter"]) or interval_units == ["dur"]:
        units = sorted({*units, "tok"} - {"iter"})
    min_batches = draw(st.integers(0, 5))
    min_evaluators = draw(st.integers(0, 3))
    return {
        "orders": orders,
        "units": units,
        "interval_units": interval_units,
        "iterations": iterations,
        "min_batches": min_batches,
        "max_batches": draw(st.integers(min_batches, 6)),
        "max_batches_per_epoch": draw(st.integers(1, 5)),
        "max_samples": draw(st.integers(1, 4)),
        "min_evaluators": min_evaluators,
        "max_evaluators": draw(st.integers(min_evaluators, 4)),
    }


@examples(80, 3000)
@given(_options(), st.data())
def test_plans_keep_to_their_options(options: dict[str, Any], data: st.DataObject) -> None:
    plan = data.draw(plans(**options))
    assert plan.order in options["orders"]
    assert plan.max_duration.unit in options["units"]
    assert options["min_batches"] <= trained(plan) <= options["max_batches"]
    assert len(plan.batches) <= max(1, min(options["max_batches_per_epoch"], options["max_batches"]))
    sizes = [*plan.batches, plan.microbatch_size or 1]
    for evaluator in plan.evaluators.values():
        sizes += [*evaluator.batches, evaluator.microbatch_size or 1]
    assert max(sizes) <= options["max_samples"]
    assert options["min_evaluators"] <= len(plan.evaluators) <= options["max_evaluators"]
    assert intervals(plan) <= set(options["interval_units"])
    assert options["iterations"] or plan.iteration_length is None
    check(expected(plan), complete=True, order=plan.order)


@pytest.mark.parametrize("unit", ["ep", "iter"])
def test_whole_epochs_and_iterations_come_out_even(unit: str) -> None:
    drawn = sample(plans(units=[unit], min_batches=5, max_batches=5), 30)
    assert {trained(plan) for plan in drawn} == {5}
    assert {len(plan.batches[: plan.batches_per_epoch]) for plan in drawn} == {1}


def test_units_that_no_plan_could_have_are_left_out_by_themselves() -> None:
    for options in ({"iterations": False}, {"orders": ["2021"]}, {"interval_units": ["dur"]}):
        drawn = sample(plans(**options), 80)  # type: ignore[arg-type]
        assert {plan.max_duration.unit.value for plan in drawn} == {"ba", "ep", "sp", "tok", "s"}
    drawn = sample(plans(interval_units=["dur"], max_evaluators=0), 150)
    assert "iter" in {plan.max_duration.unit.value for plan in drawn}


def test_an_order_that_comes_twice_is_drawn_oftener() -> None:
    drawn = sample(plans(orders=["current", "current", "current", "2021"]), 100)
    assert 8 < sum(plan.order == "2021" for plan in drawn) < 40


def test_drawing_is_cheap() -> None:
    """Milliseconds: what is drawn is to be run, which takes tens of them."""

    sample(cases())
    began = time.process_time()
    sample(cases(), 100)
    assert time.process_time() - began < 100 * 0.02


# Cases and problems


def test_cases_and_problems_shrink_to_the_simplest() -> None:
    assert simplest(problems()) is PROBLEMS["linear"]
    assert simplest(cases()) == Case(plan=SIMPLEST)
    assert repr(simplest(cases(), lambda case: case.problem.name == "exact" and case.clip_grad)) == (
        "Case(plan=Plan(batches=(1,), max_duration='1ba'), problem='exact', clip_grad=0.5)"
    )


def test_every_problem_is_drawn() -> None:
    assert {problem.name for problem in sample(problems())} == set(PROBLEMS)
    assert {case.problem.name for case in sample(cases(), 100)} == set(PROBLEMS)
    assert {case.problem.name for case in sample(cases(problems=["mlp", "tied"]))} == {"mlp", "tied"}


def test_problems_keep_to_their_options() -> None:
    own = attrs.evolve(PROBLEMS["linear"], name="own")
    assert sample(problems(among=own)) == [own]
    assert sample(cases(problems=[own]))[0].problem is own
    assert {problem.name for problem in sample(problems(separable=True))} == {"linear", "tied", "exact"}
    assert {problem.name for problem in sample(problems(separable=False))} == {"mlp", "convolution", "transformer"}
    assert {problem.name for problem in sample(problems(images=True))} == {"convolution"}
    assert "convolution" not in {problem.name for problem in sample(problems(images=False))}
    assert {problem.name for problem in sample(problems(among=["mlp", "tied"]))} == {"mlp", "tied"}


def test_cases_keep_to_their_options() -> None:
    drawn = sample(
        cases(
            plans=plans(max_samples=1),
            problems=problems(images=True),
            optimizers=["adamw"],
            precisions=["amp_bf16"],
            clip_grads=[2.0],
            max_seed=0,
        )
    )
    wanted = Case(plan=SIMPLEST, problem="convolution", optimizer="adamw", precision="amp_bf16", clip_grad=2.0, seed=0)
    assert all(attrs.evolve(case, plan=SIMPLEST) == wanted for case in drawn)
    assert all(set(case.plan.batches) == {1} for case in drawn)
    drawn = sample(cases(), 100)
    assert {case.seed for case in drawn} == {0, 1, 2, 3}
    assert {case.optimizer for case in drawn} == {"sgd", "adamw"}
    assert {case.precision for case in drawn} == {"fp32", "amp_bf16"}
    assert {case.clip_grad for case in drawn} == {None, 0.5}


# Times and timestamps


def test_times_shrink_to_the_least() -> None:
    assert simplest(times()) == Time("0ba")
    assert simplest(times(units=["ep", "s"], min_value=2.5)) == Time("3ep")
    assert simplest(times(), lambda time: time.unit is TimeUnit.SECOND) == Time("0s")
    drawn = sample(times(), 200)
    assert {time.unit for time in drawn if time} == set(TimeUnit)
    assert any(time.value > 10_000 for time in drawn)


@examples(40, 1000)
@given(
    st.lists(st.sampled_from(list(TimeUnit)), min_size=1),
    st.integers(0, 9) | st.floats(0, 9),
    st.integers(1, 9) | st.floats(1, 9),
    st.data(),
)
def test_times_keep_to_their_options(units: list[TimeUnit], low: float, width: float, data: st.DataObject) -> None:
    time = data.draw(times(units=units, min_value=low, max_value=low + width))
    assert time.unit in units
    assert low <= time.value <= low + width


@given(times())
def test_times_can_be_written_down(time: Time) -> None:
    assert Time(str(time)) == time


@examples(20, 100)
@given(times(units=["dur"]), times(units=["dur"], min_value=1.5))
def test_fractions_of_the_duration_are_its_whole_at_most(fraction: Time, more: Time) -> None:
    assert 0 <= fraction.value <= 1
    assert more.value == 1.5


def test_timestamps_shrink_to_the_first() -> None:
    assert simplest(timestamps()) == Timestamp()
    assert simplest(timestamps(), lambda now: now.max_duration) == Timestamp(
        max_duration=Time("1ba"), batches_per_epoch=1
    )
    second = simplest(timestamps(), lambda now: now.batch == 2)
    assert (second.sample, second.token, second.max_duration) == (2, 0, None)
    drawn = sample(timestamps(), 150)
    for kind in (
        lambda now: now.iteration and now.batch_in_iteration,
        lambda now: now.epoch and now.batch_in_epoch,
        lambda now: now.token_in_epoch < now.token,
        lambda now: now.epoch_in_iteration,
        lambda now: now.total_seconds > now.epoch_seconds > 0,
        lambda now: now.max_duration and now.batches_per_epoch is None,
        lambda now: now.elapsed == 1.0,
    ):
        assert any(kind(now) for now in drawn)


@examples(50, 1000)
@given(timestamps(plans=plans(max_batches=20)))
def test_the_counts_of_a_timestamp_fit_together(now: Timestamp) -> None:
    assert now.epoch <= now.batch <= now.sample
    assert now.batch_in_epoch <= now.sample_in_epoch
    for count in ("batch", "sample", "token"):
        assert getattr(now, f"{count}_in_epoch") <= getattr(now, count)
        assert (now.epoch == 0) <= (getattr(now, f"{count}_in_epoch") == getattr(now, count))
    for count in ("epoch", "batch", "token"):
        assert getattr(now, f"{count}_in_iteration") <= getattr(now, count)
    assert now.batch_seconds <= now.total_seconds >= now.epoch_seconds
    assert now.max_duration is None or now.elapsed is not None


# Batches


@examples(80, 2000)
@given(st.integers(1, 6), st.integers(0, 3), st.booleans(), st.data())
def test_batches_can_be_counted_and_split(least: int, more: int, nested: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(min_samples=least, max_samples=least + more, nested=nested))
    samples = num_samples(batch)
    assert least <= samples <= least + more
    assert nested or (type(batch) is tuple and len(batch) == 2)
    assert pl.Task().samples(batch) == samples
    size = data.draw(st.integers(1, samples))
    pieces = split(batch, size)
    assert [num_samples(piece) for piece in pieces] == [size] * (samples // size) + [samples % size] * bool(
        samples % size
    )
    whole = [leaf for leaf in optree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    parts = [
        [leaf for leaf in optree.tree_leaves(piece) if isinstance(leaf, torch.Tensor) and leaf.ndim] for piece in pieces
    ]
    for leaf, cut in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(cut), leaf)


def test_batches_shrink_to_a_pair_of_zeros() -> None:
    inputs, targets = simplest(batches())
    assert same(inputs, torch.zeros(1))
    assert same(targets, torch.zeros(1))
    assert same(simplest(batches(), lambda batch: isinstance(batch, dict))["inputs"], torch.zeros(1))


def leaves(batch: Any) -> list[Any]:
    return optree.tree_leaves(batch, none_is_leaf=True)  # type: ignore[no-any-return]


def test_batches_come_in_all_kinds() -> None:
    dtypes = {torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16}
    assert {batch[0].dtype for batch in sample(batches(nested=False))} == dtypes
    for dtype in dtypes:
        assert {batch[0].dtype for batch in sample(batches(nested=False, dtypes=[dtype]), 5)} == {dtype}
    drawn = sample(batches(), 200)
    for kind in (
        lambda batch: isinstance(batch, torch.Tensor),
        lambda batch: isinstance(batch, list),
        lambda batch: isinstance(batch, dict) and len(batch) == 3,
        lambda batch: isinstance(batch, tuple) and any(isinstance(child, dict) for child in batch),
        lambda batch: any(child == [f"text {n}" for n in range(num_samples(batch))] for child in batch),
        lambda batch: None in [leaf for leaf in leaves(batch) if not isinstance(leaf, torch.Tensor)],
        lambda batch: any(isinstance(leaf, torch.Tensor) and leaf.ndim == 0 for leaf in leaves(batch)),
        lambda batch: any(isinstance(leaf, torch.Tensor) and leaf.ndim == 3 for leaf in leaves(batch)),
        lambda batch: any(
            isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.any() for leaf in leaves(batch)
        ),
    ):
        assert any(kind(batch) for batch in drawn)


# Algorithms


@pytest.mark.parametrize("name", PROBLEMS)
@examples(6, 200)
@given(data=st.data())
def test_drawn_algorithms_train_their_problem(name: str, data: st.DataObject) -> None:
    composition = data.draw(algorithms(problem=name))
    case = data.draw(cases(problems=name, plans=plans(max_batches=4)))
    names = [member.name for member in composition.members]
    assert len(set(names)) == len(names)
    pairs = case.run(composition, strict=True)
    assert [event for event, _ in pairs] == expected(case.plan)


@examples(10, 100)
@given(
    algorithms(problem="convolution", among=["blurpool", "label_smoothing"], min_size=1), cases(problems="convolution")
)
def test_blurpool_is_drawn_where_it_is_named(composition: Composition, case: Case) -> None:
    if sum("blurpool" in member.name for member in composition.members) < 2:
        case.run(composition)


def drawn_algorithms(strategy: st.SearchStrategy[Composition], number: int = 80) -> list[list[str]]:
    return [[member.name for member in composition.members] for composition in sample(strategy, number)]


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (None, {"gradient_clipping", "ema", "sam"}),
        ("linear", {"gradient_clipping", "ema", "sam", "label_smoothing"}),
        ("exact", {"gradient_clipping", "ema", "sam"}),
        ("transformer", {"gradient_clipping", "ema", "sam", "label_smoothing"}),
        ("convolution", {"gradient_clipping", "ema", "sam", "label_smoothing"}),
    ],
)
def test_algorithms_serve_their_problem(problem: str | None, wanted: set[str]) -> None:
    names = drawn_algorithms(algorithms(problem=problem, min_size=1, max_size=1))
    assert {name for (name,) in names} == wanted


def test_algorithms_keep_to_their_options() -> None:
    assert simplest(algorithms()) == pl.compose()
    assert {len(names) for names in drawn_algorithms(algorithms())} == {0, 1, 2, 3}
    assert {len(names) for names in drawn_algorithms(algorithms(min_size=2))} == {2, 3}
    averages = ["ema", "ema_2", "ema_3"]
    only = drawn_algorithms(algorithms(among=["ema"], min_size=1))
    assert all(names == averages[: len(names)] for names in only)
    assert averages in only
    # Without a problem, whoever names them knows what for.
    assert drawn_algorithms(algorithms(among=["blurpool"], min_size=1), 1) == [["blurpool"]]


def test_settings_of_algorithms_are_drawn() -> None:
    made = [composition.members[0] for composition in sample(algorithms(among=["ema"], min_size=1, max_size=1))]
    assert {Event.BATCH_END, Event.EPOCH_END} <= {event for member in made for event in member.handlers}


# States

IN_FIT = sorted(
    {event for event in Event if not event.is_predict and "standalone" not in event.value}, key=list(Event).index
)


@pytest.mark.parametrize("event", IN_FIT)
def test_a_state_at_every_event(event: Event) -> None:
    # The first plan to be drawn is the simplest, which lacks most events.
    assert all(event in expected(plan) for plan in sample(plans_with(frozenset({event})), 5))
    assert {state.event for state in sample(states(at=event), 2)} == {event}


@examples(15, 300)
@given(cases(plans=plans(max_batches=3)), st.data())
def test_a_state_is_one_of_its_run(case: Case, data: st.DataObject) -> None:
    pairs = case.run()
    position = data.draw(st.integers(0, len(pairs) - 1))
    event, wanted = pairs[position]
    given_ = state_at(case, position)
    assert given_.event is event
    assert optree.tree_all(optree.tree_map(same, without_times(given_), without_times(wanted)))
    if event in BOUNDARIES:
        rest = going_on([event for event, _ in pairs], position)
        assert [event for event, _ in case.run(start=given_)] == rest


def without_times(state: pl.State) -> list[Any]:
    return optree.tree_leaves(state, namespace="pure_loop")  # type: ignore[arg-type]


def test_states_shrink_to_the_first() -> None:
    first = simplest(states())
    assert (first.event, first.timestamp, list(first.params)) == (
        Event.INIT,
        Timestamp(max_duration=Time("1ba"), batches_per_epoch=1),
        ["weight", "bias"],
    )
    assert not first.algorithm_state
    assert simplest(states(at=[Event.EPOCH_END, "batch_end"])).event is Event.BATCH_END


def test_states_keep_to_their_options() -> None:
    held = states(cases=cases(problems="tied"), at=BOUNDARIES, algorithms=pl.algorithms.ema("1ba"))
    for state in sample(held, 15):
        assert "encode.weight" in state.params
        assert state.event in BOUNDARIES
    remembered = {name for state in sample(states(at="batch_end"), 40) for name in state.algorithm_state}
    assert {"ema", "label_smoothing"} <= remembered
    assert not any(state.algorithm_state for state in sample(states(at="batch_end", algorithms=()), 10))
    drawn = states(at="fit_end", algorithms=algorithms(among=["ema"], min_size=2))
    assert all({"ema", "ema_2"} <= state.algorithm_state.keys() for state in sample(drawn, 3))


def test_states_of_cases_that_never_come_there_are_not_drawn() -> None:
    never = states(cases=cases(plans=plans(max_evaluators=0)), at=Event.EVAL_END)
    with pytest.raises(hypothesis.errors.Unsatisfiable):
        find(
            never,
            lambda state: True,
            settings=settings(database=None, max_examples=10, suppress_health_check=list(HealthCheck)),
        )


# Streams of events


@pytest.mark.parametrize("order", ["current", "2021"])
def test_event_streams_are_legal_and_complete(order: Any) -> None:
    streams = sample(event_streams(order=order), 60)
    for stream in streams:
        check(stream, complete=True, order=order)
    assert {stream[0] for stream in streams} == {Event.INIT, Event.FIT_START}


def test_event_streams_keep_to_their_options() -> None:
    assert simplest(event_streams()) == expected(SIMPLEST)
    assert {stream[0] for stream in sample(event_streams(going_on=False))} == {Event.INIT}
    evaluated = event_streams(plans=plans(min_evaluators=1, interval_units=["ba"]), going_on=False)
    assert all(Event.EVAL_START in stream for stream in sample(evaluated))
    assert not any(Event.BEFORE_LOAD in stream for stream in sample(event_streams(plans=plans(orders=["2021"]))))


# Bad arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plans(units="ba"), r"plans: units='ba': give a list of some of 'ba', 'ep', 'sp', 'tok', 's', 'iter'"),
        (lambda: plans(units=3), "give a list of some of"),
        (lambda: plans(units=["ba", "days"]), "units holds 'days', which is none of 'ba', 'ep'"),
        (lambda: plans(units=["dur"]), "units holds 'dur', which is none of"),
        (lambda: plans(units=[]), r"units=\[\] leaves nothing to draw from"),
        (lambda: plans(interval_units=["iter"]), "interval_units holds 'iter', which is none of"),
        (lambda: plans(orders=["2022"]), "orders holds '2022', which is none of 'current', '2021'"),
        (lambda: plans(orders=[{}]), "which is none of"),
        (lambda: plans(min_batches=-1), r"min_batches is at least 0, got -1; write plans\(min_batches=1\)"),
        (lambda: plans(max_batches=2.5), "max_batches is a whole number, got 2.5 of type float"),
        (lambda: plans(min_batches=10), "min_batches=10 is more than max_batches=9"),
        (lambda: plans(max_batches_per_epoch=0), "max_batches_per_epoch is at least 1"),
        (lambda: plans(max_samples=0), "max_samples is at least 1"),
        (lambda: plans(min_evaluators=3), "min_evaluators=3 is more than max_evaluators=2"),
        (lambda: plans(max_evaluators=True), "max_evaluators is a whole number, got True"),
        (lambda: plans(iterations=1), "iterations is True or False, got 1"),
        (lambda: plans(units=["iter"], iterations=False), "units holds 'iter', and iterations=False"),
        (lambda: plans(units=["iter"], orders=["current", "2021"]), "which has no iterations"),
        (lambda: plans(units=["iter", "ba"], interval_units=["dur"]), "of which fit takes no fractions"),
        (lambda: problems(among=[]), "give one at least"),
        (lambda: problems(among=["lin"]), "'lin' is not known; there are 'linear'"),
        (lambda: problems(among=3), r"problems: among=3: give names such as \['linear'\]"),
        (lambda: problems(separable=1), "separable is True or False"),
        (lambda: problems(images=True, separable=True), "none of those given has separable=True and images=True"),
        (
            lambda: cases(plans=plans),
            r"plans is a strategy, and <function plans .* \(a function that makes one: call it\)",
        ),
        (lambda: cases(plans=SIMPLEST), r"cases: plans is a strategy, and Plan\(.* of type Plan is none; write"),
        (lambda: cases(problems=["lin"]), "'lin' is not known"),
        (lambda: cases(problems=3), "cases: problems=3: give names"),
        (lambda: cases(optimizers=["lion"]), "optimizers holds 'lion', which is none of 'sgd', 'adamw'"),
        (lambda: cases(precisions="fp32"), r"precisions is a list, got 'fp32'; write cases\(precisions="),
        (lambda: cases(precisions=[]), "leaves nothing to draw from"),
        (lambda: cases(precisions=["fp8"]), "fp8"),
        (lambda: cases(clip_grads=1.0), r"clip_grads is a list, got 1.0; write cases\(clip_grads=\[None, 1.0\]\)"),
        (lambda: cases(clip_grads=[0.0]), "clip_grads is above 0 and finite, got 0.0"),
        (lambda: cases(max_seed=-1), "max_seed is at least 0"),
        (lambda: times(units=["weeks"]), "units holds 'weeks'"),
        (lambda: times(min_value=-1), "min_value is at least 0 and finite, got -1; a time counts from 0"),
        (lambda: times(max_value=float("inf")), "max_value is at least 0 and finite"),
        (lambda: times(max_value="9ba"), "max_value is a number, got '9ba' of type str"),
        (lambda: times(min_value=3, max_value=2), "min_value=3 is more than max_value=2"),
        (lambda: times(min_value=1.2, max_value=1.8), "no whole number lies between min_value=1.2 and max_value=1.8"),
        (lambda: timestamps(plans=[SIMPLEST]), "timestamps: plans is a strategy"),
        (lambda: batches(min_samples=0), "min_samples is at least 1"),
        (lambda: batches(min_samples=7), "min_samples=7 is more than max_samples=6"),
        (lambda: batches(dtypes=["float32"]), "dtypes holds 'float32', which is none of torch.float32"),
        (lambda: batches(dtypes=torch.float32), "give a list of some of torch.float32"),
        (lambda: batches(nested="yes"), "nested is True or False, got 'yes'"),
        (lambda: algorithms(problem="lin"), "'lin' is not known"),
        (lambda: algorithms(problem=3), "give a name such as 'linear'"),
        (lambda: algorithms(among=["swa"]), "among holds 'swa', which is none of 'gradient_clipping', 'ema'"),
        (lambda: algorithms(among="ema"), "give a list of some of"),
        (
            lambda: algorithms(problem="exact", among=["label_smoothing"]),
            r"holds 'label_smoothing', which can't serve Problem\('exact'\); there are 'gradient_clipping', 'ema', ",
        ),
        (lambda: algorithms(problem="mlp", among=["blurpool"]), r"can't serve Problem\('mlp'\)"),
        (lambda: algorithms(min_size=4), "min_size=4 is more than max_size=3"),
        (lambda: states(at="batch_ende"), r"at='batch_ende': 'batch_ende' is not an event; did you mean"),
        (lambda: states(at=[]), r"at=\[\] holds no event"),
        (lambda: states(at=3), "states: at=3: write an event such as Event.BATCH_END, or a list"),
        (lambda: states(at=["predict_end"]), r"at holds Event.PREDICT_END, which no run of fit has"),
        (lambda: states(cases=[Case(plan=SIMPLEST)]), "states: cases is a strategy"),
        (lambda: states(algorithms=["ema"]), "algorithms= holds 'ema' of type str, not an algorithm"),
        (lambda: state_at(Case(plan=SIMPLEST), 21), "position=21, and the last position of this run is 20"),
        (lambda: state_at(Case(plan=SIMPLEST), -1), "position is at least 0"),
        (lambda: event_streams(order="2022"), "order holds '2022'"),
        (
            lambda: event_streams(order="2021", plans=plans()),
            "order='2021' and plans, which have an order of their own",
        ),
        (lambda: event_streams(plans=SIMPLEST), "event_streams: plans is a strategy"),
        (lambda: event_streams(going_on="always"), "going_on is True or False"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message) as caught:
        call()
    assert isinstance(caught.value, PureLoopError)


@pytest.mark.parametrize("name", sorted(set(strategies.__all__) - {"state_at"}))
def test_options_are_keywords(name: str) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        getattr(strategies, name)(1)


# By type


@pytest.mark.parametrize("kind", BY_TYPE, ids=lambda kind: kind.__name__)
def test_every_type_is_found(kind: type) -> None:
    assert isinstance(simplest(st.from_type(kind)), kind)


def test_every_type_that_hypothesis_is_told_of_has_a_strategy() -> None:
    assert _hypothesis._told == set(BY_TYPE)


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
    """Hypothesis looks for subclasses of what it is asked for; somebody else's test wants none of ours."""

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
    monkeypatch.setattr(_hypothesis, "_awake", lambda: tuple(awake))
    generators = _hypothesis.TorchRandom()
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


# What a failure shows


def shown(strategy: st.SearchStrategy[Any], condition: Callable[[Any], Any] = lambda value: True) -> str:
    """What Hypothesis says of the value at which a test fails."""

    @settings(database=None, print_blob=False, phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False)
    @given(value=strategy)
    def fails(value: Any) -> None:
        assert not condition(value)

    with pytest.raises(AssertionError) as caught:
        fails()
    text = "".join("".join(caught.value.__notes__).split())
    return text.partition("value=")[2].removesuffix(",)")


def test_a_failure_shows_code_that_gives_the_value() -> None:
    plan = "Plan(batches=(1,),max_duration='1ba')"
    assert shown(plans()) == plan
    assert shown(cases(problems="mlp")) == f"Case(plan={plan},problem='mlp')"
    assert shown(times()) == "Time('0ba')"
    assert shown(timestamps(), lambda now: now.batch and now.max_duration) == (
        "Timestamp(batch=1,sample=1,batch_in_epoch=1,sample_in_epoch=1,batch_in_iteration=1,"
        "max_duration=Time('1ba'),batches_per_epoch=1)"
    )
    assert shown(states(at="batch_end")) == f"state_at(Case(plan={plan}),16)"
    assert (
        shown(algorithms(), lambda drawn: any(each.name == "sam" for each in drawn.members)) == "compose(sam(rho=1.0))"
    )
