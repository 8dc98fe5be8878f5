"""MemoryMonitor and MemorySnapshot: what they record of a device's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import pure_loop as pl
from pure_loop.callbacks import MemoryMonitor, MemorySnapshot
from pure_loop.callbacks.memory_monitor import _of_allocator
from pure_loop.loggers import InMemoryLogger
from tests.support.runs import mlp, points, train
from tests.support.worlds import pool

RESIDENT = "memory/resident_bytes"


def test_on_a_cpu_it_is_that_of_the_process() -> None:
    before = psutil.Process().memory_info().rss
    logger = InMemoryLogger()
    train(mlp(), points(4), callbacks=[MemoryMonitor("2ba")], loggers=[logger])
    batches, values = logger.series(RESIDENT)
    assert batches == [2, 4, 6, 8]
    assert all(0.5 * before < value < 2 * before for value in values)


def test_memory_that_is_taken_is_seen() -> None:
    held: list[torch.Tensor] = []

    def take(event: pl.Event, state: pl.State) -> None:
        if event is pl.Event.BATCH_START and state.timestamp.batch == 1:
            held.append(torch.ones(2**25))  # 128 MiB

    logger = InMemoryLogger()
    train(mlp(), points(2), callbacks=[take, MemoryMonitor("1ba")], loggers=[logger], max_duration="1ep")
    first, second = logger.series(RESIDENT)[1]
    assert second - first > 100 * 2**20


def test_statistics_of_an_allocator() -> None:
    statistics = {
        **{f"{name}_bytes.all.{what}": number for number, (name, what) in enumerate(
            (name, what) for name in ("allocated", "active", "reserved") for what in ("current", "peak")
        )},
        "num_alloc_retries": 7,
        "num_ooms": 1,
    }  # fmt: skip
    assert _of_allocator(statistics) == {
        "memory/allocated_bytes": 0,
        "memory/allocated_bytes_peak": 1,
        "memory/active_bytes": 2,
        "memory/active_bytes_peak": 3,
        "memory/reserved_bytes": 4,
        "memory/reserved_bytes_peak": 5,
        "memory/allocation_retries": 7,
        "memory/out_of_memory_errors": 1,
    }
    assert set(_of_allocator({}).values()) == {0}


@pytest.mark.parametrize("together", [False, True])
def test_on_ranks(together: bool) -> None:
    def program(rank: int) -> dict[str, list[float]]:
        logger = InMemoryLogger()
        callbacks = [MemoryMonitor("2ba", all_ranks=together)]
        settings: dict[str, Any] = {"parallel": "replicate", "strict": False, "max_duration": "1ep"}
        train(mlp(), points(4, size=4), callbacks=callbacks, loggers=[logger], **settings)
        return {name: logger.series(name)[1] for name in logger.metrics if name.startswith("memory")}

    first, second = pool().run(program)
    assert second == {}
    if not together:
        assert first.keys() == {RESIDENT}
        return
    assert first.keys() == {f"{RESIDENT}/{what}" for what in ("min", "mean", "max")}
    least, mean, most = (first[f"{RESIDENT}/{what}"] for what in ("min", "mean", "max"))
    assert mean == pytest.approx([(a + b) / 2 for a, b in zip(least, most, strict=True)])
    assert len(mean) == 2


def test_a_missing_psutil_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "psutil", None)
    for make in (MemoryMonitor, pl.callbacks.SystemMonitor):
        with pytest.raises(pl.MissingExtraError, match=r"pip install 'pure_loop\[system\]'"):
            make()


def test_a_snapshot_needs_a_cuda_device(tmp_path: Path) -> None:
    with pytest.raises(pl.ArgumentError, match="the model is on cpu, which has none: leave it out; MemoryMonitor"):
        train(mlp(), points(), callbacks=[MemorySnapshot(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_some_batches_and_of_an_error(tmp_path: Path) -> None:
    logger = InMemoryLogger()
    snapshot = MemorySnapshot(tmp_path, start="1ba", length="2ba")
    train(mlp().cuda(), points(5), callbacks=[snapshot], loggers=[logger], device="cuda")
    assert [path.name for path in tmp_path.iterdir()] == ["memory-rank0-ba3.pickle"]
    assert logger.files == {"memory-rank0-ba3": str(tmp_path / "memory-rank0-ba3.pickle")}

    def take(event: pl.Event, state: pl.State) -> None:
        torch.ones(2**60, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        train(mlp().cuda(), points(), callbacks=[MemorySnapshot(tmp_path), take], device="cuda")
    assert (tmp_path / "memory-rank0-oom.pickle").stat().st_size > 0
