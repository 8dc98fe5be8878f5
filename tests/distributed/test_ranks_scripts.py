"""Scripts that ``torchrun``, ``srun`` or ``mpirun`` start, or a shell rank by rank: many streams in one script, and
ranks that stop, die or never start.

Slow: a rank is a process of its own, which imports torch.
"""

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
# Seconds that processes may take to import torch on a busy machine, and a rank to be named: what waits for another
# timeout than its own takes longer than this.
START, NAMED = 180.0, 60.0

HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel

torch.set_num_threads(1)
rank, path = pl.distributed.rank(), sys.argv[1]
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
FOREIGN = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "TORCHELASTIC_")


class Job:
    """The processes of one script, which are killed in the end, and those that they started."""

    def __init__(self, folder: Path, body: str) -> None:
        self.folder, self.script = folder, folder / "script.py"
        self.script.write_text(HEAD.replace("TIMEOUT", str(TIMEOUT)) + textwrap.dedent(body))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **environ: str) -> None:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        ours |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ}
        run = [sys.executable, *command, str(self.script), str(self.folder)]
        with (self.folder / f"stderr{len(self.processes)}").open("wb") as log:
            self.processes.append(subprocess.Popen(run, env=ours, stdout=log, stderr=log, start_new_session=True))

    def rank_by_rank(self, ranks: int, *, without: int | None = None) -> None:
        address = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for rank in range(ranks):
            if rank != without:
                self.start(RANK=str(rank), LOCAL_RANK=str(rank), **address)

    def wait(self, *ranks: int) -> list[list[str]]:
        """What these ranks said, once their last line is "done"."""
        until = time.monotonic() + START
        paths = [self.folder / str(rank) for rank in ranks]
        while time.monotonic() < until:
            said = [path.read_text().splitlines() if path.exists() else [] for path in paths]
            if all(lines and lines[-1] == "done" for lines in said):
                return said
            time.sleep(0.1)
        raise AssertionError(f"{said}\n{''.join(each.read_text()[-2000:] for each in self.folder.glob('stderr*'))}")

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


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


MANY = """
for kind in ("replicate", "replicate", "shard", "replicate", "shard"):
    say(pl.run(fit(kind)).timestamp.batch)
    say(round(evaluate(kind), 6))
# After failed ones: in the call, before the first batch, in the middle, and where a rank leaves the loop.
bad = {"load_path": "/nonexistent/a.safetensors"} if rank == 1 else {}
say(told(lambda: fit("replicate", **bad)))
say(pl.run(fit("shard")).timestamp.batch)

def memory(state):
    if rank == 0:
        raise ValueError("no more")

def fails(state):
    if rank == 0:
        raise ValueError("no more")
    return state

for kind, algorithm in (
    ("replicate", pl.Algorithm("remembers", {Event.BATCH_END: lambda state: state}, init=memory)),
    ("replicate", pl.Algorithm("fails", {Event.INIT: fails})),
    ("shard", pl.Algorithm("fails", {Event.BEFORE_LOSS: fails})),
):
    say(told(fit(kind, algorithms=[algorithm])))
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
# In a variable of the module, so that nothing closes it when the body raises.
stream = fit("replicate", timeout=1000.0)
try:
    for event, state in stream:
        if rank == 1 and event is Event.BATCH_END and state.timestamp.batch == 2:
            say("done")
            raise ValueError("the disk is full")
except pl.DistributedError as error:
    say(error)
    say("done")
"""


def test_any_number_of_streams_in_one_script(job):
    """Fits and evaluations, replicated and sharded, after failed ones, around process groups of the user's, and one
    whose body raises."""
    many = job(MANY)
    module = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    many.start(*module, "--master-port", free_port())
    for rank, said in enumerate(many.wait(0, 1)):
        assert said[:10:2] == ["3"] * 5
        assert len(set(said[1:10:2])) == 1
        in_call, after_call, *failed = said[10:18]
        assert [after_call, *failed[1::2]] == ["3"] * 4
        failures = "rank 1 raised CheckpointNotFoundError in its call of pl.fit: .*nonexistent"
        assert re.search(failures if rank == 0 else "CheckpointNotFoundError", in_call)
        for text in failed[::2]:
            assert ("ValueError: no more" if rank == 0 else "rank 0 raised ValueError after") in text
        assert said[18:26] == ["3", "[2, 2, 2]", "2.0", "3"] * 2
        assert rank == 1 or "rank 1 left the loop at BATCH_END of batch 2" in said[26]


