"""What all monitors keep: a run resumes with them from every boundary, and what they record is what one run records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import pure_loop as pl
from pure_loop.callbacks import ActivationMonitor, GradMonitor, MemoryMonitor, SpeedMonitor, SystemMonitor, TimeLeft
from pure_loop.loggers import InMemoryLogger
from pure_loop.order import BOUNDARIES
from tests.support.runs import cross_entropy, equal, points

DATA = points(batches=3, size=4)
MONITORS: dict[str, Callable[[], pl.Callback]] = {
    "ActivationMonitor": lambda: ActivationMonitor("2ba"),
    "GradMonitor": lambda: GradMonitor("2ba", per_layer=True),
    "GradMonitor, epochs": lambda: GradMonitor("1ep"),
    "MemoryMonitor": lambda: MemoryMonitor("1ba"),
    "SystemMonitor": lambda: SystemMonitor("0.01s"),
    "SpeedMonitor": lambda: SpeedMonitor(flops="count"),
    "TimeLeft": lambda: TimeLeft("1ba"),
}
# Times of this machine and windows that begin anew are not those of the whole run.
MEASURED = ("speed/", "time/", "memory/", "system/")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def run(start: Any, callback: pl.Callback | None) -> tuple[dict[Any, Any], list[pl.State], pl.State]:
    """What is recorded, by name and batch; the States of all boundaries, and the last one."""
    logger = InMemoryLogger()
    stream = pl.fit(
        start,
        DATA,
        loss=cross_entropy,
        optimizer=pl.optim.adam(lr=0.1),
        max_duration="2ep",
        evaluators={"val": DATA},
        eval_interval="2ba",
        clip_grad=0.5,
        callbacks=[] if callback is None else [callback],
        loggers=[logger],
        donate=False,
    )
    states = [state for _, state in stream]
    boundaries = [state for state in states if state.event in BOUNDARIES and state.event is not pl.Event.FIT_END]
    recorded = {
        (name, batch): value
        for name in logger.metrics
        if not name.startswith(MEASURED)
        for batch, value in zip(*logger.series(name), strict=True)
    }
    return recorded, boundaries, states[-1]


@pytest.fixture(scope="module")
def alone() -> tuple[Any, list[pl.State], pl.State]:
    return run(pl.State.create(model(), seed=1), None)


@pytest.mark.parametrize("name", MONITORS)
def test_a_run_resumes_from_every_boundary(name: str, alone: Any) -> None:
    _, boundaries, last = alone
    recorded, _, whole = run(boundaries[0], MONITORS[name]())
    equal((whole.params, whole.buffers, whole.opt_state), (last.params, last.buffers, last.opt_state))
    assert len(boundaries) > 10
    for start in boundaries:
        again, _, end = run(start, MONITORS[name]())
        equal((end.params, end.buffers, end.opt_state), (last.params, last.buffers, last.opt_state))
        batch = start.timestamp.batch
        assert again == {key: value for key, value in recorded.items() if key in again}
        assert {key for key in recorded if key[1] > batch} <= again.keys()
