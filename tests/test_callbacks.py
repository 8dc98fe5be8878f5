"""The callbacks that come with the library."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop.callbacks import LRMonitor, SpeedMonitor
from pure_loop.loggers import InMemoryLogger

torch.set_num_threads(1)

DATA = [(torch.ones(n, 2), torch.zeros(n, 1)) for n in (4, 4, 2, 4)]
SPEED = "speed/samples_per_second"


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(callbacks, *, clock=None, seconds=1.0, evaluation_seconds=0.0, **options):
    """Each batch takes ``seconds``, or ``seconds(batch)``; each evaluation batch ``evaluation_seconds``."""
    clock, logger = clock or Clock(), InMemoryLogger()
    options = {"max_duration": "1ep", "optimizer": pl.optim.sgd(lr=0.1), **options}
    stream = pl.fit(
        torch.nn.Linear(2, 1), DATA, loss=mse_loss, callbacks=callbacks, loggers=[logger], clock=clock, **options
    )
    for event, state in stream:
        if event is pl.Event.BATCH_START:
            clock.now += seconds(state.timestamp.batch) if callable(seconds) else seconds
        if event is pl.Event.EVAL_BATCH_START:
            clock.now += evaluation_seconds
    return logger, state


def test_speed_is_a_mean_over_the_window():
    logger, _ = run([SpeedMonitor(window=2)], seconds=lambda batch: [1.0, 3.0, 1.0, 4.0][batch])
    assert logger.series(SPEED) == ([1, 2, 3, 4], [4.0, 8 / 4, 6 / 4, 6 / 5])
    assert logger.series("speed/batches_per_second")[1] == [1.0, 2 / 4, 2 / 4, 2 / 5]


def test_no_tokens_no_speed_of_tokens():
    logger, _ = run([SpeedMonitor()])
    assert "speed/tokens_per_second" not in logger.metrics


def test_speed_counts_tokens():
    task = pl.Task(
        loss=lambda outputs, batch: mse_loss(outputs, batch[1]), forward=lambda m, b: m(b[0]), tokens=lambda b: 10
    )
    clock, logger = Clock(), InMemoryLogger()
    stream = pl.fit(
        torch.nn.Linear(2, 1), DATA, task=task, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
        callbacks=[SpeedMonitor()], loggers=[logger], clock=clock,
    )  # fmt: skip
    for event, _ in stream:
        clock.now += event is pl.Event.BATCH_START
    assert logger.series("speed/tokens_per_second")[1] == [10.0] * 4


def test_evaluations_are_not_counted():
    clock = Clock()
    logger, _ = run(
        [SpeedMonitor(clock=clock)], clock=clock, evaluators={"val": DATA}, eval_interval="1ba", evaluation_seconds=7.0
    )
    assert logger.series("speed/batches_per_second")[1] == [1.0] * 4


def test_a_second_run_starts_a_new_window():
    monitor = SpeedMonitor(window=50)
    run([monitor], seconds=100.0)
    logger, _ = run([monitor], seconds=1.0)
    assert logger.series(SPEED)[1][0] == 4.0


def test_a_clock_that_stands_still_gives_no_speed():
    logger, _ = run([SpeedMonitor()], seconds=0.0)
    assert SPEED not in logger.metrics


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "3"])
def test_speed_monitor_refuses_a_wrong_window(window):
    with pytest.raises(pl.PureLoopError, match="window="):
        SpeedMonitor(window)


def test_lr_monitor_gives_the_rate_that_the_batch_uses():
    optimizer = pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "4ba"))
    logger, _ = run([LRMonitor(optimizer, name="rate")], optimizer=optimizer)
    assert logger.series("rate") == ([0, 1, 2, 3], [1.0, 0.75, 0.5, 0.25])


def test_lr_monitor_refuses_what_has_no_rate():
    with pytest.raises(pl.ArgumentTypeError, match="optimizer of the run"):
        LRMonitor(0.1)


def test_monitors_change_no_training():
    optimizer = pl.optim.sgd(lr=0.1)
    torch.manual_seed(0)
    _, alone = run([], strict=True)
    torch.manual_seed(0)
    _, watched = run([SpeedMonitor(), LRMonitor(optimizer)], strict=True, optimizer=optimizer)
    assert all(torch.equal(alone.params[name], watched.params[name]) for name in alone.params)
