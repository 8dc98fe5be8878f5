"""SystemMonitor: samples of the machine, taken in a thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.callbacks import SystemMonitor
from pure_loop.loggers import InMemoryLogger
from tests.support.runs import mlp, points, stream

THREAD = "pure_loop-system"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def test_it_samples_while_training_runs() -> None:
    logger = InMemoryLogger()
    for event, _ in stream(mlp(), points(6), callbacks=[SystemMonitor("0.05s")], loggers=[logger]):
        if event is pl.Event.BATCH_START:
            assert len(threads()) == 1
            until = time.monotonic() + 0.03
            while time.monotonic() < until:
                pass  # busy
    batches, values = logger.series("system/process/cpu_percent")
    assert 3 <= len(batches) <= 12
    assert max(values) > 0
    assert min(logger.series("system/cpu_percent")[1]) >= 0
    assert 0 < min(logger.series("system/memory_percent")[1]) < 100
    assert min(logger.series("system/process/resident_bytes")[1]) > 2**20
    assert all(min(logger.series(name)[1]) >= 0 for name in logger.metrics if name.endswith("bytes_per_second"))


def test_a_short_run_has_one_sample() -> None:
    logger = InMemoryLogger()
    pl.run(stream(mlp(), points(2), callbacks=[SystemMonitor()], loggers=[logger]))
    assert logger.series("system/memory_percent")[0] == [4]
    assert not threads()


def test_a_stream_that_is_left_leaves_no_thread() -> None:
    pairs = stream(mlp(), points(), callbacks=[SystemMonitor()])
    while next(pairs)[0] is not pl.Event.FIT_START:
        pass
    assert threads()
    pairs.close()
    assert not threads()


def test_an_error_in_the_thread_is_raised_by_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = SystemMonitor("0.01s")

    def refuse() -> Any:
        raise PermissionError("no statistics of memory here")

    monkeypatch.setattr("psutil.virtual_memory", refuse)

    def wait(event: pl.Event, state: pl.State) -> None:
        until = time.monotonic() + 10
        while event is pl.Event.BATCH_START and threads() and time.monotonic() < until:
            time.sleep(0.01)  # the thread ends with its error

    with pytest.raises(PermissionError, match="no statistics of memory here"):
        pl.run(stream(mlp(), points(), callbacks=[monitor, wait]))
    assert not threads()


@pytest.mark.parametrize("interval", ["10ba", "1ep", "0s", None, 3.0])
def test_an_interval_is_in_seconds(interval: Any) -> None:
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match="interval"):
        SystemMonitor(interval)