FAULTY = """
who, signals = {who}, getattr(signal, {sent!r})

@pl.algorithm(Event.BEFORE_FORWARD)
def faulty(state):
    if state.timestamp.batch == 1 and rank == who:
        os.kill(os.getpid(), signals)
    if state.timestamp.batch == 1 and rank == 2:
        time.sleep({timeout} / 2)  # at work meanwhile, and not to blame
    return state

pl.run(fit({kind!r}, timeout=1000.0))  # what is imported is imported, and what a stream leaves has another timeout
saver = [pl.callbacks.CheckpointSaver(path + "/run", interval="1ba")] if {kind!r} == "shard" else []
say(told(lambda: fit({kind!r}, algorithms=[faulty], callbacks=saver)))
say("done")
"""
STOPS = [
    ("replicate", "SIGSTOP", 0, 2, "rank 0 did not come to what follows .* hanging; .* the timeout is 6 s"),
    ("shard", "SIGKILL", 1, 3, "rank 1 did not come to what follows .*: killed"),
]


@pytest.mark.parametrize(("kind", "sent", "who", "ranks", "words"), STOPS, ids=["stops", "is killed"])
def test_a_rank_that_stops_or_dies_is_named(job, kind, sent, who, ranks, words):
    """Of three processes the two others name it, and of two the other."""
    faulty = job(FAULTY.format(kind=kind, sent=sent, who=who, timeout=TIMEOUT))
    faulty.rank_by_rank(ranks)
    for line, _ in faulty.wait(*(rank for rank in range(ranks) if rank != who)):
        seconds, _, text = line.partition(" ")
        assert text.startswith("DistributedError: "), line
        assert re.search(words, text), line
        assert float(seconds) < NAMED


TOGETHER = """
inputs = torch.arange(60.0).reshape(20, 3) / 60

def train(parallel, **options):
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    return pl.run(pl.fit(torch.nn.Linear(3, 1), loader, loss=mse, optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep",
                         parallel=parallel, **options))

say(told(lambda: train(None)))
alone = train(False)
for number in range(2):  # a script may train more than once
    state = train(os.environ["KIND"], autoresume=f"{path}/runs/{number}")
close = torch.allclose(state.module().weight, alone.module().weight, rtol=1e-5)
say([pl.distributed.world_size(), state.timestamp.batch, state.timestamp.sample, close])
say("done")
"""
LAUNCHERS = {
    "srun": "SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 SLURM_PROCID={0} SLURM_LOCALID={0} SLURM_STEP_NODELIST=localhost "
    "SLURM_STEP_ID=0 SLURM_JOB_ID={1}",
    "mpirun": "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_LOCAL_RANK={0} OMPI_COMM_WORLD_SIZE=2 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE={1}",
}


@pytest.mark.parametrize(("launcher", "kind"), [("srun", "replicate"), ("mpirun", "shard")])
def test_processes_that_a_launcher_starts_train_one_model_without_a_word_of_glue(job, launcher, kind):
    """As many batches and samples as one process, and its weights; one set of checkpoints; never apart by default."""
    several = job(TOGETHER)
    for rank in range(2):
        environ = dict(each.split("=") for each in LAUNCHERS[launcher].format(rank, os.getpid()).split())
        several.start(KIND=kind, **environ)
    for apart, together, _ in several.wait(0, 1):
        assert "ArgumentError: parallel=None" in apart
        assert together == "[2, 6, 40, True]"
    saved = [path.name.partition(".")[0] for path in (several.folder / "runs" / "1").glob("ep*")]
    assert sorted(saved) == ["ep1-ba3", "ep2-ba6"]  # one set, by both
