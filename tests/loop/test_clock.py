"""``fit(clock=)``: whatever a clock gives, the State has seconds that only increase, or the call is refused."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver, SpeedMonitor, TimeLeft
from tests.support.tiers import examples

DATA = [(torch.ones(2, 1), torch.ones(2, 1))] * 3


def fit(clock: Any, **options: Any) -> Any:
    options = {"max_duration": "1ep", **options}
    return pl.fit(
        nn.Linear(1, 1), DATA, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), clock=clock, **options
    )


class TestClocks:
    """
    Tried besides: callbacks that divide by the seconds of a batch; a checkpoint of each State; durations in seconds;
    compiled steps, which take several batches at a time.
    """

    @examples(25, 500)
    @given(st.lists(st.floats(-1e9, 1e9) | st.sampled_from([9e14, -9e14, 3]), min_size=8, max_size=8))
    def test_set_back_at_any_time(self, times: list[float]) -> None:
        ticks = iter(times)
        total = 0.0
        callbacks = [SpeedMonitor(), TimeLeft("1ba")]
        last = times[-1]
        for event, state in fit(lambda: next(ticks, last), callbacks=callbacks):
            now = state.timestamp
            assert 0 <= now.batch_seconds < math.inf
            assert now.total_seconds >= total
            if event is Event.BATCH_END:
                assert now.total_seconds == pytest.approx(total + now.batch_seconds)
            total = now.total_seconds

    def test_seconds_by_hand(self) -> None:
        """Read at the beginning and once a batch: 2 s, then back by 5, which counts nothing, then 3 s."""
        ticks = iter([10.0, 12.0, 7.0, 10.0])
        found = [state.timestamp.total_seconds for event, state in fit(lambda: next(ticks)) if event is Event.BATCH_END]
        assert found == [2.0, 2.0, 5.0]

    def test_a_checkpoint_of_it_loads(self, tmp_path: Path) -> None:
        ticks = iter([10.0, 5.0, 1.0, 0.0])
        saver = CheckpointSaver(tmp_path, interval="1ba", background=False)
        pl.run(fit(lambda: next(ticks), callbacks=[saver]))
        path = pl.latest(tmp_path)
        assert path is not None
        assert pl.load(path, model=nn.Linear(1, 1)).timestamp.total_seconds == 0

    @pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e308])
    @pytest.mark.parametrize("first", [0, 2])
    @pytest.mark.parametrize("duration", ["1ep", "10s"])
    def test_no_finite_number(self, wrong: float, first: int, duration: str) -> None:
        ticks = iter([0.0] * first + [wrong] * 10)
        with pytest.raises(
            pl.ArgumentError, match=r"clock returned (nan|inf|-inf|1e.308): fit\(clock=...\) is a function"
        ):
            pl.run(fit(lambda: next(ticks), max_duration=duration))

    @pytest.mark.parametrize("order", ["current", "2021"])
    def test_no_finite_number_where_training_is_over(self, order: str) -> None:
        state = pl.run(fit(time.monotonic, max_duration="1ba"))
        stream = pl.fit(
            state,
            DATA,
            loss=nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ba",
            clock=lambda: math.nan,
            order=order,
        )
        with pytest.raises(pl.ArgumentError, match="clock returned nan"):
            pl.run(stream)

    @pytest.mark.parametrize("wrong", [None, "soon", [1.0]])
    def test_no_number(self, wrong: Any) -> None:
        with pytest.raises(pl.ArgumentTypeError, match=r"clock returned .* of type .*time\.monotonic"):
            pl.run(fit(lambda: wrong))
