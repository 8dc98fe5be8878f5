"""Files of records: a disk that is full is named, and one process writes to a file."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop._internal import owned_files
from pure_loop.callbacks import CheckpointSaver, ExportForInferenceCallback, FlightRecorder, MLPerfCallback
from pure_loop.checkpoint.flight import read_flight
from pure_loop.loggers import CSVLogger, InMemoryLogger, JSONLinesLogger, TensorBoardLogger
from tests.support import problem
from tests.support.extras import needs
from tests.support.problem import points


class Images(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        if state.timestamp.batch == 3:
            logger.log_images("noise", torch.rand(1, 64, 64, 3, generator=problem.noise()), state)
            logger.log_table("long", ["a"], [[number] for number in range(3000)], state)


# Writers, the bytes that there is place for, and the file that the error names.
WRITERS: tuple[tuple[Any, int, str], ...] = (
    (lambda folder: CheckpointSaver(folder, interval="2ba"), 1000, "safetensors"),
    (lambda folder: FlightRecorder(folder, keep="1000ba", digest=0), 4000, "journal.jsonl"),
    (lambda folder: CSVLogger(folder / "m.csv", flush="1ba", include="train/*"), 2500, "m.csv"),
    (lambda folder: JSONLinesLogger(folder / "m.jsonl", flush="1ba", include="train/*"), 4000, "m.jsonl"),
    (lambda folder: JSONLinesLogger(folder / "m.jsonl", include="noise"), 4000, "noise-0.png"),
    (lambda folder: CSVLogger(folder / "m.csv", include="long"), 4000, "ba3-long.csv"),
    (lambda folder: MLPerfCallback(folder, "b", 0.0, "val/loss", settings={"x": "y" * 9000}), 4000, "result_0.txt"),
    (lambda folder: ExportForInferenceCallback(folder / "model.pt"), 1000, "model.pt"),
)


def run(writer: Any) -> pl.State:
    at = {"loggers": [writer], "callbacks": [Images()]} if isinstance(writer, pl.Logger) else {"callbacks": [writer]}
    return problem.run(data=points(40), evaluators={"val": points(1)}, strict=False, clock=time.monotonic, **at)


@contextmanager
def place_for(size: int) -> Iterator[None]:
    """The system refuses a write in its middle, where a file becomes larger; as with a quota."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_whoever_writes_to_a_disk_that_is_full_names_the_file(tmp_path: Path) -> None:
    for number, (make, size, file) in enumerate(WRITERS):
        folder = tmp_path / str(number)
        with pytest.raises(OSError, match="so large") as caught, place_for(size):
            run(make(folder))
        assert isinstance(caught.value, pl.PureLoopError)
        assert caught.value.errno == errno.EFBIG
        assert file in str(caught.value)
        assert str(folder) in str(caught.value)
    assert all(path.name.endswith(".lock") or not path.name.startswith(".") for path in tmp_path.rglob("*"))
    memory = InMemoryLogger()
    pl.run(problem.fit(loggers=[memory], strict=False))
    with pytest.raises(pl.errors.FileWriteError, match=r"m\.csv: .*so large"), place_for(50):
        memory.to_csv(tmp_path / "m.csv")


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.compat.tensorflow_stub.io import gfile

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gfile.LocalFileSystem, "append", refuse)
    others = set(threading.enumerate())
    says = rf"TensorBoardLogger can't write .*{tmp_path}.*No space left on device\. The disk is full"
    with pytest.raises(pl.errors.FileWriteError, match=says):
        run(TensorBoardLogger(tmp_path, flush="1ba"))
    for thread in set(threading.enumerate()) - others:
        thread.join(10)  # TensorBoard's own, whose error is expected here, and not in the next test


# One process writes to a file: a requeued job beside its old one tears no line, and is told which process has it.

BESIDE = """
import sys, time, pure_loop as pl
from pathlib import Path
from tests.loggers.test_files import owner

folder, batches = Path(sys.argv[1]), int(sys.argv[2])
for event, state in owner(folder, max_duration=f"{batches}ba", autoresume=folder / "c"):
    if event is pl.Event.BATCH_END:
        print(state.timestamp.batch, flush=True)
        time.sleep(0.01)
"""


