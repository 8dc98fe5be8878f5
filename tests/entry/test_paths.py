"""A leading ``~`` in a path is the home folder, in every argument that is a path, which are found by signature."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from tests.support.problem import LR, cross_entropy, fit, mlp, points, run

C, L = pl.callbacks, pl.loggers
SETTINGS: Any = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=LR), "max_duration": "20ba"}


def uploaded(path: Any) -> None:
    Path(os.path.expanduser(path)).write_text("a")
    run(loggers=[L.RemoteUploader("~/there", files=[path])])
    assert (Path.home() / "there" / Path(path).name).read_text() == "a"


def profiled(path: Any) -> None:
    for torch_profiler in (False, True):
        recipe = pl.Recipe(points(), **SETTINGS)
        recipe.profile(mlp(), batches=1, warmup=1, trace=path, torch_profiler=torch_profiler)
        Path(os.path.expanduser(path)).rename(os.path.expanduser(f"~/{torch_profiler}"))
    assert len(os.listdir(Path.home())) == 2


def composer(path: Any) -> None:
    torch.save(mlp().state_dict(), os.path.expanduser(path))
    pl.from_composer(path, mlp())


def recorded(path: Any) -> pl.State:
    run(callbacks=[C.FlightRecorder(path)])
    recipe = pl.Recipe(points(), **SETTINGS)
    assert next(recipe.rewind(mlp(), path, "1ba", "batch_start"))
    rewound = pl.rewind(path, "1ba", "batch_start", mlp(), points(), **SETTINGS)
    rewound.plot(os.path.join(path, "a.png"))
    return next(rewound)[1]


def resumed(path: Any) -> None:
    """The second command finds what the first one has saved."""
    run(autoresume=path, max_duration="1ep")
    assert next(iter(fit(autoresume=path)))[1].timestamp.batch == 0
    assert pl.latest_path(path) == os.path.expanduser(f"{path}/ep1-ba3.safetensors")


def best(path: Any) -> None:
    saver = C.CheckpointSaver(path, keep_best=1, metric="val/loss")
    run(callbacks=[saver], evaluators={"val": points()})
    assert str(pl.best_path(path)).startswith(str(Path.home()))
    assert C.CheckpointSaver(path).saves_to(os.path.expanduser(path))


def inspected(path: Any) -> None:
    pl.save(run(), path)
    assert pl.checkpoint.describe(path)
    assert pl.load(path, model=mlp()).timestamp.batch == 6
    assert run(load_path=path, max_duration="3ep").timestamp.batch == 9


def rehearsed(path: Any) -> None:
    """The folder is tried, and left."""
    Path(os.path.expanduser(path)).write_text("")
    report = str(pl.rehearse(mlp(), points(), loggers=[L.CSVLogger(path, overwrite=True)], **SETTINGS))
    assert os.path.expanduser(path) in report, report


def ranged(path: Any) -> None:
    pl.lr_find(mlp(), points(20), **SETTINGS).plot(path)


def reported(folder: Any) -> Path:
    run(loggers=[L.JSONLinesLogger(os.path.join(folder, "a.jsonl"))])
    assert pl.report(folder) == pl.Recipe(autoresume=folder).report()
    return pl.Recipe().report(folder, "~/b.html")


FILE, FOLDER = "~/a.safetensors", "~/runs"
USES: dict[str, Callable[[], Any]] = {
    "save path": lambda: pl.save(run(), FILE),
    "load path": lambda: inspected(FILE),
    "describe path": lambda: inspected(Path(FILE)),
    "fit load_path": lambda: inspected(FILE),
    "fit autoresume": lambda: resumed(FOLDER),
    "latest_path folder": lambda: resumed(FOLDER),
    "best_path folder": lambda: best(FOLDER),
    "CheckpointSaver folder": lambda: best(FOLDER),
    "CheckpointSaver.saves_to folder": lambda: best(FOLDER),
    "FlightRecorder folder": lambda: recorded(FOLDER),
    "rewind folder": lambda: recorded(FOLDER),
    "Recipe.rewind folder": lambda: recorded(FOLDER),
    "MemorySnapshot folder": lambda: C.MemorySnapshot(FOLDER)._place.folder,
    "MLPerfCallback folder": lambda: C.MLPerfCallback(FOLDER, "a", 0.1, "val/loss").folder,
    "ExportForInferenceCallback path": lambda: run(callbacks=[C.ExportForInferenceCallback(FILE)]),
    "export path": lambda: pl.export(run(), FILE),
    "from_composer path": lambda: composer("~/a.pt"),
    **dict.fromkeys(
        ("report folder_or_logger", "report path", "Recipe.report folder_or_logger", "Recipe.report path"),
        lambda: reported(FOLDER),
    ),
    "profile trace": lambda: profiled("~/a.json"),
    "Recipe.profile trace": lambda: profiled("~/a.json"),
    "CSVLogger path": lambda: run(loggers=[L.CSVLogger("~/{run_name}.csv")]),
    "JSONLinesLogger path": lambda: run(loggers=[L.JSONLinesLogger("~/a.jsonl")]),
    "TensorBoardLogger folder": lambda: L.TensorBoardLogger(FOLDER).folder,
    "CometMLLogger folder": lambda: L.CometMLLogger("a", folder=FOLDER, mode="offline").folder,
    "MLFlowLogger folder": lambda: L.MLFlowLogger("a", folder=FOLDER, tracking_uri="sqlite:///:memory:").folder,
    "NeptuneLogger folder": lambda: L.NeptuneLogger("a/a", folder=FOLDER, mode="offline").folder,
    "WandBLogger folder": lambda: L.WandBLogger("a", folder=FOLDER).folder,
    "SlackLogger folder": lambda: L.SlackLogger("#a", token="t", folder=FOLDER)._folder,
    "InMemoryLogger.to_csv path": lambda: L.InMemoryLogger().to_csv("~/a.csv"),
    "RemoteUploader files": lambda: uploaded("~/a.txt"),
    # Of what is returned.
    "rehearse": lambda: rehearsed("~/a.csv"),
    "LRFind.plot path": lambda: ranged("~/a.png"),
}
NEED = {"CometMLLogger": "comet_ml", "MLFlowLogger": "mlflow", "NeptuneLogger": "neptune", "SlackLogger": "slack_sdk"}
NEED |= {"TensorBoardLogger": "tensorboard", "WandBLogger": "wandb", "LRFind.plot": "matplotlib"}


OF_FIT = ("load_path", "autoresume")


def arguments() -> Iterator[str]:
    """The public arguments whose annotation is a path."""
    for module in (pl, pl.checkpoint, C, L):
        for name in module.__all__:
            item = getattr(module, name)
            own = vars(item).items() if inspect.isclass(item) else ()
            methods = {f"{name}.{key}": value for key, value in own if key[0] != "_" and inspect.isfunction(value)}
            for called, function in {name: item, **methods}.items():
                try:
                    parameters = inspect.signature(function).parameters.values()
                except (TypeError, ValueError):
                    continue
                paths = [each.name for each in parameters if "PathLike" in str(each.annotation)]
                # What a tool passes on to fit is read there.
                yield from (f"{called} {path}" for path in paths if called == "fit" or path not in OF_FIT)


def test_no_argument_is_left_out() -> None:
    assert set(arguments()) - {"Callback.saves_to folder"} <= USES.keys()  # saves_to: what users override


@pytest.mark.parametrize("name", USES)
def test_a_leading_tilde_is_the_home_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = NEED.get(name.split(" ")[0])
    if package is not None and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    result = USES[name]()
    assert not list(here.iterdir())
    assert str(result).startswith(str(home)) if isinstance(result, str | Path) else list(home.iterdir()), result
