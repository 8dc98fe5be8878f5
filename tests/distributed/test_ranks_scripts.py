"""Scripts under torchrun, and started rank by rank: many streams in one script, and ranks that stop, die or fail."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="processes are stopped and killed"),
]

TIMEOUT = 6.0
# Seconds that processes may take to import torch on a busy machine.
START = 120.0

HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel

torch.set_num_threads(1)
rank, path = int(os.environ["RANK"]), sys.argv[1]
data = [(torch.ones(4, 3), torch.ones(4, 2))] * 3
mse = torch.nn.functional.mse_loss

def say(text):
    with open(f"{path}/{rank}", "a") as file:
        file.write(f"{text}\\n")

def fit(kind, **options):
    torch.manual_seed(0)
    options = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "timeout": TIMEOUT, **options}
    parallel = Parallel(kind=kind, timeout=options.pop("timeout"))
    return pl.fit(torch.nn.Linear(3, 2), data, loss=mse, parallel=parallel, **options)

def evaluate(kind):
    torch.manual_seed(rank)
    stream = pl.evaluate(torch.nn.Linear(3, 2), {"val": data}, loss=mse, parallel=kind)
    return float(pl.run(stream).metrics["val"]["loss"])

def told(stream):
    started = time.monotonic()
    try:
        pl.run(stream() if callable(stream) else stream)
        text = "ended"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return f"{time.monotonic() - started:.1f} {text}"
"""


