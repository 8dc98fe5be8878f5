"""``State.stop``: an algorithm ends training at a boundary, as ``max_duration`` does."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from pure_loop.errors import ArgumentError
from pure_loop.order import EvaluatorPlan, Plan, expected
from pure_loop.state import POSITIONS
from pure_loop.testing.case import Case
from pure_loop.testing.comparison import differences
from pure_loop.testing.strategies import plans
from tests.support import problem
from tests.support.problem import mlp, points
from tests.support.tiers import examples

EVALUATED: dict[str, Any] = {"evaluators": {"val": points(1)}, "eval_interval": "2ba"}


def stopping(event: Event, when: str) -> pl.Algorithm:
    def stop(state: pl.State) -> pl.State:
        return state.replace(stop=True) if state.timestamp >= when else state

    return pl.Algorithm("stopping", {event: stop})


def fit(start: Any = None, **settings: Any) -> Any:
    momentum = pl.optim.sgd(lr=0.1, momentum=0.9)
    return problem.fit(start, **{"max_duration": "3ep", "optimizer": momentum, "strict": None, **settings})


@examples(40, 600)
@given(plans(stops=True, orders=["current", "current", "2021"]), st.sampled_from([None, frozenset({Event.BATCH_END})]))
def test_the_events_are_those_of_a_plan(plan: Plan, watch: frozenset[Event] | None) -> None:
    wanted = [event for event in expected(plan) if watch is None or event in watch]
    assert [event for event, _ in Case(plan=plan).run(watch=watch)] == wanted


@pytest.mark.slow  # each example is a graph
@examples(6, 100)
@given(plans(stops=True, iterations=False, max_batches=5))
def test_the_events_of_compiled_steps(plan: Plan) -> None:
    with interpreted():
        assert [event for event, _ in Case(plan=plan).run(compile=True)] == expected(plan)


def test_a_graph_that_stops() -> None:
    with interpreted():
        end = pl.run(fit(algorithms=[stopping(Event.BATCH_END, "5ba")], compile=True, watch={Event.FIT_END}))
    assert (end.timestamp.batch, end.stop) == (5, True)


@examples(8, 24)
@given(
    st.sampled_from([Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT]),
    st.sampled_from(["2ba", "3ba", "1ep"]),
)
def test_a_stopped_run_resumes_at_each_boundary_as_it_went_on(event: Event, when: str) -> None:
    options = {"algorithms": [stopping(event, when)], **EVALUATED}
    whole = list(fit(**options))
    assert whole[-1][1].stop
    assert whole[-1][1].timestamp.batch < 9
    for position, (passed, state) in enumerate(whole):
        if passed in POSITIONS:
            rest = list(fit(state, **options))
            assert rest[0][0] is Event.FIT_START
            after = [event for event, _ in whole[position + 1 :] if event is not Event.FIT_START]
            assert [event for event, _ in rest[1:]] == (after or [Event.FIT_END]), passed
            assert not differences(rest[-1][1], whole[-1][1])


def test_a_stopped_state_stays_stopped(tmp_path: Any) -> None:
    end = pl.run(fit(algorithms=[stopping(Event.BATCH_CHECKPOINT, "2ba")]))
    pl.save(end, tmp_path / "end.safetensors")
    loaded = pl.load(tmp_path / "end.safetensors", model=mlp())
    assert (end.timestamp.batch, end.has_ended(), loaded.stop) == (2, True, True)
    for state, duration in ((end, "3ep"), (end, "9ep"), (loaded, "9ep")):
        assert [event for event, _ in fit(state, max_duration=duration)] == [Event.FIT_START, Event.FIT_END]
    assert not differences(pl.run(fit(end.replace(stop=False))), pl.run(fit()))


def test_a_stop_that_comes_from_outside() -> None:
    kept = [state for event, state in fit() if event is Event.EPOCH_START][1]
    events = [event for event, _ in fit(kept.replace(stop=True), **EVALUATED)]
    assert events[0] is Event.FIT_START
    assert Event.BATCH_START not in events
    assert events[-2:] == [Event.EVAL_AFTER_ALL, Event.FIT_END]
    fresh = pl.State.create(mlp()).replace(stop=True)
    assert [event for event, _ in fit(fresh)][-2:] == [Event.FIT_START, Event.FIT_END]


def test_plans_that_stop_nowhere_and_a_loop_that_resumes_is_seen() -> None:
    for when in ("0ba", "1dur", "1iter"):
        with pytest.raises(ArgumentError, match="stop_at"):
            Plan(batches=(2,), max_duration="1ep", stop_at=when)
    plan = Plan(batches=(2, 2, 2), max_duration="1ep", stop_at="2ba", evaluators={"val": EvaluatorPlan((2,))})
    assert [event for event, _ in Case(plan=plan).run()] != expected(attrs.evolve(plan, stop_at=None))
