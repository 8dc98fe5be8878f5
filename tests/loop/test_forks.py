"""A child that is forked while a stream is under way: it ends, writes nothing, and waits for no thread of its parent.

Tried: a child that exits, raises, leaves the loop, ends as the script does, is a process of multiprocessing, or goes on
iterating; eager, watched, strict and compiled; objects that have a thread or a file (CheckpointSaver, RemoteUploader,
loggers, progress, a loader's worker); a stream that was made in the parent and begins in the child; a stream of the
child's own, with a saver of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint.background import Background
from pure_loop.loggers import RemoteUploader

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

# Seconds in which a child ends on a busy machine; one that waits for a thread that it doesn't have never does.
ENDS = 90.0

DATA = [(torch.ones(4, 3), torch.ones(4, 2))] * 4


class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(3), torch.ones(2)


def stream(data=DATA, **options):
    options = {"loss": torch.nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), **options}
    return pl.fit(torch.nn.Linear(3, 2), data, max_duration="1ep", **options)


def in_a_child(function):
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


def test_a_child_does_not_wait_for_what_was_given_to_a_thread():
    gate, ran = threading.Event(), []
    background = Background()
    for number in range(2):
        background.submit(lambda number=number: (gate.wait(), ran.append(number)))

    def child():
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


def test_a_child_does_not_upload_what_waits_in_its_parent(tmp_path):
    (tmp_path / "file").write_text("here")
    uploader = RemoteUploader(f"file://{tmp_path}/there", wait=0.0)
    uploader.log_file("file", str(tmp_path / "file"))
    with uploader._changed:  # as if the thread had it

        def child():
            uploader.close()
            uploader.log_file("other", str(tmp_path / "file"))
            uploader.close()
            return sorted(os.listdir(tmp_path / "there"))

        said = in_a_child(child)
    uploader.close()
    assert "other" in said
    assert sorted(os.listdir(tmp_path / "there")) == ["file", "other"]


def batches_of(folder):
    """Those whose checkpoints lie there."""
    return {int(path.stem.partition("-ba")[2]) for path in folder.glob("*.safetensors") if not path.is_symlink()}


class Counting(pl.Callback):
    def __init__(self):
        self.closed = self.calls = 0

    def batch_end(self, state, logger):
        self.calls += 1

    def close(self):
        self.closed += 1


WAYS = {
    "left": lambda pairs: None,
    "closed": lambda pairs: pairs.close(),
    "an error": lambda pairs: pairs.throw(KeyError("no")),
    "continued": lambda pairs: len(list(pairs)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"watch": {Event.BATCH_END}}, {"strict": True}, {"compile": True}])
def test_what_a_stream_has_to_end_is_the_parents(way, options, tmp_path):
    saver, counting = CheckpointSaver(tmp_path, interval="1ba", keep_last=None), Counting()
    logger = pl.loggers.JSONLinesLogger(tmp_path / "metrics.jsonl")
    pairs = stream(callbacks=[saver, counting], loggers=[logger], **options)
    next(pair for pair in pairs if pair[0] is Event.BATCH_END and pair[1].timestamp.batch == 2)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def child():
        try:
            WAYS[way](pairs)
            pairs.close()
            said = ""
        except (KeyError, pl.errors.ForkedError) as error:
            said = type(error).__name__
        return said, counting.closed, counting.calls, (tmp_path / "metrics.jsonl").read_bytes() == before

    said, *rest = in_a_child(child)
    assert said == {"an error": "KeyError", "continued": "ForkedError"}.get(way, "")
    assert rest == [0, 2, True]
    assert pl.run(pairs).timestamp.batch == 4
    assert (counting.closed, counting.calls) == (1, 4)
    assert batches_of(tmp_path) == {1, 2, 3, 4}


def test_a_stream_that_begins_in_a_child_is_the_childs(tmp_path):
    saver, counting = CheckpointSaver(tmp_path, interval="1ba", keep_last=None), Counting()
    pairs = stream(callbacks=[saver, counting])
    driven = pl.drive(scripted(pl.State.create(torch.nn.Linear(1, 1))), callbacks=[counting])

    def child():
        return pl.run(pairs).timestamp.batch, counting.closed, pl.run(driven).event.name, counting.closed

    assert in_a_child(child) == [4, 1, "BATCH_END", 2]
    assert batches_of(tmp_path) == {1, 2, 3, 4}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", ["left", "closed", "an error"])
def test_workers_of_a_loader_stay_the_parents(way, persistent):
    loader = torch.utils.data.DataLoader(Ones(), batch_size=4, num_workers=1, persistent_workers=persistent)
    pairs = stream(loader, callbacks=[Counting()])
    next(pair for pair in pairs if pair[0] is Event.BATCH_END)

    def child():
        nonlocal pairs
        with contextlib.suppress(KeyError):
            WAYS[way](pairs)
        pairs = None
        return "ended"

    assert in_a_child(child) == "ended"
    assert pl.run(pairs).timestamp.batch == 4


def scripted(state):
    state = yield Event.BATCH_END, state
    return state


def test_a_child_trains_by_a_stream_of_its_own_with_the_parents_saver(tmp_path):
    saver = CheckpointSaver(tmp_path / "one", interval="1ba")
    for event, _ in stream(callbacks=[saver]):
        if event is Event.BATCH_END:
            said = in_a_child(lambda: pl.run(stream(callbacks=[CheckpointSaver(tmp_path / "two")])).timestamp.batch)
            break
    assert said == 4


SCRIPT = """
import itertools, os, sys, time
import torch
import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver

