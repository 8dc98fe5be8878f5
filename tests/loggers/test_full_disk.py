"""A disk that is full: whoever writes, the error names the file, and what was there before stays whole."""

from __future__ import annotations

import builtins
import errno
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.callbacks import CheckpointSaver, ExportForInferenceCallback, FlightRecorder, MLPerfCallback
from pure_loop.loggers import CSVLogger, InMemoryLogger, JSONLinesLogger, TensorBoardLogger

DATA = [(torch.ones(4, 2), torch.zeros(4, 1))] * 40


class Images(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        if state.timestamp.batch == 3:
            generator = torch.Generator().manual_seed(0)
            logger.log_images("noise", torch.rand(1, 64, 64, 3, generator=generator), state)
            logger.log_table("long", ["a"], [[number] for number in range(3000)], state)


WRITERS: dict[str, tuple[Any, str]] = {
    "checkpoints": (lambda folder: CheckpointSaver(folder, interval="2ba"), "safetensors"),
    "flight": (lambda folder: FlightRecorder(folder, keep="1000ba", digest=0), "journal.jsonl"),
    "csv": (lambda folder: CSVLogger(folder / "m.csv", flush="1ba", include="train/*"), "m.csv"),
    "json lines": (lambda folder: JSONLinesLogger(folder / "m.jsonl", flush="1ba", include="train/*"), "m.jsonl"),
    "images": (lambda folder: JSONLinesLogger(folder / "m.jsonl", include="noise"), "noise-0.png"),
    "tables": (lambda folder: CSVLogger(folder / "m.csv", include="long"), "ba3-long.csv"),
    "mlperf": (lambda folder: MLPerfCallback(folder, "b", 0.0, "val/loss", settings={"x": "y" * 9000}), "result_0.txt"),
    "export": (lambda folder: ExportForInferenceCallback(folder / "model.pt"), "model.pt"),
}

PROGRAM = """
import resource, signal, sys
from pathlib import Path
from tests.loggers.test_full_disk import WRITERS, run

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = WRITERS[sys.argv[1]][0](Path(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    run(writer)
except OSError as error:
    sys.stdout.write(f"{type(error).__name__}: {error}")
"""


def run(writer: Any) -> pl.State:
    at = {"loggers": [writer], "callbacks": [Images()]} if isinstance(writer, pl.Logger) else {"callbacks": [writer]}
    arguments: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), **at}
    return pl.run(pl.fit(nn.Linear(2, 1), DATA, max_duration="2ep", evaluators={"val": DATA[:1]}, **arguments))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WRITERS))
def test_a_limit_of_the_system_names_the_file(name: str, tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as a quota: the system refuses in the middle of a write, in a process of its own."""
    limit = {"checkpoints": 1000, "export": 1000, "csv": 2500}.get(name, 4000)
    command = [sys.executable, "-c", PROGRAM, name, str(tmp_path), str(limit)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert WRITERS[name][1] in result.stdout, (result.stdout, result.stderr)
    assert str(tmp_path) in result.stdout
    assert "so large" in result.stdout
    assert all(path.name.endswith(".lock") or not path.name.startswith(".") for path in tmp_path.rglob("*"))


class Full(io.FileIO):
    """A file on a disk that is full."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no file can be written to."""
    opened, descriptor = builtins.open, os.fdopen

    def open_full(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or str(file) == os.devnull or "opener" in options:  # of tempfile
            return opened(file, mode, *arguments, **options)
        raw = Full(file, mode.replace("t", "").replace("b", ""))
        if "b" not in mode:
            return io.TextIOWrapper(raw, encoding="utf-8", write_through=True)  # type: ignore[arg-type]
        return raw

    def full_descriptor(number: int, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return Full(number, "r+") if "+" in mode else descriptor(number, mode, *arguments, **options)

    monkeypatch.setattr(builtins, "open", open_full)
    monkeypatch.setattr(io, "open", open_full)
    monkeypatch.setattr(os, "fdopen", full_descriptor)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("images", "tables", "flight")])
def test_a_disk_that_is_full_names_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = WRITERS[name]
    with monkeypatch.context() as full:
        fill(full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            run(writer(tmp_path))
    assert isinstance(caught.value, pl.PureLoopError)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)


def test_a_table_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = InMemoryLogger()
    run(logger)
    with monkeypatch.context() as full:
        fill(full)
        with pytest.raises(pl.errors.FileWriteError, match=r"m\.csv: No space left on device\. The disk is full"):
            logger.to_csv(tmp_path / "m.csv")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.tensorflow_stub.io import gfile

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gfile.LocalFileSystem, "append", refuse)
    others = set(threading.enumerate())
    with pytest.raises(
        pl.errors.FileWriteError, match=r"TensorBoardLogger can't write .*No space left on device"
    ) as caught:
        run(TensorBoardLogger(tmp_path, flush="1ba"))
    for thread in set(threading.enumerate()) - others:
        thread.join(10)  # TensorBoard's own, whose error is expected here, and not in the next test
    assert str(tmp_path) in str(caught.value)
