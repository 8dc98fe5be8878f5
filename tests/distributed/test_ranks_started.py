"""Processes that ``srun``, ``mpirun`` and ``mpiexec`` start: their variables and no ``MASTER_ADDR``; real gloo."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

# Seconds that processes may take to import torch on a busy machine.
START = 180.0

SCRIPT = """
import json, sys
import torch
import pure_loop as pl

torch.set_num_threads(1)
mode, folder = sys.argv[1:]
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(20, 3, generator=generator)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

def train(parallel, **options):
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    return pl.run(pl.fit(torch.nn.Linear(3, 1), loader, loss=torch.nn.functional.mse_loss,
                         optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", parallel=parallel, **options))

try:
    for number in range(2):  # a script may train more than once
        state = train({"None": None, "False": False}.get(mode, mode), autoresume=f"{folder}/{number}"
                      if mode != "False" else None)
    module = state.module()
    said = [pl.distributed.rank(), pl.distributed.world_size(), state.timestamp.batch, state.timestamp.sample,
            module.weight.tolist()]
except pl.PureLoopError as error:
    said = [type(error).__name__, str(error)]
print(json.dumps(said))
"""

jobs = itertools.count(os.getpid())


def of_srun(rank, size):
    return {
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(size),
    }


def of_mpirun(rank, size):
    names = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
    values = (rank, rank, size, size)
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values, strict=True)}


def of_mpiexec(rank, size):
    names = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
    values = (rank, rank, size, size)
    return {name: str(value) for name, value in zip(names, values, strict=True)}


LAUNCHERS = {of_srun: "SLURM_JOB_ID", of_mpirun: "PMIX_NAMESPACE", of_mpiexec: "PMI_JOBID"}


def started(folder, launcher, size, mode):
    """What each process says."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    others = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "TORCHELASTIC_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    job = {} if launcher is None else {LAUNCHERS[launcher]: str(next(jobs))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), mode, str(folder / "runs")],
            env={
                **environ,
                **({} if launcher is None else launcher(rank, size) | job),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=START) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(out for out, _ in said), said
    return [json.loads(out) for out, _ in said]


@pytest.mark.parametrize("kind", ["replicate", "shard"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_that_were_started_together_train_one_model(tmp_path, launcher, kind):
    """Without a word of glue: as many batches and samples as one process, and its weights; one set of checkpoints."""
    (tmp_path / "one").mkdir()
    ((_, _, batch, sample, weight),) = started(tmp_path / "one", None, 1, kind)
    assert (batch, sample) == (6, 40)
    for rank, said in enumerate(started(tmp_path, launcher, 2, kind)):
        assert said[:4] == [rank, 2, 6, 40]
        assert said[4] == [pytest.approx(weight[0], rel=1e-5)]
    saved = [path.name.partition(".")[0] for path in (tmp_path / "runs" / "1").glob("ep*")]
    assert sorted(saved) == ["ep1-ba3", "ep2-ba6"]  # one set, by both


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_that_were_started_together_never_train_apart_by_default(tmp_path, launcher):
    for said in started(tmp_path, launcher, 2, "None"):
        assert said[0] == "ArgumentError"
        assert "parallel=None" in said[1]
    assert not (tmp_path / "runs").exists()
    for rank, said in enumerate(started(tmp_path, launcher, 2, "False")):
        assert said[:4] == [rank, 2, 6, 40]
