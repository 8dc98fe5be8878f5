"""NeptuneLogger offline; what it left on the disk is read back. Neptune's package is not installed for development."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop.loggers import InMemoryLogger, NeptuneLogger
from tests.loggers.records import expected_steps, kill_process, stream


def operations(folder: Path) -> Iterator[Any]:
    """What is on the disk, in the order of processes."""
    logs = sorted(folder.glob(".neptune/offline/run__*/data-*.log"), key=lambda path: path.stat().st_mtime_ns)
    for log in logs:
        for line in log.read_text().splitlines():
            operation = json.loads(line)["obj"]
            yield "/".join(operation.pop("path", [])), operation


def values(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    for path, operation in operations(folder):
        if operation["type"].startswith("Log"):
            found.setdefault(path, []).extend((int(item["step"]), item["value"]) for item in operation["values"])
    return found


def logger(folder: Path, **options: Any) -> NeptuneLogger:
    pytest.importorskip("neptune")
    return NeptuneLogger("team/digits", folder=folder, mode="offline", **options)


@pytest.mark.slow
def test_the_disk_has_what_the_run_had(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    pl.run(stream([logger(tmp_path, tags=["a"]), memory], run_name="first"))
    found = values(tmp_path)
    for name, batches in expected_steps().items():
        assert found[name] == list(zip(batches, memory.series(name)[1], strict=True)), name
    assert found["sample"][0] == (4, "text of batch 4")
    assert [step for step, _ in found["inputs/0"]] == [step for step, _ in found["inputs.targets/1"]] == [4, 8, 12]
    assigned = {path: operation.get("value") for path, operation in operations(tmp_path)}
    assert assigned["parameters/batch_size"] == 5
    assert (assigned["sys/name"], assigned["sys/failed"]) == ("first", False)
    assert "tables/ba4-confusion" in assigned


@pytest.mark.slow
def test_a_run_killed_by_a_signal_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("neptune")
    for at in (5, 9):
        name = 'pl.loggers.NeptuneLogger("team/digits", folder=folder, mode="offline", flush="3ba")'
        kill_process(name, tmp_path, at=at)
    pl.run(stream([logger(tmp_path)], tmp_path / "checkpoints"))
    found = values(tmp_path)
    steps = {name: sorted(step for step, _ in found[name]) for name in expected_steps()}
    assert steps == expected_steps()
    assert sorted(step for step, _ in found["inputs/0"]) == [4, 8, 12]
    assert not (tmp_path / "neptune_journal.jsonl").exists()


@pytest.mark.slow
def test_names_and_numbers_that_neptune_does_not_take(tmp_path: Path) -> None:
    state = pl.State.create(torch.nn.Linear(1, 1))
    written = logger(tmp_path)
    written.log_metrics({"train/loss": 0.5, "train/loss/kl": 0.25, "x": float("nan"), "y": float("inf")}, state)
    written.close()
    assert values(tmp_path) == {
        "train/loss": [(0, 0.5)],
        "train/loss.kl": [(0, 0.25)],
        "nonfinite/x": [(0, "nan")],
        "nonfinite/y": [(0, "inf")],
    }


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "neptune", None)
    with pytest.raises(pl.MissingExtraError, match=r"pip install 'pure_loop\[neptune\]'"):
        NeptuneLogger("team/digits", mode="offline")


def test_bad_input_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEPTUNE_API_TOKEN", raising=False)
    with pytest.raises(pl.ArgumentError, match=r"options has 'with_id'"):
        NeptuneLogger(options={"with_id": "X-1"})
    with pytest.raises(pl.ArgumentTypeError, match="tags"):
        NeptuneLogger(tags="a")
    with pytest.raises(pl.ArgumentError, match="mode"):
        NeptuneLogger(mode="debug")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("neptune")
    monkeypatch.delenv("NEPTUNE_API_TOKEN", raising=False)
    with pytest.raises(pl.ArgumentError, match=r'api_token="\.\.\.".*mode="offline"'):
        NeptuneLogger("team/digits", mode="async")
