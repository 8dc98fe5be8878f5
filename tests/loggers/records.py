"""Runs that loggers record, whole or killed and resumed; and what each logger has of a run, read from its files."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

import pure_loop as pl
from tests.support import problem
from tests.support.problem import points

BATCHES = 6  # in an epoch
DATA = points(BATCHES, size=5)
STEPS: dict[str, list[int]] = {
    "train/loss": list(range(1, 13)),
    "train/learning_rate": list(range(1, 13)),
    "batches before": list(range(12)),
    "val/loss": [3, 6, 9, 12],
    "val/accuracy": [3, 6, 9, 12],
    "by_class/0": [6, 12],
    "by_class/1": [6, 12],
}
"""The batches at which each metric of ``stream`` is recorded."""


class Kinds(pl.Callback):
    """Records a thing of each kind, at several events of some batches."""

    def batch_end(self, state: pl.State, logger: Any) -> None:
        if state.timestamp.batch % 4 == 0:
            logger.log_text("sample", f"text of batch {state.timestamp.batch}", state)
            logger.log_table("confusion", ["a", "b"], [[1, 2.5], ["x", None]], state)
            masks = {"targets": torch.arange(24).reshape(2, 3, 4) % 3}
            logger.log_images("inputs", torch.linspace(0, 1, 72).reshape(2, 3, 4, 3), state, masks=masks)

    def epoch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({"by_class": torch.tensor([0.25, 0.5])}, state)

    def after_forward(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({"batches before": state.timestamp.batch}, state)


def stream(loggers: Iterable[pl.Logger], folder: Path | None = None, start: Any = None, **options: Any) -> Any:
    """A run of two epochs, which saves every fourth batch in ``folder`` and resumes from there."""
    callbacks: list[Any] = [Kinds()]
    if folder is not None:
        callbacks.append(pl.callbacks.CheckpointSaver(folder, interval="4ba", background=False))
    settings: dict[str, Any] = {
        "optimizer": pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "12ba")),
        "evaluators": {"val": DATA[:2]},
        "eval_interval": "3ba",
        "callbacks": callbacks,
        "autoresume": folder,
        "strict": False,
    }
    return problem.fit(start, DATA, loggers=list(loggers), **{**settings, **options})


def failing(at: int) -> Any:
    def fail(event: pl.Event, state: pl.State) -> None:
        if event is pl.Event.BATCH_END and state.timestamp.batch == at:
            raise RuntimeError("<http://x|y>")

    return fail


def killed(logger: Any, folder: Path, at: int, event: pl.Event = pl.Event.BATCH_START) -> None:
    """Train to an event after ``at`` batches, and leave as a kill does: nothing is flushed and nothing closed."""
    run = stream([logger], folder)
    for reached, state in run:
        if reached is event and state.timestamp.batch == at:
            break
    logger.close = lambda: None
    run.close()
    logger.end()  # closes the file alone


def kill_process(loggers: str, folder: Path, at: int) -> None:
    """The same in a process that ends by SIGKILL; ``loggers`` are expressions of ``pl`` and ``folder``."""
    code = f"""
import os, signal
from pathlib import Path
import pure_loop as pl
from tests.loggers.records import stream
folder = Path({str(folder)!r})
for event, state in stream([{loggers}], folder / "checkpoints"):
    if event is pl.Event.BATCH_START and state.timestamp.batch == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("WANDB_SERVICE", None)  # of this process, where W&B runs here already
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


# What each logger has. A series is a list of (batch, value).

Series = dict[str, list[tuple[int, Any]]]


def collected(items: Iterable[tuple[str, int, Any]]) -> Series:
    found: Series = {}
    for name, step, value in items:
        found.setdefault(name, []).append((step, value))
    return found


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        found = list(csv.DictReader(file, strict=True))
    assert all(None not in row and None not in row.values() for row in found), "rows as long as the head"
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_csv(folder: Path) -> Series:
    found = rows(folder / "m.csv")
    names = [name for name in found[0] if name not in ("batch", "epoch", "time")]
    return collected((name, int(row["batch"]), float(row[name])) for name in names for row in found if row[name])


def of_json_lines(folder: Path) -> Series:
    found = [line for line in lines(folder / "m.jsonl") if line["kind"] in ("metric", "images")]
    return collected((line["name"], line["batch"], line["value"]) for line in found)


