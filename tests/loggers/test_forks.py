"""A fork under the name of its run: files drop what is recorded again, and trackers keep what they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.loggers import CSVLogger, InMemoryLogger, JSONLinesLogger, TensorBoardLogger, WandBLogger
from tests.loggers import test_csv, test_json_lines, test_tensorboard, test_wandb
from tests.loggers.records import DATA, stream


def of_json_lines(folder: Path) -> dict[int, float]:
    lines = test_json_lines.lines(folder / "metrics.jsonl")
    return {line["batch"]: line["value"] for line in lines if line["name"] == "train/loss"}


def of_csv(folder: Path) -> dict[int, float]:
    rows = test_csv.rows(folder / "metrics.csv")
    return {int(row["batch"]): float(row["train/loss"]) for row in rows if row["train/loss"]}


def of_tensorboard(folder: Path) -> dict[int, float]:
    return {event.step: event.value for event in test_tensorboard.accumulator(folder).Scalars("train/loss")}


def of_wandb(folder: Path) -> dict[int, float]:
    return dict(test_wandb.values(folder)["train/loss"])


LOGGERS: dict[str, tuple[Callable[[Path], pl.Logger], Callable[[Path], dict[int, float]], bool]] = {
    "json lines": (lambda folder: JSONLinesLogger(folder / "metrics.jsonl"), of_json_lines, True),
    "csv": (lambda folder: CSVLogger(folder / "metrics.csv"), of_csv, True),
    "tensorboard": (TensorBoardLogger, of_tensorboard, True),
    "wandb": (lambda folder: WandBLogger("digits", folder=folder), of_wandb, False),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "wandb")) for name in LOGGERS])
def test_a_fork_under_the_same_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("tensorboard", "wandb"):
        pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    make, read, drops = LOGGERS[name]
    run, fork = InMemoryLogger(), InMemoryLogger()
    kept: Any = None
    for event, state in stream([make(tmp_path), run], run_name="one", donate=False):
        if event is Event.EPOCH_CHECKPOINT and kept is None:
            kept = state
    settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.01)}
    pl.run(pl.fit(kept, DATA, max_duration="2ep", run_name="one", loggers=[make(tmp_path), fork], **settings))
    before, after = (
        dict(zip(*run.series("train/loss"), strict=True)),
        dict(zip(*fork.series("train/loss"), strict=True)),
    )
    assert kept.timestamp.batch == 6
    assert all(after[batch] != before[batch] for batch in range(8, 13)), "other numbers"
    expected = {**before, **after} if drops else {**after, **before}
    assert read(tmp_path) == pytest.approx(expected, rel=1e-6)
