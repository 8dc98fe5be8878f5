"""``fit(clock=)``: whatever a clock gives, the State has seconds that only increase, or the call is refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver, SpeedMonitor, TimeLeft
from tests.support.problem import fit, mlp, run
from tests.support.tiers import examples


def ticking(times: Any, **options: Any) -> Any:
    ticks = iter(times)
    return fit(clock=lambda: next(ticks, times[-1]), **{"max_duration": "1ep", **options})


@examples(25, 500)
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


def test_a_checkpoint_of_it_loads(tmp_path: Path) -> None:
    pl.run(ticking([10.0, 5.0, 1.0, 0.0], callbacks=[CheckpointSaver(tmp_path, interval="1ba", background=False)]))
    assert pl.load(pl.latest(tmp_path), model=mlp()).timestamp.total_seconds == 0


@pytest.mark.parametrize("first", [0, 2])
def test_what_is_no_finite_number_is_refused(first: int) -> None:
    says = r"clock returned (nan|inf|-inf|1e.308): fit\(clock=...\) is a function"
    for wrong in (math.nan, math.inf, -math.inf, 1e308):
        for duration in ("1ep", "10s"):
            with pytest.raises(pl.ArgumentError, match=says):
                pl.run(ticking([0.0] * first + [wrong], max_duration=duration))
    for wrong in (None, "soon", [1.0]):
        with pytest.raises(pl.ArgumentTypeError, match=r"clock returned .* of type .*time\.monotonic"):
            pl.run(ticking([0.0] * first + [wrong]))


@pytest.mark.parametrize("order", ["current", "2021"])
def test_where_training_is_over_too(order: str) -> None:
    with pytest.raises(pl.ArgumentError, match="clock returned nan"):
        run(run(max_duration="1ba"), max_duration="1ba", clock=lambda: math.nan, order=order)
