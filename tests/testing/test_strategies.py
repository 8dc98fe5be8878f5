"""Strategies of plans, cases and problems: they are valid, come in all their kinds, and shrink to the simplest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, Plan, check, expected
from pure_loop.testing._values import timestamps_of
from pure_loop.testing.case import Case
from pure_loop.testing.problems import PROBLEMS
from pure_loop.testing.strategies import cases, plans, problems
from pure_loop.time import TimeUnit
from tests.support.cpu_time import within
from tests.support.samples import SIMPLEST, sample, simplest
from tests.support.tiers import examples


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


@pytest.mark.slow
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
    drawn = sample(plans(orders=["current", "current", "current", "2021"]), 200)
    assert 16 < sum(plan.order == "2021" for plan in drawn) < 80


def test_drawing_is_cheap() -> None:
    """Milliseconds: what is drawn is to be run, which takes tens of them."""

    sample(cases())
    within(100 * 0.02, lambda: sample(cases(), 100))


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
