"""Runs that loggers record: whole ones, and ones that are killed and resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import pure_loop as pl
from tests.support.runs import mlp, points

BATCHES = 6  # in an epoch
DATA = points(BATCHES)


class Kinds(pl.Callback):
    """Records a thing of each kind, at several events of some batches."""

    def batch_end(self, state: pl.State, logger: Any) -> None:
        if state.timestamp.batch % 4 == 0:
            logger.log_text("sample", f"text of batch {state.timestamp.batch}", state)
            logger.log_table("confusion", ["a", "b"], [[1, 2.5], ["x", None]], state)
            shape = (2, 3, 4)
            masks = {"targets": torch.arange(24).reshape(shape) % 3}
            logger.log_images("inputs", torch.linspace(0, 1, 72).reshape(*shape, 3), state, masks=masks)

    def epoch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({"by_class": torch.tensor([0.25, 0.5])}, state)

    def after_forward(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({"batches before": state.timestamp.batch}, state)


def stream(loggers: Iterable[pl.Logger], folder: Path | None = None, **options: Any) -> Any:
    """A run of two epochs, which saves every fourth batch in ``folder`` and resumes from there."""
    callbacks: list[Any] = [Kinds()]
    if folder is not None:
        callbacks.append(pl.callbacks.CheckpointSaver(folder, interval="4ba", background=False))
    settings: dict[str, Any] = {
        "loss": functional.cross_entropy,
        "optimizer": pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "12ba")),
        "max_duration": "2ep",
        "evaluators": {"val": DATA[:2]},
        "eval_interval": "3ba",
        "callbacks": callbacks,
        "autoresume": folder,
    }
    return pl.fit(mlp(), DATA, loggers=list(loggers), **{**settings, **options})


def killed(loggers: Iterable[pl.Logger], folder: Path, *, at: int, event: pl.Event = pl.Event.BATCH_START) -> None:
    """Train to an event after ``at`` batches, and leave as a kill does: nothing is flushed and nothing closed."""
    loggers = list(loggers)
    run = stream(loggers, folder)
    for reached, state in run:
        if reached is event and state.timestamp.batch == at:
            break
    for logger in loggers:
        logger.close = lambda: None  # type: ignore[method-assign]
    run.close()
    for logger in loggers:
        logger.end()  # type: ignore[attr-defined]  # closes the file alone


def kill_process(logger: str, folder: Path, *, at: int) -> None:
    """The same in a process that ends by SIGKILL; ``logger`` is an expression of ``pl`` and ``folder``."""
    code = f"""
import os, signal
from pathlib import Path
import pure_loop as pl
from tests.loggers.records import stream
folder = Path({str(folder)!r})
for event, state in stream([{logger}], folder / "checkpoints"):
    if event is pl.Event.BATCH_START and state.timestamp.batch == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("WANDB_SERVICE", None)  # of this process, where W&B runs here already
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def expected_steps() -> dict[str, list[int]]:
    """The batches at which each metric of ``stream`` is recorded."""
    batches = BATCHES * 2
    return {
        "train/loss": list(range(1, batches + 1)),
        "train/learning_rate": list(range(1, batches + 1)),
        "batches before": list(range(batches)),
        "val/loss": [3, 6, 9, 12],
        "val/accuracy": [3, 6, 9, 12],
        "by_class/0": [6, 12],
        "by_class/1": [6, 12],
    }
