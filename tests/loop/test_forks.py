"""A child that is forked while a stream is under way: it ends, writes nothing, and waits for no thread of its parent.

Tried: a child that exits, raises, leaves the loop, ends as the script does, is a process of multiprocessing, or goes on
iterating; eager, watched and strict; objects that have a thread or a file (CheckpointSaver, RemoteUploader, loggers,
progress, a loader's worker); a stream that was made in the parent and begins in the child; a stream of the child's own,
with a saver of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint.background import Background
from pure_loop.loggers import RemoteUploader
from tests.support.problem import fit, mlp, points

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

# Seconds in which a child ends on a busy machine; one that waits for a thread that it doesn't have never does.
ENDS = 90.0


def stream(**options: Any) -> Any:
    return fit(**{"data": points(4), "max_duration": "1ep", "strict": None, **options})


def up_to(pairs: Any, batch: int = 1) -> None:
    next(pair for pair in pairs if pair[0] is Event.BATCH_END and pair[1].timestamp.batch == batch)


def in_a_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked child, as JSON, or the name of what it raised."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = function()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    watch = threading.Timer(ENDS, os.kill, (child, signal.SIGKILL))
    watch.start()
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    watch.cancel()
    assert said, "the child did not end"
    return json.loads(said)


def test_a_child_does_not_wait_for_what_was_given_to_a_thread() -> None:
    gate, ran, background = threading.Event(), list[Any](), Background()
    for number in range(2):
        background.submit(lambda number=number: (gate.wait(), ran.append(number)))

    def child() -> Any:
        background.check()
        background.wait()
        background.close()
        background.submit(lambda: ran.append("a thread of its own"))
        background.close()
        return ran

    try:
        assert in_a_child(child) == ["a thread of its own"]
    finally:
        gate.set()
    background.close()
    assert ran == [0, 1]


def test_a_child_does_not_upload_what_waits_in_its_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    uploader = RemoteUploader(f"file://{tmp_path}/there", wait=0.0)
    uploader.log_file("file", str(tmp_path / "file"))
    with uploader._changed:  # as if the thread had it
        assert in_a_child(lambda: uploader.close() or "ended") == "ended"
    uploader.close()
    assert sorted(os.listdir(tmp_path / "there")) == ["file"]


def batches_of(folder: Path) -> set[int]:
    """Those whose checkpoints lie there."""
    return {int(path.stem.partition("-ba")[2]) for path in folder.glob("*.safetensors") if not path.is_symlink()}


class Counting(pl.Callback):
    closed = calls = 0

    def batch_end(self, state: pl.State, logger: Any) -> None:
        self.calls += 1

    def close(self) -> None:
        self.closed += 1


WAYS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "left": (lambda pairs: None, {}),
    "closed": (lambda pairs: pairs.close(), {"strict": True}),
    "an error": (lambda pairs: pairs.throw(KeyError("no")), {"watch": {Event.BATCH_END}}),
    "continued": (lambda pairs: len(list(pairs)), {}),
}


def test_what_a_stream_has_to_end_is_the_parents(tmp_path: Path) -> None:
    for way, (leave, options) in WAYS.items():
        folder, record, counting = tmp_path / way, tmp_path / f"{way}.jsonl", Counting()
        saver = CheckpointSaver(folder, interval="1ba", keep_last=None)
        pairs = stream(callbacks=[saver, counting], loggers=[pl.loggers.JSONLinesLogger(record)], **options)
        up_to(pairs, 2)
        before = record.read_bytes()

        def child() -> Any:
            try:
                leave(pairs)
                pairs.close()
                said = ""
            except (KeyError, pl.errors.ForkedError) as error:
                said = type(error).__name__
            return said, counting.closed, counting.calls, record.read_bytes() == before

        said, *rest = in_a_child(child)
        assert said == {"an error": "KeyError", "continued": "ForkedError"}.get(way, "")
        assert rest == [0, 2, True]
        assert pl.run(pairs).timestamp.batch == 4
        assert (counting.closed, counting.calls) == (1, 4)
        assert batches_of(folder) == {1, 2, 3, 4}


def test_a_stream_that_begins_in_a_child_is_the_childs(tmp_path: Path) -> None:
    def scripted(state: pl.State) -> Any:
        return (yield Event.BATCH_END, state)

    saver, counting = CheckpointSaver(tmp_path / "one", interval="1ba", keep_last=None), Counting()
    pairs = stream(callbacks=[saver, counting])
    driven = pl.drive(scripted(pl.State.create(mlp())), callbacks=[counting])

    def child() -> Any:
        return pl.run(pairs).timestamp.batch, counting.closed, pl.run(driven).event.name, counting.closed

    assert in_a_child(child) == [4, 1, "BATCH_END", 2]
    assert batches_of(tmp_path / "one") == {1, 2, 3, 4}
    # One of the child's own, beside the parent's saver.
    beside = stream(callbacks=[CheckpointSaver(tmp_path / "two", interval="1ba")])
    up_to(beside)
    own = [CheckpointSaver(tmp_path / "three")]
    assert in_a_child(lambda: pl.run(stream(callbacks=own)).timestamp.batch) == 4
    beside.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_loader_stay_the_parents(persistent: bool) -> None:
    data = TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.int64))
    for way in ("left", "closed", "an error"):
        pairs = stream(data=DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent))
        up_to(pairs)

        def child(way: str = way) -> str:
            nonlocal pairs
            with contextlib.suppress(KeyError):
                WAYS[way][0](pairs)
            pairs = None
            return "ended"

        assert in_a_child(child) == "ended"
        assert pl.run(pairs).timestamp.batch == 4


SCRIPT = """
import multiprocessing, os, sys, torch
import pure_loop as pl

way, folder = sys.argv[1:]

def fork():
    if way == "process":
        process = multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        process.join(90)
        return print("child", process.exitcode, flush=True) or process.kill()
    child = os.fork()
    if not child:
        {"exits": lambda: sys.exit(3), "raises": lambda: next(iter(())), "falls": lambda: None}[way]()
        return True
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

# Large, so that its checkpoints are still being written.
model = torch.nn.Sequential(torch.nn.Linear(3, 300_000), torch.nn.Linear(300_000, 2))
data = torch.utils.data.DataLoader([(torch.ones(3), torch.ones(2))] * 12, 4, num_workers=int(way == "process"))
saver = pl.callbacks.CheckpointSaver(folder + "/run", interval="1ba", keep_last=None)
stream = pl.fit(model, data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=1e-6), max_duration="1ep",
                callbacks=[saver], loggers=[pl.loggers.CSVLogger(folder + "/m.csv")])
for event, state in pl.progress(stream):
    if event == "batch_checkpoint" and state.timestamp.batch == 1 and fork():
        break
else:
    print("parent", state.timestamp.batch, flush=True)
"""


@pytest.mark.slow  # a process for each way in which a child of a script ends
@pytest.mark.parametrize(("way", "code"), [("exits", 3), ("raises", 1), ("falls", 0), ("process", 0)])
def test_a_child_of_the_body_ends(way: str, code: int, tmp_path: Path) -> None:
    run = [sys.executable, "-c", SCRIPT, way, str(tmp_path)]
    ran = subprocess.run(run, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines() == [f"child {code}", "parent 3"], ran.stderr[-3000:]
    assert ran.stderr.count("done") == 1, ran.stderr  # the bar of the parent alone
    assert "stopped" not in ran.stderr
    assert batches_of(tmp_path / "run") == {1, 2, 3}
