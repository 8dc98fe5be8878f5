"""Strategies: what they draw is valid, keeps to its options, comes in all kinds, and shrinks to the simplest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import attrs
import optree
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop._internal.bits import same
from pure_loop.data.samples import num_samples, split
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, EvaluatorPlan, Plan, check, expected, going_on
from pure_loop.testing._compositions import ALGORITHMS
from pure_loop.testing._plans import plans_with
from pure_loop.testing._values import timestamps_of
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
from tests.support import refused
from tests.support.cpu_time import within
from tests.support.samples import SIMPLEST, sample, simplest
from tests.support.tiers import examples

Predicates = dict[str, Callable[[Any], Any]]

# What is drawn is valid, and keeps to its options.


@examples(30, 1000)
@given(cases(plans=plans(orders=("current", "current", "2021"), min_batches=0)), st.data())
@example(Case(plan=Plan(batches=(1, 1), max_duration="1ba", order="2021")), None)
@example(Case(plan=Plan(batches=(1,), max_duration="1ba", sized=False, order="2021")), None)
def test_a_case_runs_as_its_plan_says_and_a_state_is_one_of_its_run(case: Case, data: Any) -> None:
    pairs = case.run()
    events = [event for event, _ in pairs]
    assert events == expected(case.plan)
    counted = [state.timestamp for _, state in pairs]
    assert list(dict.fromkeys(counted)) == list(dict.fromkeys(timestamps_of(case.plan)))
    position = 0 if data is None else data.draw(st.integers(0, len(pairs) - 1))
    event, wanted = pairs[position]
    found = state_at(case, position)
    leaves: Any = [optree.tree_leaves(state, namespace="pure_loop") for state in (found, wanted)]  # type: ignore[arg-type]
    assert optree.tree_all(optree.tree_map(same, *leaves))
    if event in BOUNDARIES:
        assert [event for event, _ in case.run(start=found)] == going_on(events, position)


def subsets(options: Any) -> Any:
    return st.lists(st.sampled_from(options), min_size=1, unique=True)


def ranges(most: int) -> Any:
    return st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted)


def intervals(plan: Plan) -> set[TimeUnit]:
    return {plan.interval_of(evaluator).unit for evaluator in plan.evaluators.values()}


@examples(60, 3000)
@given(
    st.fixed_dictionaries(
        {
            "orders": subsets(["current", "2021"]),
            "units": st.none() | subsets(["ep", "ba", "sp", "tok", "s", "iter"]),
            "interval_units": subsets(["ep", "ba", "sp", "tok", "s", "dur"]),
            "iterations": st.booleans(),
            "max_batches_per_epoch": st.integers(1, 5),
            "max_samples": st.integers(1, 4),
        }
    ),
    ranges(6),
    ranges(4),
    st.data(),
)
def test_plans_keep_to_their_options(options: Any, numbers: Any, evaluators: Any, data: Any) -> None:
    units = options["units"]
    if units and (options["interval_units"] == ["dur"] or ("2021" in options["orders"] and units == ["iter"])):
        units = options["units"] = sorted({*units, "tok"} - {"iter"})
    options["iterations"] |= "iter" in (units or ())
    more = dict(
        zip(("min_batches", "max_batches", "min_evaluators", "max_evaluators"), numbers + evaluators, strict=True)
    )
    plan = data.draw(plans(**options, **more))
    events = expected(plan)
    assert plan.order in options["orders"]
    assert units is None or plan.max_duration.unit in units
    assert numbers[0] <= events.count(Event.BATCH_END) <= numbers[1]
    assert len(plan.batches) <= max(1, min(options["max_batches_per_epoch"], numbers[1]))
    sizes = [*plan.batches, plan.microbatch_size or 1]
    for evaluator in plan.evaluators.values():
        sizes += [*evaluator.batches, evaluator.microbatch_size or 1]
    assert max(sizes) <= options["max_samples"]
    assert evaluators[0] <= len(plan.evaluators) <= evaluators[1]
    assert intervals(plan) <= set(options["interval_units"])
    assert options["iterations"] or plan.iteration_length is None
    check(events, complete=True, order=plan.order)


LOW, WIDTH = (st.integers(least, 9) | st.floats(least, 9) for least in (0, 1))


@examples(50, 1000)
@given(subsets(list(TimeUnit)), LOW, WIDTH, timestamps(plans=plans(max_batches=20)), event_streams(), st.data())
def test_times_keep_to_their_options_counts_fit_together_and_events_are_legal(
    units: Any, low: float, width: float, now: Timestamp, events: list[Event], data: st.DataObject
) -> None:
    time = data.draw(times(units=units, min_value=low, max_value=low + width))
    assert time.unit in units
    assert low <= time.value <= low + width
    assert Time(str(time)) == time
    assert now.epoch <= now.batch <= now.sample
    assert now.batch_in_epoch <= now.sample_in_epoch
    for count in ("batch", "sample", "token"):
        assert getattr(now, f"{count}_in_epoch") <= getattr(now, count)
        assert (now.epoch == 0) <= (getattr(now, f"{count}_in_epoch") == getattr(now, count))
    for count in ("epoch", "batch", "token"):
        assert getattr(now, f"{count}_in_iteration") <= getattr(now, count)
    assert now.batch_seconds <= now.total_seconds >= now.epoch_seconds
    assert now.max_duration is None or now.elapsed is not None
    check(events, complete=True, order="current")


def tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]


@examples(60, 2000)
@given(st.integers(1, 6), st.integers(0, 3), st.booleans(), st.data())
def test_batches_can_be_counted_and_split(least: int, more: int, nested: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(min_samples=least, max_samples=least + more, nested=nested))
    samples = num_samples(batch)
    assert least <= samples <= least + more
    assert nested or (type(batch) is tuple and len(batch) == 2)
    assert pl.Task().samples(batch) == samples
    size = data.draw(st.integers(1, samples))
    pieces, left = split(batch, size), samples % size
    assert [num_samples(piece) for piece in pieces] == [size] * (samples // size) + [left] * bool(left)
    for leaf, cut in zip(tensors(batch), zip(*map(tensors, pieces), strict=True), strict=True):
        assert torch.equal(torch.cat(cut), leaf)


def test_problems_and_cases_keep_to_their_options() -> None:
    rows: list[Any] = [
        ({"among": attrs.evolve(PROBLEMS["linear"], name="own")}, {"own"}),
        ({"separable": True}, {"linear", "tied", "exact"}),
        ({"images": False}, set(PROBLEMS) - {"convolution"}),
        ({"among": ["mlp", "tied"]}, {"mlp", "tied"}),
    ]
    for options, names in rows:
        assert {problem.name for problem in sample(problems(**options))} == names
    wanted = Case(plan=SIMPLEST, problem="convolution", optimizer="adamw", precision="amp_bf16", clip_grad=2.0, seed=0)
    chosen: dict[str, Any] = {"optimizers": ["adamw"], "precisions": ["amp_bf16"], "clip_grads": [2.0], "max_seed": 0}
    drawn = sample(cases(plans=plans(max_samples=1), problems=problems(images=True), **chosen), 20)
    assert all(attrs.evolve(case, plan=SIMPLEST) == wanted and set(case.plan.batches) == {1} for case in drawn)
    sample(cases())
    # Milliseconds: what is drawn is to be run, which takes tens of them.
    drawn = within(100 * 0.02, lambda: sample(cases(), 100))
    found = [{getattr(case, name) for case in drawn} for name in ("seed", "optimizer", "precision", "clip_grad")]
    assert found == [{0, 1, 2, 3}, {"sgd", "adamw"}, {"fp32", "amp_bf16"}, {None, 0.5}]
    assert {case.problem.name for case in drawn} == set(PROBLEMS)


def names_of(number: int = 80, **options: Any) -> list[list[str]]:
    return [[each.name for each in composition.members] for composition in sample(algorithms(**options), number)]


def test_algorithms_keep_to_their_options_and_serve_their_problem() -> None:
    needs = {name: vars(sys.modules[make.__module__]).keys() for name, make in ALGORITHMS.items()}
    # Those that need nothing of a problem, and keep each law.
    free = {name for name, found in needs.items() if not {"SERVES", "EXPECTED_FAILURES"} & found}
    one: dict[str, Any] = {"min_size": 1, "max_size": 1}
    for problem, more in ((None, set()), ("exact", set()), ("transformer", {"label_smoothing"})):
        assert {name for (name,) in names_of(problem=problem, **one)} == free | more
    for problem, name in (
        ("mlp", "gyro_dropout"),
        ("linear", "mixup"),
        ("convolution", "blurpool"),
        (None, "blurpool"),
    ):
        assert names_of(1, problem=problem, among=[name], **one) == [[name]]
    assert {len(names) for names in names_of()} == {0, 1, 2, 3}
    only = names_of(among=["ema"], min_size=1)
    assert {tuple(names) for names in only} == {("ema", "ema_2", "ema_3")[:n] for n in (1, 2, 3)}
    made = [composition.members[0] for composition in sample(algorithms(among=["ema"], **one))]
    assert {Event.BATCH_END, Event.EPOCH_END} <= {event for member in made for event in member.handlers}


def test_states_and_streams_keep_to_their_options() -> None:
    held = states(cases=cases(problems="tied"), at=BOUNDARIES, algorithms=pl.algorithms.ema("1ba"))
    for state in sample(held, 15):
        assert "encode.weight" in state.params
        assert state.event in BOUNDARIES
        assert state.algorithm_state.keys() == {"ema"}
    remembered = {name for state in sample(states(at="batch_end"), 80) for name in state.algorithm_state}
    assert {"ema", "early_stopping"} <= remembered
    assert {stream[0] for stream in sample(event_streams())} == {Event.INIT, Event.FIT_START}
    assert {stream[0] for stream in sample(event_streams(going_on=False))} == {Event.INIT}
    of_2021: list[Any] = [{"order": "2021"}, {"plans": plans(orders=["2021"])}]
    for options in of_2021:
        for stream in sample(event_streams(**options), 20):
            check(stream, complete=True, order="2021")


# It comes in all kinds.


def has(*wanted: Event) -> Callable[[Plan], bool]:
    """Whether these events come right after each other in a run."""
    return lambda p: wanted in zip(*[expected(p)[at:] for at in range(len(wanted))], strict=False)


def leaves(batch: Any) -> list[Any]:
    return optree.tree_leaves(batch, none_is_leaf=True)


KINDS_OF_PLANS: Predicates = {
    **{f"duration in {unit}": lambda p, unit=unit: p.max_duration.unit is unit for unit in TimeUnit if unit != "dur"},
    **{f"interval in {unit}": lambda p, unit=unit: unit in intervals(p) for unit in TimeUnit if unit != "iter"},
    "intervals of their own and none": lambda p: len({each.interval is None for each in p.evaluators.values()}) == 2,
    "cut": lambda p: p.batches_per_epoch and p.batches_per_epoch < len(p.batches),
    "shorter than known": lambda p: not p.sized and p.batches_per_epoch and p.batches_per_epoch > len(p.batches),
    "ragged microbatches": lambda p: p.microbatch_size and any(n % p.microbatch_size for n in p.batches),
    "iterations in tokens": lambda p: p.iteration_length and p.iteration_length.unit == "tok",
    "ended in a batch": lambda p: p.max_duration.unit == "s" and p.max_duration.value % p.seconds_per_batch,
    "an iteration ends in an epoch": has(Event.ITERATION_CHECKPOINT, Event.ITERATION_START, Event.BEFORE_DATALOADER),
    "a last evaluation": has(Event.EVAL_AFTER_ALL, Event.FIT_END),
}
KINDS_OF_TIMESTAMPS: Predicates = {
    "in an iteration": lambda now: now.iteration and now.batch_in_iteration and now.epoch_in_iteration,
    "in an epoch": lambda now: now.epoch and now.batch_in_epoch and now.token_in_epoch < now.token,
    "epochs of no length": lambda now: now.max_duration and now.batches_per_epoch is None,
    "the end": lambda now: now.elapsed == 1.0,
}
KINDS_OF_BATCHES: Predicates = {
    "nested": lambda batch: isinstance(batch, tuple) and any(isinstance(child, dict) for child in batch),
    "texts": lambda batch: any(child == [f"text {n}" for n in range(num_samples(batch))] for child in batch),
    "None": lambda batch: any(leaf is None for leaf in leaves(batch)),
    "a number": lambda batch: any(isinstance(leaf, torch.Tensor) and leaf.ndim == 0 for leaf in leaves(batch)),
    "a matrix each": lambda batch: any(leaf.ndim == 3 for leaf in tensors(batch)),
    "numbers but 0": lambda batch: any(leaf.is_floating_point() and leaf.any() for leaf in tensors(batch)),
}


def test_all_kinds_are_drawn() -> None:
    for strategy, number, kinds in (
        (plans(), 300, KINDS_OF_PLANS),
        (timestamps(), 150, KINDS_OF_TIMESTAMPS),
        (batches(), 200, KINDS_OF_BATCHES),
    ):
        drawn = sample(strategy, number)
        assert not [kind for kind, is_one in kinds.items() if not any(is_one(value) for value in drawn)]
    assert {time.unit for time in sample(times(), 200) if time} == set(TimeUnit)
    # An order that comes twice is drawn oftener.
    drawn = sample(plans(orders=["current", "current", "current", "2021"]), 200)
    assert 16 < sum(plan.order == "2021" for plan in drawn) < 80
    dtypes = {torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16}
    assert {batch[0].dtype for batch in sample(batches(nested=False))} == dtypes


@pytest.mark.slow  # a search for plans of each event
def test_a_state_at_every_event() -> None:
    for event in Event:
        if not event.is_predict and "standalone" not in event.value:
            assert all(event in expected(plan) for plan in sample(plans_with(frozenset({event})), 5))
            assert {state.event for state in sample(states(at=event), 2)} == {event}


# It shrinks to the simplest.


def test_the_simplest_is_found() -> None:
    small: dict[str, Any] = {"batches": (1,), "max_duration": "1ba"}
    for strategy, condition, wanted in (
        (plans(min_batches=0), lambda plan: True, Plan(batches=(1,), max_duration="0ba")),
        (plans(), lambda plan: plan.evaluators, Plan(**small, evaluators={"val": EvaluatorPlan((1,))})),
        (plans(), lambda plan: not plan.sized, Plan(**small, sized=False)),
        (plans(units=["tok"]), lambda _: True, Plan(batches=(1,), max_duration="1tok", tokens_per_sample=1)),
        (plans(units=["iter"]), lambda _: True, Plan(batches=(1,), max_duration="1iter", iteration_length="1ep")),
        (times(units=["ep", "s"], min_value=2.5), lambda time: True, Time("3ep")),
        (timestamps(), lambda now: True, Timestamp()),
        (cases(), lambda case: True, Case(plan=SIMPLEST)),
        (algorithms(), lambda drawn: True, pl.compose()),
    ):
        assert simplest(strategy, condition) == wanted
    for batch in (simplest(batches()), tuple(simplest(batches(), lambda batch: isinstance(batch, dict)).values())):
        assert all(same(value, torch.zeros(1)) for value in batch[:1])
    first = simplest(states())
    assert (first.event, list(first.params), dict(first.algorithm_state)) == (Event.INIT, ["weight", "bias"], {})
    assert simplest(states(at=[Event.EPOCH_END, "batch_end"])).event is Event.BATCH_END


def shown(strategy: Any, condition: Callable[[Any], Any] = lambda value: True) -> str:
    """What Hypothesis says of the value at which a test fails."""

    @settings(database=None, print_blob=False, phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False)
    @given(value=strategy)
    def fails(value: Any) -> None:
        assert not condition(value)

    with pytest.raises(AssertionError) as caught:
        fails()
    return "".join("".join(caught.value.__notes__).split()).partition("value=")[2].removesuffix(",)")


def test_a_failure_shows_code_that_gives_the_value() -> None:
    assert shown(timestamps(), lambda now: now.max_duration).startswith(
        "Timestamp(max_duration=Time('1ba'),batches_per"
    )
    plan = "Plan(batches=(1,),max_duration='1ba')"
    assert shown(states(at="batch_end")) == f"state_at(Case(plan={plan}),16)"
    assert shown(algorithms(), lambda drawn: "sam" in [each.name for each in drawn.members]) == "compose(sam(rho=1.0))"


# Bad arguments are refused at the call.

REFUSED: dict[str, Callable[[], Any]] = {
    "plans: units='ba': give a list of some of 'ba', 'ep', 'sp', 'tok', 's', 'iter'": lambda: plans(units="ba"),
    "units holds 'dur', which is none of 'ba', 'ep'": lambda: plans(units=["ba", "dur"]),
    "units=[] leaves nothing to draw from": lambda: plans(units=[]),
    "min_batches=10 is more than max_batches=9": lambda: plans(min_batches=10),
    "units holds 'iter', and iterations=False": lambda: plans(units=["iter"], iterations=False),
    "which has no iterations": lambda: plans(units=["iter"], orders=["current", "2021"]),
    "of which fit takes no fractions": lambda: plans(units=["iter", "ba"], interval_units=["dur"]),
    "problems: among=3: pass names such as ['linear']": lambda: problems(among=3),  # type: ignore[arg-type]
    "no problem has separable=True and images=True": lambda: problems(images=True, separable=True),
    "(a function that makes one: call it)": lambda: cases(plans=plans),  # type: ignore[arg-type]
    "precisions is a list, got 'fp32'; write cases(precisions=": lambda: cases(precisions="fp32"),
    "precisions=[] leaves nothing to draw from": lambda: cases(precisions=[]),
    "fp8": lambda: cases(precisions=["fp8"]),
    "clip_grads must be a finite number above 0, got 0.0": lambda: cases(clip_grads=[0.0]),
    "no whole number lies between min_value=1.2 and max_value=1.8": lambda: times(min_value=1.2, max_value=1.8),
    "give a name such as 'linear'": lambda: algorithms(problem=3),  # type: ignore[arg-type]
    "'label_smoothing', which can't serve": lambda: algorithms(problem="exact", among=["label_smoothing"]),
    "at='batch_ende': 'batch_ende' is not an event; did you mean": lambda: states(at="batch_ende"),
    "at=[] holds no event": lambda: states(at=[]),
    "states: at=3: write an event such as Event.BATCH_END, or a list": lambda: states(at=3),  # type: ignore[arg-type]
    "at holds Event.PREDICT_END, which no run of fit has": lambda: states(at=["predict_end"]),
    "position=21, and the last position of this run is 20": lambda: state_at(Case(plan=SIMPLEST), 21),
    "order='2021' and plans, which have an order of their own": lambda: event_streams(order="2021", plans=plans()),
}


def test_what_can_not_be_drawn_is_refused() -> None:
    for says, call in REFUSED.items():
        refused.check(refused.Refusal(says, call, pl.PureLoopError, (says,)))
