"""All loggers: a folder that can't be written is refused at FIT_START, and a missing package at once."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event
from tests.architecture.test_every_method import LOGGERS, OFFLINE
from tests.loggers.records import stream
from tests.support.served import NEEDED

PACKAGES = {
    "CometMLLogger": ("comet_ml", "comet_ml"),
    "MLFlowLogger": ("mlflow", "mlflow"),
    "NeptuneLogger": ("neptune", "neptune"),
    "RemoteUploader": ("fsspec", "remote"),
    "SlackLogger": ("slack_sdk", "slack"),
    "TensorBoardLogger": ("tensorboard", "tensorboard"),
    "WandBLogger": ("wandb", "wandb"),
}


def place_of(logger: Any) -> str | None:
    """The argument that says where it writes."""
    return next((name for name in ("folder", "path") if name in inspect.signature(logger).parameters), None)


def made(logger: Any, place: Path) -> Any:
    parameters = inspect.signature(logger).parameters
    needed = {name: value for name, value in NEEDED.items() if name in parameters}
    where = place_of(logger)
    return logger(**needed, **({} if where is None else {where: place}))


@pytest.mark.slow  # packages of trackers take seconds to import
@pytest.mark.parametrize(
    "logger", [logger for logger in LOGGERS if place_of(logger)], ids=lambda logger: logger.__name__
)
def test_a_folder_that_cant_be_written_is_an_error_at_fit_start(
    logger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(PACKAGES.get(logger.__name__, ("pure_loop", ""))[0])
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "file").write_text("")
    seen: list[Event] = []
    run = stream([made(logger, tmp_path / "file" / "m")], callbacks=[lambda event, _: seen.append(event)])
    with pytest.raises(OSError, match=rf"{logger.__name__} can't write to the folder.*{tmp_path.name}/file"):
        pl.run(run)
    assert seen[-1] is Event.FIT_START, "no batch is trained"


@pytest.mark.parametrize("name", [name for name in PACKAGES if name in pl.loggers.__all__])
def test_a_missing_package_is_an_error_that_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, extra = PACKAGES[name]
    for module in [module for module in sys.modules if module == package or module.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(pl.MissingExtraError, match=rf"{package}.*pip install 'pure_loop\[{extra}\]'"):
        made(getattr(pl.loggers, name), tmp_path)


def test_each_logger_with_a_package_is_tried() -> None:
    written = {logger.__name__ for logger in LOGGERS}
    assert PACKAGES.keys() & written == written - {"ConsoleLogger", "CSVLogger", "InMemoryLogger", "JSONLinesLogger"}


@pytest.mark.parametrize(
    "logger", [pl.loggers.CSVLogger, pl.loggers.JSONLinesLogger], ids=lambda logger: logger.__name__
)
def test_a_folder_in_the_place_of_a_file_is_refused_and_stays(logger: Any, tmp_path: Path) -> None:
    for folder in (tmp_path, ".", ".."):
        with pytest.raises(
            pl.ArgumentError, match=rf"{logger.__name__} path='.*' is a folder: write the path of a file"
        ):
            logger(folder)
    assert tmp_path.is_dir()


def test_two_loggers_of_one_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    with pytest.raises(pl.ArgumentError, match=r"two loggers write to .*metrics\.csv"):
        stream([pl.loggers.CSVLogger(file), pl.loggers.CSVLogger(file)])
    assert not file.exists()