def owner(folder: Path, **options: Any) -> Any:
    """A run that writes to all kinds of files that one process has."""
    loggers = [CSVLogger(folder / "m.csv", flush="1ba"), JSONLinesLogger(folder / "m.jsonl", flush="1ba")]
    callbacks = [FlightRecorder(folder / "f", keep="50ba")]
    given = {"max_duration": "8ba", "run_name": "one", "strict": False, **options}
    return problem.fit(data=points(4), loggers=loggers, callbacks=callbacks, **given)


def begun(folder: Path, batches: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BESIDE, str(folder), str(batches)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, **pipes)
    assert process.stdout is not None
    process.stdout.readline()  # it trains
    return process


def batches_of(folder: Path) -> list[list[int]]:
    """Those of each file, each line of which has to be whole."""
    table = (folder / "m.csv").read_text().splitlines()
    assert len({line.count(",") for line in table}) == 1
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    losses = [line["batch"] for line in lines if line["name"] == "train/loss"]
    return [[int(line.split(",")[0]) for line in table[1:]], losses, list(read_flight(folder / "f").lines)]


@pytest.mark.slow  # processes
def test_beside_a_process_that_goes_on_and_one_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is refused, names the first, and leaves each line as it was; one that ends is waited for."""
    first = begun(tmp_path, 100_000)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owned_files, "_PATIENCE", 0.3)
            with pytest.raises(pl.errors.FileInUseError, match=f"process {first.pid} on"):
                pl.run(owner(tmp_path, autoresume=tmp_path / "d"))
    finally:
        first.kill()
        first.communicate()
    for found in batches_of(tmp_path):
        assert found == list(range(1, len(found) + 1))
    second = begun(tmp_path / "second", 60)
    pl.run(owner(tmp_path / "second", autoresume=tmp_path / "second" / "c", max_duration="70ba"))
    assert second.communicate(timeout=60)[1] == ""
    assert batches_of(tmp_path / "second") == [list(range(1, 71))] * 3
    assert not list((tmp_path / "second").glob(".*.lock"))


def test_a_run_that_was_left_does_not_keep_others_of_its_process_from_its_file(tmp_path: Path) -> None:
    """A cell of a notebook that was interrupted, whose stream is not closed; then it is."""
    left = owner(tmp_path, autoresume=tmp_path / "c")
    next(event for event, _ in left if event is pl.Event.BATCH_START)
    pl.run(owner(tmp_path, autoresume=tmp_path / "c"))
    assert list(tmp_path.glob(".*.lock")), "which another process would wait for"
    left.close()
    assert not list(tmp_path.glob(".*.lock"))


def test_threads_and_forks_of_a_process_share_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, locked = tmp_path / "m.jsonl", owned_files._locked
    monkeypatch.setattr(owned_files, "_locked", lambda beside: (time.sleep(0.1), locked(beside))[1])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(owned_files.reserve, [path, path], ["JSONLinesLogger"] * 2))
    child = os.fork()
    if not child:
        owned_files.release(path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    owned_files.release(path)
    assert list(tmp_path.glob(".*.lock")), "the other thread writes"
    owned_files.release(path)
    assert not list(tmp_path.glob(".*.lock"))
    longest = tmp_path / ("a" * 249 + ".jsonl")
    owned_files.reserve(longest, "JSONLinesLogger")
    owned_files.release(longest)
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_written_to_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    pl.run(owner(tmp_path))
    assert batches_of(tmp_path)[1][-1] == 8
    assert "has no locks" in caplog.text


def test_two_savers_in_one_folder_say_so_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process takes away every file: the log has one line, and after a minute how many more."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saver = CheckpointSaver(tmp_path, interval="1ba", keep_last=1, background=False, latest=None)
    for event, state in problem.fit(callbacks=[saver], max_duration="4ep", strict=False):
        if event is pl.Event.BATCH_CHECKPOINT:
            [path.unlink() for path in tmp_path.glob("*.safetensors")]
        now[0] += 61 * (event is pl.Event.EPOCH_END and state.timestamp.epoch == 3)
    lines = [record.getMessage() for record in caplog.records if record.name == "pure_loop.checkpoint"]
    assert len(lines) == 2
    assert "more such messages" in lines[1]
