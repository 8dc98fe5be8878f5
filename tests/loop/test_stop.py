"""What ends training: ``State.stop``, as ``max_duration`` does (the events: ``tests/laws``); and ``fit(clock=)``."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import SpeedMonitor, TimeLeft
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.order import Plan
from pure_loop.state import POSITIONS
from pure_loop.testing.comparison import differences
from tests.support import problem
from tests.support.problem import mlp, points, run
from tests.support.tiers import examples

EVALUATED: dict[str, Any] = {"evaluators": {"val": points(1)}, "eval_interval": "2ba"}


def fit(start: Any = None, **settings: Any) -> Any:
    momentum = pl.optim.sgd(lr=0.1, momentum=0.9)
    return problem.fit(start, **{"max_duration": "3ep", "optimizer": momentum, "strict": None, **settings})


def stopping(event: Event, when: str) -> pl.Algorithm:
    return pl.Algorithm("stop", {event: lambda s: s.replace(stop=True) if s.timestamp >= when else s})


@pytest.mark.parametrize(("event", "when"), [(Event.BATCH_END, "2ba"), (Event.EPOCH_END, "1ep")], ids=str)
def test_a_stopped_run_resumes_at_each_boundary_as_it_went_on(event: Event, when: str) -> None:
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


def ticking(times: Any, **options: Any) -> Any:
    ticks = iter(times)
    return fit(clock=lambda: next(ticks, times[-1]), **{"max_duration": "1ep", **options})


@examples(15, 500)
@given(st.lists(st.floats(-1e9, 1e9) | st.sampled_from([9e14, -9e14, 3]), min_size=4, max_size=4))
def test_seconds_only_increase(times: list[float]) -> None:
    """Read at the beginning and once a batch; what is set back counts nothing. Callbacks divide by seconds."""
    total, wanted = 0.0, [max(0.0, after - before) for before, after in itertools.pairwise(times)]
    for event, state in ticking(times, callbacks=[SpeedMonitor(), TimeLeft("1ba")]):
        now = state.timestamp
        assert now.total_seconds >= total
        if event is Event.BATCH_END:
            assert now.batch_seconds == wanted.pop(0)
            assert now.total_seconds == pytest.approx(total + now.batch_seconds)
        total = now.total_seconds
    assert wanted == []


def test_what_is_no_finite_number_is_refused() -> None:
    """At the first reading and at a later one, and where training is over."""
    for earlier, wrong in itertools.product(([], [0.0, 0.0]), (math.nan, math.inf, -math.inf, 1e308)):
        with pytest.raises(ArgumentError, match=r"clock returned (nan|inf|-inf|1e.308): fit\(clock=...\) is a func"):
            pl.run(ticking([*earlier, wrong], max_duration="10s"))
    for wrong in (None, "soon", [1.0]):
        with pytest.raises(ArgumentTypeError, match=r"clock returned .* of type .*time\.monotonic"):
            pl.run(ticking([wrong]))
    for order in ("current", "2021"):
        with pytest.raises(ArgumentError, match="clock returned nan"):
            run(run(max_duration="1ba"), max_duration="1ba", clock=lambda: math.nan, order=order)
