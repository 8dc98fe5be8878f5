"""One process writes to a file: a requeued job beside its old one tears no line, and is told which process has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop._internal import owned_files
from pure_loop.callbacks import FlightRecorder
from pure_loop.loggers import CSVLogger, JSONLinesLogger

DATA = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4
PROGRAM = """
import sys, time, torch, pure_loop as pl
from pathlib import Path
from tests.loggers.test_two_processes import WRITERS, fit

name, folder, batches = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
for event, state in fit(WRITERS[name](folder), max_duration=f"{batches}ba", run_name="one", autoresume=folder / "c"):
    if event is pl.Event.BATCH_END:
        print(state.timestamp.batch, flush=True)
        time.sleep(0.01)
"""

WRITERS: dict[str, Any] = {
    "csv": lambda folder: CSVLogger(folder / "m.csv", flush="1ba"),
    "json lines": lambda folder: JSONLinesLogger(folder / "m.jsonl", flush="1ba"),
    "flight": lambda folder: FlightRecorder(folder / "f", keep="50ba"),
}


def fit(writer: Any, **options: Any) -> Any:
    at = {"loggers" if isinstance(writer, pl.Logger) else "callbacks": [writer]}
    arguments: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep", **at, **options}
    return pl.fit(nn.Linear(2, 1), DATA, loss=nn.functional.mse_loss, **arguments)


def start(name: str, folder: Path, batches: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, name, str(folder), str(batches)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, env=environment, **pipes)
    assert process.stdout is not None
    process.stdout.readline()  # it trains
    return process


def batches_of(name: str, folder: Path) -> list[int]:
    """The batches of the file, each line of which has to be whole."""
    if name == "csv":
        lines = (folder / "m.csv").read_text().splitlines()
        assert len({line.count(",") for line in lines}) == 1
        return [int(line.split(",")[0]) for line in lines[1:]]
    path = folder / ("m.jsonl" if name == "json lines" else "f/journal.jsonl")
    contents = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [each for each in contents if each.get("name", "train/loss") == "train/loss" and "batch" in each]
    return [each["batch"] for each in kept]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WRITERS))
def test_beside_a_process_that_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is refused, names the first, and leaves each line as it was."""
    monkeypatch.setattr(owned_files, "_PATIENCE", 0.3)
    first = start(name, tmp_path, 100_000)
    try:
        with pytest.raises(pl.errors.FileInUseError, match=f"process {first.pid} on"):
            pl.run(fit(WRITERS[name](tmp_path), run_name="one", autoresume=tmp_path / "d"))
    finally:
        first.kill()
        first.communicate()
    written = batches_of(name, tmp_path)
    assert written[-10:] == list(range(written[-1] - 9, written[-1] + 1)) if len(written) > 10 else written
    # It was killed, and no lock is left.
    pl.run(fit(WRITERS[name](tmp_path), run_name="one", autoresume=tmp_path / "c", max_duration="8ba"))


@pytest.mark.slow
def test_a_process_that_ends_is_waited_for(tmp_path: Path) -> None:
    first = start("json lines", tmp_path, 60)
    pl.run(fit(WRITERS["json lines"](tmp_path), run_name="one", autoresume=tmp_path / "c", max_duration="70ba"))
    assert first.wait(60) == 0, first.communicate()[1]
    first.communicate()
    assert batches_of("json lines", tmp_path) == list(range(1, 71))
    assert not list(tmp_path.glob(".*.lock"))


def test_a_run_that_was_left_does_not_keep_others_of_its_process_from_its_file(tmp_path: Path) -> None:
    """A cell of a notebook that was interrupted, whose stream is not closed; then it is."""
    begun = fit(WRITERS["json lines"](tmp_path), run_name="one", autoresume=tmp_path / "c", max_duration="8ba")
    for event, _ in begun:
        if event is pl.Event.BATCH_START:
            break
    pl.run(fit(WRITERS["json lines"](tmp_path), run_name="one", autoresume=tmp_path / "c", max_duration="8ba"))
    assert list(tmp_path.glob(".*.lock")), "which another process would wait for"
    begun.close()
    assert not list(tmp_path.glob(".*.lock"))


def test_threads_that_begin_at_once_share_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, locked = tmp_path / "m.jsonl", owned_files._locked

    def slowly(beside: str) -> int | None:
        time.sleep(0.1)
        return locked(beside)

    monkeypatch.setattr(owned_files, "_locked", slowly)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(owned_files.reserve, [path, path], ["JSONLinesLogger"] * 2))
    owned_files.release(path)
    assert list(tmp_path.glob(".*.lock")), "the other thread writes"
    owned_files.release(path)
    assert not list(tmp_path.glob(".*.lock"))


def test_a_fork_of_a_process_has_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    owned_files.reserve(path, "JSONLinesLogger")
    child = os.fork()
    if not child:
        owned_files.release(path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert list(tmp_path.glob(".*.lock"))
    owned_files.release(path)
    assert not list(tmp_path.glob(".*.lock"))


def test_a_file_system_without_locks_is_written_to_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import errno
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    pl.run(fit(WRITERS["csv"](tmp_path)))
    assert batches_of("csv", tmp_path)[-1] == 8
    assert "has no locks" in caplog.text


def test_the_longest_names_have_a_lock(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 249 + ".jsonl")
    owned_files.reserve(path, "JSONLinesLogger")
    owned_files.release(path)
    assert not list(tmp_path.iterdir())


def test_two_savers_in_one_folder_say_so_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process takes away, or replaces, every file: the log has one line, and after a minute how many more."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saver = pl.callbacks.CheckpointSaver(tmp_path, interval="1ba", keep_last=1, background=False, latest=None)
    for event, state in fit(saver, max_duration="10ep"):
        if event is not pl.Event.BATCH_CHECKPOINT:
            continue
        for path in tmp_path.glob("*.safetensors"):
            if state.timestamp.batch % 2:
                path.unlink()
            else:
                path.write_bytes(b"another's")
        if state.timestamp.batch == 30:
            now[0] += 61
    lines = [record.getMessage() for record in caplog.records if record.name == "pure_loop.checkpoint"]
    assert len(lines) == 2
    assert "more such messages" in lines[1]