class Job:
    """The processes of one script, which are killed in the end, and those that they started."""

    def __init__(self, folder: Path, body: str) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.script.write_text(HEAD.replace("TIMEOUT", str(TIMEOUT)) + textwrap.dedent(body))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **environ: str) -> None:
        with (self.folder / f"stderr{len(self.processes)}").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def torchrun(self, ranks: int) -> None:
        module = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1")
        self.start(*module, "--master-port", str(free_port()), str(self.script), str(self.folder))

    def rank_by_rank(self, ranks: int, *, without: int | None = None) -> None:
        port = str(free_port())
        for rank in range(ranks):
            if rank != without:
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                self.start(str(self.script), str(self.folder), **place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    def wait(self, *ranks: int) -> list[list[str]]:
        """What these ranks said, once their last line is "done"."""
        until = time.monotonic() + START
        while time.monotonic() < until:
            said = [path.read_text().splitlines() if path.exists() else [] for path in map(self._said, ranks)]
            if all(lines and lines[-1] == "done" for lines in said):
                return said
            time.sleep(0.1)
        raise AssertionError(f"{said}\n{''.join(each.read_text()[-2000:] for each in self.folder.glob('stderr*'))}")

    def _said(self, rank: int) -> Path:
        return self.folder / str(rank)

    def end(self) -> None:
        for each in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                started = psutil.Process(each.pid)
                # torchrun's ranks are groups of their own, and one that is stopped outlives it.
                for process in (started, *started.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            each.wait()


@pytest.fixture
def job(tmp_path):
    jobs = []

    def make(body):
        jobs.append(Job(tmp_path, body))
        return jobs[-1]

    yield make
    for each in jobs:
        each.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


MANY = """
began = time.monotonic()
for kind in ("replicate", "replicate", "shard", "replicate", "shard"):
    say(pl.run(fit(kind)).timestamp.batch)
    say(round(evaluate(kind), 6))

# After failed ones: in the call, before the first batch, in the middle, and where a rank leaves the loop.
say(told(lambda: fit("replicate", microbatch_size=-1 if rank == 1 else None)))
say(pl.run(fit("shard")).timestamp.batch)
for kind, event in (("replicate", Event.INIT), ("shard", Event.BEFORE_LOSS)):
    @pl.algorithm(event)
    def fails(state):
        if rank == 0:
            raise ValueError("no more")
        return state
    say(told(fit(kind, algorithms=[fails])))
    say(pl.run(fit("replicate")).timestamp.batch)

# With a process group of the user's, around some streams and not around others.
for _ in range(2):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    say(pl.run(fit("replicate")).timestamp.batch)
    outputs = [s.outputs for e, s in pl.predict(torch.nn.Linear(3, 2), data, parallel="replicate")
               if e is Event.PREDICT_BATCH_END]
    say([len(each) for each in outputs])
    total = torch.ones(1)
    dist.all_reduce(total)
    say(total.item())
    dist.destroy_process_group()
    say(pl.run(fit("replicate")).timestamp.batch)
say("done")
"""


@pytest.mark.parametrize("start", ["torchrun", "rank_by_rank"])
def test_any_number_of_streams_in_one_script(job, start):
    """Fits and evaluations, replicated and sharded, after failed ones, and around process groups of the user's."""
    many = job(MANY)
    getattr(many, start)(2)
    for rank, said in enumerate(many.wait(0, 1)):
        assert said[:10:2] == ["3"] * 5
        assert len(set(said[1:10:2])) == 1
        call, after_call, at_init, after_init, at_loss, after_loss, *with_groups, _ = said[10:]
        assert (after_call, after_init, after_loss) == ("3", "3", "3")
        assert ("rank 1 raised ArgumentError in its call of pl.fit" if rank == 0 else "ArgumentError") in call
        assert ("ValueError: no more" if rank == 0 else "rank 0 raised ValueError after INIT") in at_init
        assert ("ValueError: no more" if rank == 0 else "rank 0 raised ValueError after") in at_loss
        assert with_groups == ["3", "[2, 2, 2]", "2.0", "3"] * 2


FAULTY = """
kind, fault, where = {kind!r}, {fault!r}, {where!r}

def act():
    if fault == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no more")

@pl.algorithm(Event.BEFORE_FORWARD)
def faulty(state):
    if rank == {who} and where == "batch" and state.timestamp.batch == 1:
        act()
    return state

def memory(state):
    if rank == {who} and where == "memory":
        act()
    return 0

pl.run(fit(kind, timeout=100.0))  # what is imported is imported, and what a stream leaves has another timeout
if rank == {who} and where == "start":
    act()
bad = {{"load_path": "/nonexistent/a.safetensors"}} if rank == {who} and where == "call" else {{}}
algorithms = [faulty, pl.Algorithm("remembers", {{Event.BATCH_END: lambda state: state}}, init=memory)]
saver = [pl.callbacks.CheckpointSaver(path + "/run", interval="1ba")] if {saves!r} else []
say(told(lambda: fit(kind, algorithms=algorithms, callbacks=saver, **bad)))
say("done")
"""


@pytest.mark.parametrize(
    ("kind", "fault", "where", "who", "words"),
    [
        ("replicate", "stops", "batch", 0, "rank 0 did not come to what follows .* hanging; .* the timeout is 6 s"),
        ("shard", "stops", "batch", 1, "rank 1 did not come to what follows .* hanging; .* the timeout is 6 s"),
        ("shard", "stops", "start", 0, "rank 0, which hosts the store|rank 0 did not come: .* stopped, dead"),
        ("replicate", "stops", "start", 1, "could not meet the others within 6 s: rank 1 did not come"),
        ("replicate", "raises", "memory", 0, "rank 0 raised ValueError after .*: no more"),
        ("shard", "raises", "call", 0, r"rank 0 raised CheckpointNotFoundError in its call of pl\.fit: .*nonexistent"),
        ("replicate", "raises", "call", 1, r"rank 1 raised CheckpointNotFoundError in its call of pl\.fit: .*nonexist"),
    ],
)
@pytest.mark.parametrize("start", [pytest.param("torchrun", marks=pytest.mark.thorough), "rank_by_rank"])
def test_a_rank_that_stops_or_fails_is_named_within_twice_the_timeout(job, start, kind, fault, where, who, words):
    faulty = job(FAULTY.format(kind=kind, fault=fault, where=where, who=who, saves=where == "batch"))
    getattr(faulty, start)(2)
    ((line, _),) = faulty.wait(1 - who)
    seconds, _, text = line.partition(" ")
    assert text.startswith("DistributedError: "), line
    assert re.search(words, text), line
    # A rank that fails is named at once.
    assert float(seconds) < (2 * TIMEOUT if fault == "stops" else TIMEOUT)


@pytest.mark.parametrize(("kind", "who"), [("replicate", 0), ("shard", 0), ("shard", 2)])
def test_a_rank_that_dies_is_named(job, kind, who):
    faulty = job(FAULTY.format(kind=kind, fault="dies", where="batch", who=who, saves=False))
    faulty.rank_by_rank(3)
    for line, _ in faulty.wait(*(rank for rank in range(3) if rank != who)):
        assert re.search(rf"rank {who} did not come to what follows .*: killed", line), line
        assert float(line.partition(" ")[0]) < 2 * TIMEOUT


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_never_starts_is_named(job, who):
    alone = job('say(told(lambda: fit("replicate")))\nsay("done")')
    alone.rank_by_rank(2, without=who)
    ((line, _),) = alone.wait(1 - who)
    assert re.search(f"DistributedError: rank {1 - who} of 2 could not meet the others within 6 s: rank {who}", line)
    assert float(line.partition(" ")[0]) < 2 * TIMEOUT


KEPT = """
stream = fit({kind!r}, timeout=100.0)  # in a variable of the module, so that nothing closes it when the body raises
began = time.monotonic()
try:
    for event, state in stream:
        if rank == 1 and event is Event.BATCH_END and state.timestamp.batch == 2:
            say("done")
            raise ValueError("the disk is full")
except pl.DistributedError as error:
    say(f"{{time.monotonic() - began:.1f}} {{error}}")
    say("done")
"""


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_a_body_that_raises_while_the_stream_is_kept_is_named_at_once(job, kind):
    kept = job(KEPT.format(kind=kind))
    kept.rank_by_rank(2)
    said, _ = kept.wait(0, 1)
    seconds, text = said[0].split(" ", 1)
    assert "rank 1 left the loop at BATCH_END of batch 2" in text
    assert float(seconds) < 60
