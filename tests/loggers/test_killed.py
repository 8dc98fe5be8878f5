"""One record of a run that is killed by a signal, twice, and resumes: of all loggers that write to files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from tests.loggers import test_comet_ml, test_csv, test_json_lines, test_tensorboard, test_wandb
from tests.loggers.records import expected_steps, kill_process, stream

pytestmark = pytest.mark.slow

LOGGERS: dict[str, str] = {
    "pure_loop": 'pl.loggers.JSONLinesLogger(folder / "metrics.jsonl", flush="3ba")',
    "csv": 'pl.loggers.CSVLogger(folder / "metrics.csv", flush="3ba")',
    "tensorboard": 'pl.loggers.TensorBoardLogger(folder / "board", flush="3ba")',
    "comet_ml": 'pl.loggers.CometMLLogger("digits", folder=folder, mode="offline", flush="3ba")',
    "wandb": 'pl.loggers.WandBLogger("digits", folder=folder, flush="3ba")',
}
LOGGERS = {package: logger for package, logger in LOGGERS.items() if importlib.util.find_spec(package)}

READ: dict[str, Callable[[Path], dict[str, list[int]]]] = {
    "pure_loop": lambda folder: test_json_lines.steps(folder / "metrics.jsonl"),
    "csv": lambda folder: test_csv.steps(folder / "metrics.csv"),
    "tensorboard": lambda folder: test_tensorboard.steps(folder / "board"),
    "comet_ml": test_comet_ml.steps,
    "wandb": test_wandb.steps,
}

IMAGES: dict[str, Callable[[Path], list[int]]] = {
    "pure_loop": lambda folder: [
        line["batch"] for line in test_json_lines.lines(folder / "metrics.jsonl") if line["kind"] == "images"
    ],
    "tensorboard": lambda folder: [
        event.step for event in test_tensorboard.accumulator(folder / "board").Images("inputs/0")
    ],
    "comet_ml": lambda folder: [step for _, step, name in test_comet_ml.uploads(folder) if name == "inputs/0"],
    "wandb": lambda folder: test_wandb.steps(folder)["inputs"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What all of them wrote of one run."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        for at in (5, 9):
            kill_process(", ".join(LOGGERS.values()), folder, at=at)
        names = {"pl": pl, "folder": folder}
        loggers: list[Any] = [eval(logger, names) for logger in LOGGERS.values()]
        assert len({logger.recorded_run_name for logger in loggers}) == 1, "one name for all"
        pl.run(stream(loggers, folder / "checkpoints"))
        yield folder


@pytest.mark.parametrize("package", LOGGERS)
def test_each_step_is_there_once(package: str, folder: Path) -> None:
    found = READ[package](folder)
    assert {name: sorted(found[name]) for name in expected_steps()} == expected_steps()


@pytest.mark.parametrize("package", [package for package in LOGGERS if package in IMAGES])
def test_images_are_neither_lost_nor_doubled(package: str, folder: Path) -> None:
    assert sorted(IMAGES[package](folder)) == [4, 8, 12]


def test_settings_are_recorded(folder: Path) -> None:
    recorded = json.loads((folder / "metrics.run.json").read_text())["hyperparameters"]
    assert recorded["batch_size"] == 5
    if "wandb" in LOGGERS:
        assert test_wandb.settings(folder)["batch_size"] == 5
        assert not (folder / "wandb_journal.jsonl").exists(), "everything is sent"
    if "comet_ml" in LOGGERS:
        assert all(map(test_comet_ml.names, folder.glob("*.zip"))), "comet upload takes no empty archive"
        assert not (folder / "comet_journal.jsonl").exists()
