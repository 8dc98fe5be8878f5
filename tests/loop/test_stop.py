"""``State.stop``: an algorithm ends training at a boundary, as ``max_duration`` does."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from pure_loop.errors import AlgorithmStructureError, ArgumentError
from pure_loop.order import EvaluatorPlan, Plan, expected
from pure_loop.state import POSITIONS
from pure_loop.testing.case import Case
from pure_loop.testing.comparison import differences
from pure_loop.testing.strategies import plans
from tests.support.tiers import examples

CURRENT = (Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)
DATA = [(torch.full((2, 3), float(i)), torch.ones(2, 1)) for i in range(1, 4)]


def stopping(event: Event, when: str) -> pl.Algorithm:
    def stop(state: pl.State) -> pl.State:
        return state.replace(stop=True) if state.timestamp >= when else state

    return pl.Algorithm("stopping", {event: stop})


def stream(start: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_duration": "3ep", "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), **settings}
    return pl.fit(nn.Linear(3, 1) if start is None else start, DATA, loss=nn.functional.mse_loss, **options)


@examples(60, 600)
@given(plans(stops=True, orders=["current", "current", "2021"]), st.sampled_from([None, frozenset({Event.BATCH_END})]))
def test_the_events_are_those_of_a_plan(plan: Plan, watch: frozenset[Event] | None) -> None:
    wanted = [event for event in expected(plan) if watch is None or event in watch]
    assert [event for event, _ in Case(plan=plan).run(watch=watch)] == wanted


@examples(6, 100)
@given(plans(stops=True, iterations=False, max_batches=5))
def test_the_events_of_compiled_steps(plan: Plan) -> None:
    with interpreted():
        assert [event for event, _ in Case(plan=plan).run(compile=True)] == expected(plan)


@pytest.mark.parametrize("watch", [None, {Event.FIT_END}], ids=str)
def test_a_graph_that_stops(watch: Any) -> None:
    with interpreted():
        end = pl.run(stream(algorithms=[stopping(Event.BATCH_END, "5ba")], compile=True, watch=watch))
    assert (end.timestamp.batch, end.stop) == (5, True)


@pytest.mark.parametrize("event", CURRENT)
@pytest.mark.parametrize("when", ["2ba", "3ba", "1ep"])
def test_a_stopped_run_resumes_at_each_boundary_as_it_went_on(event: Event, when: str) -> None:
    run: dict[str, Any] = {
        "algorithms": [stopping(event, when)],
        "evaluators": {"val": DATA[:1]},
        "eval_interval": "2ba",
    }
    whole = list(stream(**run))
    assert whole[-1][1].stop
    assert whole[-1][1].timestamp.batch < 9
    for position, (passed, state) in enumerate(whole):
        if passed in POSITIONS:
            rest = list(stream(state, **run))
            assert rest[0][0] is Event.FIT_START
            after = [event for event, _ in whole[position + 1 :] if event is not Event.FIT_START]
            assert [event for event, _ in rest[1:]] == (after or [Event.FIT_END]), passed
            assert not differences(rest[-1][1], whole[-1][1])


def test_a_stopped_state_stays_stopped() -> None:
    end = pl.run(stream(algorithms=[stopping(Event.BATCH_CHECKPOINT, "2ba")]))
    assert end.timestamp.batch == 2
    assert end.has_ended()
    for duration in ("3ep", "9ep"):
        assert [event for event, _ in stream(end, max_duration=duration)] == [Event.FIT_START, Event.FIT_END]
    again = pl.run(stream(end.replace(stop=False)))
    assert not differences(again, pl.run(stream()))


def test_a_stop_that_comes_from_outside() -> None:
    kept = [state for event, state in stream() if event is Event.EPOCH_START][1]
    settings: dict[str, Any] = {"evaluators": {"val": DATA[:1]}, "eval_interval": "2ba"}
    events = [event for event, _ in stream(kept.replace(stop=True), **settings)]
    assert events[0] is Event.FIT_START
    assert Event.BATCH_START not in events
    assert events[-2:] == [Event.EVAL_AFTER_ALL, Event.FIT_END]
    fresh = pl.State.create(nn.Linear(3, 1)).replace(stop=True)
    assert [event for event, _ in stream(fresh)][-2:] == [Event.FIT_START, Event.FIT_END]


@pytest.mark.parametrize("event", [Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.FIT_START, Event.EVAL_END])
def test_elsewhere_it_is_refused(event: Event) -> None:
    algorithm = pl.Algorithm("stopping", {event: lambda state: state.replace(stop=True)})
    with pytest.raises(AlgorithmStructureError, match=rf"'stopping' at {event.name} changed stop, .*BATCH_CHECKPOINT"):
        pl.run(stream(algorithms=[algorithm], evaluators={"val": DATA[:1]}))


def test_it_is_a_bool() -> None:
    algorithm = pl.Algorithm("stopping", {Event.BATCH_END: lambda state: state.replace(stop=torch.tensor(True))})
    with pytest.raises(AlgorithmStructureError, match=r"stop to tensor\(True\) of type Tensor.* bool\(tensor\)"):
        pl.run(stream(algorithms=[algorithm]))


def test_a_checkpoint_holds_it(tmp_path: Any) -> None:
    end = pl.run(stream(algorithms=[stopping(Event.BATCH_END, "2ba")]))
    pl.save(end, tmp_path / "end.safetensors")
    loaded = pl.load(tmp_path / "end.safetensors", model=nn.Linear(3, 1))
    assert loaded.stop is True
    assert [event for event, _ in stream(loaded)] == [Event.FIT_START, Event.FIT_END]


@pytest.mark.parametrize("when", ["0ba", "1dur", "1iter"])
def test_plans_that_stop_nowhere(when: str) -> None:
    with pytest.raises(ArgumentError, match="stop_at"):
        Plan(batches=(2,), max_duration="1ep", stop_at=when)


def test_a_loop_that_resumes_is_seen() -> None:
    plan = Plan(batches=(2, 2, 2), max_duration="1ep", stop_at="2ba", evaluators={"val": EvaluatorPlan((2,))})
    assert [event for event, _ in Case(plan=plan).run()] != expected(attrs.evolve(plan, stop_at=None))
