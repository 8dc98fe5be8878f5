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
HEAD = f"""
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
    with open(f"{{path}}/{{rank}}", "a") as file:
        file.write(f"{{text}}\\n")

def fit(kind, timeout={TIMEOUT}, **options):
    torch.manual_seed(0)
    return pl.fit(torch.nn.Linear(3, 2), data, loss=mse, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
                  parallel=Parallel(kind=kind, timeout=timeout), **options)

def told(stream):
    started = time.monotonic()
    try:
        pl.run(stream())
        text = "ended"
    except Exception as error:
        text = f"{{type(error).__name__}}: {{error}}"
    return f"{{time.monotonic() - started:.1f}} {{text}}"
"""
FOREIGN = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "TORCHELASTIC_")


class Job:
    """The processes of one script, which are killed in the end, and those that they started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, folder / "script.py"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **environ: str) -> None:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        ours |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ}
        run = [sys.executable, *command, str(self.script), str(self.folder)]
        with (self.folder / f"stderr{len(self.processes)}").open("wb") as log:
            self.processes.append(subprocess.Popen(run, env=ours, stdout=log, stderr=log, start_new_session=True))

    def rank_by_rank(self, body: str, ranks: int, *, without: int | None = None) -> None:
        self.script.write_text(HEAD + body)
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

    def check_named(self, *ranks: int, words: str) -> None:
        """These ranks said in time what became of the other one."""
        for line, _ in self.wait(*ranks):
            assert re.match(r"[\d.]+ DistributedError: ", line), line
            assert re.search(words, line), line
            assert float(line.partition(" ")[0]) < NAMED


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    for each in job.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(each.pid)
            # torchrun's ranks are groups of their own, and one that is stopped outlives it.
            for process in (started, *started.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        each.wait()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


MANY = """
for kind in ("replicate", "replicate", "shard", "replicate", "shard"):
    say(pl.run(fit(kind)).timestamp.batch)
    torch.manual_seed(rank)
    evaluated = pl.run(pl.evaluate(torch.nn.Linear(3, 2), {"val": data}, loss=mse, parallel=kind))
    say(round(float(evaluated.metrics["val"]["loss"]), 6))
# After failed ones: in the call, before the first batch, in the middle, and where a rank leaves the loop.
bad = {"load_path": "/nonexistent/a.safetensors"} if rank == 1 else {}
say(told(lambda: fit("replicate", **bad)))
say(pl.run(fit("shard")).timestamp.batch)

def fails(state):
    if rank == 0:
        raise ValueError("no more")
    return state

for kind, algorithm in (
    ("replicate", pl.Algorithm("remembers", {Event.BATCH_END: lambda state: state}, init=fails)),
    ("replicate", pl.Algorithm("fails", {Event.INIT: fails})),
    ("shard", pl.Algorithm("fails", {Event.BEFORE_LOSS: fails})),
):
    say(told(lambda: fit(kind, algorithms=[algorithm])))
    say(pl.run(fit("replicate")).timestamp.batch)
# With a process group of the user's, around some streams and not around others.
for _ in range(2):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    say(pl.run(fit("replicate")).timestamp.batch)
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
except pl.errors.DistributedError as error:
    say(error)
    say("done")
"""


def test_any_number_of_streams_in_one_script(job):
    """Fits and evaluations, replicated and sharded, after failed ones, around process groups of the user's, and one
    whose body raises."""
    job.script.write_text(HEAD + MANY)
    module = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    job.start(*module, "--master-port", free_port())
    for rank, said in enumerate(job.wait(0, 1)):
        assert said[:10:2] == ["3"] * 5
        assert len(set(said[1:10:2])) == 1
        in_call, after_call, *failed = said[10:18]
        assert [after_call, *failed[1::2]] == ["3"] * 4
        failures = "rank 1 raised CheckpointNotFoundError in its call of pl.fit: .*nonexistent"
        assert re.search(failures if rank == 0 else "CheckpointNotFoundError", in_call)
        for text in failed[::2]:
            assert ("ValueError: no more" if rank == 0 else "rank 0 raised ValueError after") in text
        assert said[18:24] == ["3", "2.0", "3"] * 2
        assert rank == 1 or "rank 1 left the loop at BATCH_END of batch 2" in said[24]


FAULTY = """
@pl.algorithm(Event.{event})
def faulty(state):
    if state.timestamp.batch == 1 and rank == {who}:
        os.kill(os.getpid(), signal.{sent})
    if state.timestamp.batch == 1 and rank == 2:
        time.sleep(2)  # at work meanwhile, and not to blame
    return state

pl.run(fit({kind!r}, timeout=1000.0))  # what is imported is imported, and what a stream leaves has another timeout
say(told(lambda: fit({kind!r}, algorithms=[faulty])))
say("done")
"""


def test_a_rank_that_stops_dies_or_never_starts_is_named(job, tmp_path):
    """Of three processes the two others name it, and of two the other."""
    others = [Job(tmp_path / name) for name in ("killed", "alone", "halfway", "own")]
    for each in others:
        each.folder.mkdir()
        each.processes = job.processes
    killed, alone, halfway, own = others
    job.rank_by_rank(FAULTY.format(kind="replicate", event="BEFORE_FORWARD", sent="SIGSTOP", who=0), 2)
    job.check_named(1, words="rank 0 did not come to what follows .* hanging; .* the timeout is 6 s")
    # In the middle of a sharded batch the others wait for its parts of the parameters.
    halfway.rank_by_rank(FAULTY.format(kind="shard", event="BEFORE_LOSS", sent="SIGSTOP", who=0), 2)
    halfway.check_named(1, words="rank 0 did not come to what follows .* hanging; .* the timeout is 6 s")
    # In a process group of the user's, whose own timeout is half an hour, and whose store is lost with rank 0.
    whole = f'dist.init_process_group("gloo")\n{FAULTY}dist.destroy_process_group()\n'
    own.rank_by_rank(whole.format(kind="replicate", event="AFTER_LOSS", sent="SIGSTOP", who=0), 2)
    own.check_named(1, words="rank 0 did not come to what follows .* hanging; .* the timeout is 6 s")
    assert own.processes[-1].wait(NAMED) == 0
    killed.rank_by_rank(FAULTY.format(kind="shard", event="BEFORE_FORWARD", sent="SIGKILL", who=1), 3)
    killed.check_named(0, 2, words="rank 1 did not come to what follows .*: killed")
    alone.rank_by_rank('say(told(lambda: fit("replicate")))\nsay("done")', 2, without=0)
    alone.check_named(1, words="rank 1 of 2 could not meet the others within 6 s: rank 0")


TOGETHER = """
def train(parallel, **options):
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.arange(60.0).reshape(20, 3) / 60, torch.ones(20, 1))
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
    job.script.write_text(HEAD + TOGETHER)
    for rank in range(2):
        environ = dict(each.split("=") for each in LAUNCHERS[launcher].format(rank, os.getpid()).split())
        job.start(KIND=kind, **environ)
    for apart, together, _ in job.wait(0, 1):
        assert "ArgumentError: parallel=None" in apart
        assert together == "[2, 6, 40, True]"
    saved = [path.name.partition(".")[0] for path in (job.folder / "runs" / "1").glob("ep*")]
    assert sorted(saved) == ["ep1-ba3", "ep2-ba6"]  # one set, by both