def accumulator(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Without the removal of what a restart repeats: there must be nothing to remove.
    return EventAccumulator(str(folder), purge_orphaned_data=False, size_guidance={"scalars": 0, "images": 0}).Reload()


def of_tensorboard(folder: Path) -> Series:
    found = accumulator(folder)
    images = [("inputs", event.step, None) for event in found.Images("inputs/0")]
    return collected([(tag, e.step, e.value) for tag in found.Tags()["scalars"] for e in found.Scalars(tag)] + images)


def of_wandb(folder: Path) -> Series:
    histories = [record.history for record in records_of_wandb(folder) if record.WhichOneof("record_type") == "history"]
    return collected(
        ((item.key or "/".join(item.nested_key)).removesuffix("/_type"), history.step.num, json.loads(item.value_json))
        for history in histories
        for item in history.item
    )


def records_of_wandb(folder: Path) -> list[Any]:
    """What all processes wrote, in the order of their starts.

    The service of wandb writes the end of a file when ``finish`` has returned; the file of a process that was killed
    has none.
    """
    result = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        found = list(_records_in(file))
        while not any(map(_is_exit, found)) and time.time() - file.stat().st_mtime < 2:
            time.sleep(0.02)
            found = list(_records_in(file))
        result += found
    return result


def _is_exit(record: Any) -> bool:
    return bool(record.WhichOneof("record_type") == "exit")


def _records_in(file: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        record += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(raw):
            yield Record.FromString(record)
            record = b""


def of_comet(folder: Path) -> Series:
    metrics = [each["metric"] for each in messages_of_comet(folder, "metric_msg")]
    uploads = [each["additional_params"] for each in messages_of_comet(folder, "file_upload")]
    images = [("inputs", each["step"], None) for each in uploads if each.get("figName") == "inputs/0"]
    return collected([(each["metricName"], each["step"], each["metricValue"]) for each in metrics] + images)


def messages_of_comet(folder: Path, kind: str) -> Iterator[Any]:
    """What archives hold of a kind, in the order of their processes' ends."""
    for path in sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(path) as archive:
            for message in map(json.loads, archive.read("messages.json").decode().splitlines()):
                if message["type"] == kind:
                    yield message["payload"]


def of_mlflow(folder: Path) -> Series:
    client, (run,) = runs_of_mlflow(folder)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: sorted((metric.step, metric.value) for metric in found) for name, found in histories.items()}


def runs_of_mlflow(folder: Path) -> tuple[Any, list[Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    return client, client.search_runs([client.get_experiment_by_name("digits").experiment_id])


def of_neptune(folder: Path) -> Series:
    found: list[tuple[str, int, Any]] = []
    for log in sorted(folder.glob(".neptune/offline/run__*/data-*.log"), key=lambda path: path.stat().st_mtime_ns):
        for operation in (json.loads(line)["obj"] for line in log.read_text().splitlines()):
            if operation["type"].startswith("Log"):
                name = "/".join(operation["path"])
                found += [(name, int(item["step"]), item["value"]) for item in operation["values"]]
    return collected(found)


@attrs.frozen
class Backend:
    """A logger that keeps what it is given.

    Attributes:
        package: that it needs.
        code: makes it for a ``folder``.
        read: its series; the images are those of ``"inputs"``.
    """

    package: str
    code: str
    read: Callable[[Path], Series]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def make(self, folder: Path, **options: Any) -> Any:
        named = "".join(f", {name}={value!r}" for name, value in options.items())
        return eval(self.code.removesuffix(")") + named + ")", {"pl": pl, "folder": folder})


BACKENDS = {
    "CSVLogger": Backend("csv", 'pl.loggers.CSVLogger(folder / "m.csv")', of_csv),
    "JSONLinesLogger": Backend("json", 'pl.loggers.JSONLinesLogger(folder / "m.jsonl")', of_json_lines),
    "TensorBoardLogger": Backend("tensorboard", "pl.loggers.TensorBoardLogger(folder)", of_tensorboard),
    "WandBLogger": Backend("wandb", 'pl.loggers.WandBLogger("digits", folder=folder)', of_wandb),
    "CometMLLogger": Backend("comet_ml", 'pl.loggers.CometMLLogger("digits", folder=folder, mode="offline")', of_comet),
    "MLFlowLogger": Backend(
        "mlflow",
        'pl.loggers.MLFlowLogger("digits", tracking_uri=f"sqlite:///{folder}/mlflow.db", folder=folder)',
        of_mlflow,
    ),
    "NeptuneLogger": Backend(
        "neptune", 'pl.loggers.NeptuneLogger("team/digits", folder=folder, mode="offline")', of_neptune
    ),
}
