"""``fit(clock=)``: whatever a clock gives, the State has seconds that only increase, or the call is refused."""

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
from tests.support.problem import fit, run
from tests.support.tiers import examples


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
        with pytest.raises(pl.ArgumentError, match=r"clock returned (nan|inf|-inf|1e.308): fit\(clock=...\) is a func"):
            pl.run(ticking([*earlier, wrong], max_duration="10s"))
    for wrong in (None, "soon", [1.0]):
        with pytest.raises(pl.ArgumentTypeError, match=r"clock returned .* of type .*time\.monotonic"):
            pl.run(ticking([wrong]))
    for order in ("current", "2021"):
        with pytest.raises(pl.ArgumentError, match="clock returned nan"):
            run(run(max_duration="1ba"), max_duration="1ba", clock=lambda: math.nan, order=order)
