"""Strategies of times, batches, algorithms, States and events: they are valid, varied, and shrink to the simplest."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis
import optree
import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop._internal.bits import same
from pure_loop.algorithm import Composition
from pure_loop.data.samples import num_samples, split
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, check, expected, going_on
from pure_loop.testing._compositions import ALGORITHMS
from pure_loop.testing._plans import plans_with
from pure_loop.testing.case import Case
from pure_loop.testing.problems import PROBLEMS
from pure_loop.testing.strategies import (
    algorithms,
    batches,
    cases,
    event_streams,
    plans,
    state_at,
    states,
    times,
    timestamps,
)
from pure_loop.time import Time, Timestamp, TimeUnit
from tests.support.samples import SIMPLEST, sample, simplest
from tests.support.tiers import examples

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


@pytest.mark.slow
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


def module_of(name: str) -> Any:
    return sys.modules[ALGORITHMS[name].__module__]


# Those that need nothing of a problem, and keep each law.
ANY = {
    name
    for name in ALGORITHMS
    if not hasattr(module_of(name), "SERVES") and not hasattr(module_of(name), "EXPECTED_FAILURES")
}


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (None, ANY),
        ("linear", {*ANY, "label_smoothing"}),
        ("exact", ANY),
        ("transformer", {*ANY, "label_smoothing"}),
        ("convolution", {*ANY, "label_smoothing"}),
    ],
)
def test_algorithms_serve_their_problem(problem: str | None, wanted: set[str]) -> None:
    names = drawn_algorithms(algorithms(problem=problem, min_size=1, max_size=1))
    assert {name for (name,) in names} == wanted


NAMED = [("gyro_dropout", "mlp"), ("mixup", "linear"), ("ghost_batchnorm", "convolution")]


@pytest.mark.parametrize(("name", "problem"), NAMED)
def test_what_is_named_is_drawn(name: str, problem: str) -> None:
    assert drawn_algorithms(algorithms(problem=problem, among=[name], min_size=1, max_size=1), 1) == [[name]]


def test_algorithms_keep_to_their_options() -> None:
    assert simplest(algorithms()) == pl.compose()
    assert {len(names) for names in drawn_algorithms(algorithms())} == {0, 1, 2, 3}
    assert {len(names) for names in drawn_algorithms(algorithms(min_size=2))} == {2, 3}
    averages = ["ema", "ema_2", "ema_3"]
    only = drawn_algorithms(algorithms(among=["ema"], min_size=1))
    assert all(names == averages[: len(names)] for names in only)
    assert averages in only
    # Without a problem, a name that is passed is right.
    assert drawn_algorithms(algorithms(among=["blurpool"], min_size=1), 1) == [["blurpool"]]


def test_settings_of_algorithms_are_drawn() -> None:
    made = [composition.members[0] for composition in sample(algorithms(among=["ema"], min_size=1, max_size=1))]
    assert {Event.BATCH_END, Event.EPOCH_END} <= {event for member in made for event in member.handlers}


# States

IN_FIT = sorted(
    {event for event in Event if not event.is_predict and "standalone" not in event.value}, key=list(Event).index
)


@pytest.mark.slow
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
    remembered = {name for state in sample(states(at="batch_end"), 80) for name in state.algorithm_state}
    assert {"ema", "early_stopping"} <= remembered
    assert not any(state.algorithm_state for state in sample(states(at="batch_end", algorithms=()), 10))
    drawn = states(at="fit_end", algorithms=algorithms(among=["ema"], min_size=2))
    assert all({"ema", "ema_2"} <= state.algorithm_state.keys() for state in sample(drawn, 3))


@pytest.mark.slow
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
