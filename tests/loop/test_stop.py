"""``State.stop``: an algorithm ends training at a boundary, as ``max_duration`` does (its events: ``tests/laws``)."""

from __future__ import annotations

from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError
from pure_loop.order import Plan
from pure_loop.state import POSITIONS
from pure_loop.testing.comparison import differences
from tests.support import problem
from tests.support.problem import mlp, points

EVALUATED: dict[str, Any] = {"evaluators": {"val": points(1)}, "eval_interval": "2ba"}


def fit(start: Any = None, **settings: Any) -> Any:
    momentum = pl.optim.sgd(lr=0.1, momentum=0.9)
    return problem.fit(start, **{"max_duration": "3ep", "optimizer": momentum, "strict": None, **settings})


def stopping(event: Event, when: str) -> pl.Algorithm:
    return pl.Algorithm("stop", {event: lambda s: s.replace(stop=True) if s.timestamp >= when else s})


@pytest.mark.parametrize(("event", "when"), [(Event.BATCH_END, "2ba"), (Event.EPOCH_END, "1ep")], ids=str)
def test_a_run_that_is_stopped_before_a_checkpoint_resumes_at_each_boundary_as_it_went_on(
    event: Event, when: str
) -> None:
    options = {"algorithms": [stopping(event, when)], **EVALUATED}
    whole = list(fit(**options))
    assert whole[-1][1].stop
    for position, (passed, state) in enumerate(whole):
        if passed in POSITIONS:
            rest = list(fit(state, **options))
            after = [event for event, _ in whole[position + 1 :] if event is not Event.FIT_START]
            assert [event for event, _ in rest] == [Event.FIT_START, *(after or [Event.FIT_END])], passed
            assert not differences(rest[-1][1], whole[-1][1])


def test_a_stopped_state_stays_stopped_and_a_stop_may_come_from_outside(tmp_path: Any) -> None:
    end = pl.run(fit(algorithms=[stopping(Event.BATCH_CHECKPOINT, "2ba")]))
    pl.save(end, tmp_path / "end.safetensors")
    loaded = pl.load(tmp_path / "end.safetensors", model=mlp())
    assert (end.timestamp.batch, end.has_ended(), loaded.stop) == (2, True, True)
    for state in (end, loaded):
        assert [event for event, _ in fit(state, max_duration="9ep")] == [Event.FIT_START, Event.FIT_END]
    assert not differences(pl.run(fit(end.replace(stop=False))), pl.run(fit()))
    kept = [state for event, state in fit() if event is Event.EPOCH_START][1]
    events = [event for event, _ in fit(kept.replace(stop=True), **EVALUATED)]
    assert (events[0], Event.BATCH_START in events) == (Event.FIT_START, False)
    assert events[-2:] == [Event.EVAL_AFTER_ALL, Event.FIT_END]
    fresh = pl.State.create(mlp()).replace(stop=True)
    assert [event for event, _ in fit(fresh)][-2:] == [Event.FIT_START, Event.FIT_END]


def test_plans_that_stop_nowhere_are_refused() -> None:
    for when in ("0ba", "1dur", "1iter"):
        with pytest.raises(ArgumentError, match="stop_at"):
            Plan(batches=(2,), max_duration="1ep", stop_at=when)
