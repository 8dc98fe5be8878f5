"""Threshold stopping in real training loops."""

from __future__ import annotations

from typing import Any

import pytest

import pure_loop as pl
from pure_loop.algorithms import threshold_stopping
from pure_loop.compile import interpreted
from pure_loop.state import POSITIONS
from pure_loop.testing.comparison import differences
from tests.algorithms.test_early_stopping import DATA, scores, stream


@pytest.mark.parametrize(("threshold", "mode", "epochs"), [(0.6, None, 2), (0.55, None, 2), (0.58, "min", 1)])
def test_where_training_ends(threshold: float, mode: Any, epochs: int) -> None:
    evaluators = {"val": scores([0.5, 0.6, 0.59])}
    end = pl.run(stream([threshold_stopping("val/accuracy", threshold, mode)], evaluators=evaluators))
    assert (end.timestamp.epoch, end.stop) == (epochs, True)


RUNS: dict[str, dict[str, Any]] = {
    "eval": {"algorithms": [threshold_stopping("val/loss", 0.05)], "evaluators": {"val": DATA}},
    "batch": {"algorithms": [threshold_stopping("train/loss", 0.05, at="batch")]},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_where_it_would_have_ended(name: str) -> None:
    whole = list(stream(**RUNS[name]))
    assert whole[-1][1].stop
    assert 2 < whole[-1][1].timestamp.batch < 60
    for event, state in whole:
        if event in POSITIONS:
            assert not differences(pl.run(stream(start=state, **RUNS[name])), whole[-1][1]), state


def test_the_first_batch_that_reaches_it_is_the_last() -> None:
    losses = [float(state.loss) for event, state in stream(**RUNS["batch"]) if event is pl.Event.BATCH_END]
    assert losses[-1] <= 0.05 < min(losses[:-1])


def test_compiled_steps_end_there_too() -> None:
    with interpreted():
        compiled = pl.run(stream(compile=True, **RUNS["batch"]))
    assert compiled.timestamp.batch == pl.run(stream(**RUNS["batch"])).timestamp.batch