torch.set_num_threads(1)
way, folder = sys.argv[1:]

def ends():
    {
        "exits": lambda: sys.exit(3),
        "raises": lambda: next(iter(())),
        "falls": lambda: None,
    }[way]()

def fork():
    if way == "process":
        import multiprocessing
        process = multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        process.join(90)
        print("child", process.exitcode, flush=True)
        process.kill()
        return
    child = os.fork()
    if not child:
        print("in the child", flush=True)
        ends()
        return True
    until = time.monotonic() + 90
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            print("child", os.waitstatus_to_exitcode(status), flush=True)
            return
        time.sleep(0.05)
    os.kill(child, 9)
    print("child hangs", flush=True)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.ones(3), torch.ones(2)

# Large, so that its checkpoints are still being written.
model = torch.nn.Sequential(torch.nn.Linear(3, 300_000), torch.nn.Linear(300_000, 2))
stream = pl.fit(
    model,
    torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=int(way == "process")),
    loss=torch.nn.functional.mse_loss,
    optimizer=pl.optim.sgd(lr=1e-6),
    max_duration="1ep",
    callbacks=[CheckpointSaver(folder + "/run", interval="1ba", keep_last=None)],
    loggers=[pl.loggers.CSVLogger(folder + "/m.csv"), pl.loggers.JSONLinesLogger(folder + "/m.jsonl")],
)
for event, state in pl.progress(stream):
    if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 1 and fork():
        break
else:
    print("parent", state.timestamp.batch, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exits", "raises", "falls", "process"])
def test_a_child_of_the_body_ends(way, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, str(script), way, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    code = {"exits": 3, "raises": 1, "falls": 0, "process": 0}[way]
    lines = ([] if way == "process" else ["in the child"]) + [f"child {code}", "parent 3"]
    assert ran.stdout.splitlines() == lines, ran.stderr[-3000:]
    assert ran.stderr.count("done") == 1, ran.stderr  # the bar of the parent alone
    assert "stopped" not in ran.stderr
    assert batches_of(tmp_path / "run") == {1, 2, 3}
    steps = [json.loads(line).get("batch") for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert steps == sorted(steps, key=lambda step: -1 if step is None else step), began
