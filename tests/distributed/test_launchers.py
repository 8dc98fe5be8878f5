"""What a launcher says of a process: read from the variables that it sets, or refused.

The variables are those that Slurm 22.05, Open MPI 4.1 and MPICH 4.0 set, printed by a script under ``srun``,
``sbatch``, ``salloc``, ``srun --pty`` and ``srun --mpi=pmi2``, and by ``mpirun`` and ``mpiexec``, also in a Slurm job.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop._internal.processes import World, launched, nodes, world
from pure_loop.distributed.engines import device_of_rank
from pure_loop.testing.ranks import simulate
from tests.support.tiers import examples

PORTS = range(20000, 32000)


def variables(text):
    return dict(each.split("=") for each in text.split())


BATCH = variables(
    "SLURM_JOB_ID=2 SLURM_JOB_NODELIST=node[01-02] SLURM_NODELIST=node[01-02] SLURM_NTASKS=2 SLURM_NPROCS=2 "
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0"
)


def step(rank, size, *, nodelist="node[01-02]", local=0, job=2, number=0):
    return BATCH | variables(
        f"SLURM_NTASKS={size} SLURM_JOB_ID={job} SLURM_STEP_ID={number} SLURM_STEP_NUM_TASKS={size} "
        f"SLURM_PROCID={rank} SLURM_LOCALID={local} SLURM_STEP_NODELIST={nodelist}"
    )


def open_mpi(rank, size, *, local=0, local_size=None, namespace="1110900737"):
    return variables(
        f"OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} OMPI_COMM_WORLD_LOCAL_RANK={local} "
        f"OMPI_COMM_WORLD_LOCAL_SIZE={local_size or size} PMIX_RANK={rank} PMIX_NAMESPACE={namespace}"
    )


def mpich(rank, size, local=0, local_size=None):
    return variables(
        f"PMI_RANK={rank} PMI_SIZE={size} MPI_LOCALRANKID={local} MPI_LOCALNRANKS={local_size or size} PMI_FD=5"
    )


TORCHRUN = variables("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=head MASTER_PORT=29500")
TWO = variables("RANK=1 WORLD_SIZE=2")
OF_TORCHRUN = World(launcher="RANK and WORLD_SIZE", rank=3, size=4, local_rank=1, host="head", port=29500)


def of_step(rank=1, size=2, local=0, host="node01", port=20000 + 2 * 101):
    return World(launcher="srun", rank=rank, size=size, local_rank=local, host=host, port=port)


READ = {
    "nothing": ({}, World()),
    "a batch script": (BATCH, World()),
    "salloc": (variables("SLURM_JOB_ID=2 SLURM_NTASKS=2 SLURM_NODELIST=node[01-02]"), World()),
    "a step": (step(1, 2), of_step()),
    "a step on one node": (
        step(1, 2, nodelist="node07", local=1, number=3),
        of_step(local=1, host="127.0.0.1", port=20205),
    ),
    "a step of one task": (step(0, 1, nodelist="node07"), of_step(0, 1, host="127.0.0.1")),
    "a step with PMI": (step(1, 2) | variables("PMI_RANK=1 PMI_SIZE=2 PMI_JOBID=2.0"), of_step()),
    "torchrun": (TORCHRUN, OF_TORCHRUN),
    "torchrun in a step": (step(0, 2) | TORCHRUN, OF_TORCHRUN),
    "RANK of a step's task": (
        step(1, 2, local=1) | TWO | variables("MASTER_ADDR=head MASTER_PORT=1234"),
        World(launcher="RANK and WORLD_SIZE", rank=1, size=2, local_rank=1, host="head", port=1234),
    ),
    "a step with another address": (
        step(1, 2) | variables("MASTER_ADDR=10.0.0.1 MASTER_PORT=1234"),
        of_step(host="10.0.0.1", port=1234),
    ),
    "mpiexec on one of two nodes": (
        mpich(2, 4, local=0, local_size=2),
        World(launcher="mpiexec", rank=2, size=4, local_rank=0),
    ),
    # Open MPI and MPICH start one process of their own on each node through srun.
    "mpirun under a step": (
        step(1, 2) | open_mpi(3, 4, local=1, local_size=2),
        World(launcher="mpirun", rank=3, size=4, local_rank=1),
    ),
    "a template's WORLD_SIZE": ({"WORLD_SIZE": "1"}, World()),
    "RANK alone of one": ({"RANK": "0", "WORLD_SIZE": "1"}, World(launcher="RANK and WORLD_SIZE")),
}


def test_what_a_launcher_sets_is_read():
    assert {name: world(environ) for name, (environ, _) in READ.items()} == {name: w for name, (_, w) in READ.items()}


def test_processes_of_one_mpirun_on_one_machine_meet_there_and_those_of_another_elsewhere():
    for more in ({}, BATCH):
        worlds = [world(open_mpi(rank, 3) | more) for rank in range(3)]
        assert [each.rank for each in worlds] == [0, 1, 2]
        ((host, port),) = {each.address for each in worlds}
        assert host == "127.0.0.1"
        assert port in PORTS
    assert world(open_mpi(0, 3, namespace="1110900738")).port != port


UNREADABLE = {
    "RANK without WORLD_SIZE": ({"RANK": "1"}, "RANK='1' is set .* and WORLD_SIZE is not"),
    "WORLD_SIZE without RANK": ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set .* and RANK is not"),
    "an empty RANK": ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is not"),
    "a rank that is none": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: .* from 0"),
    "a word": ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK='first' in the environment: it is a whole number"),
    "a negative number": ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
    "a port that is none": (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    "a step without a task": (step(0, 2) | {"SLURM_PROCID": ""}, "SLURM_PROCID is not"),
    "PMIX without a size": (
        variables("PMIX_RANK=0 PMIX_NAMESPACE=prterun-1"),
        "PMIX_RANK='0' .* nothing says how many",
    ),
    "half of Open MPI": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
    "half of PMI": ({"PMI_SIZE": "2"}, "PMI_RANK is not"),
    "a nodelist": (step(0, 2, nodelist="bgp[000x133]"), r"SLURM_STEP_NODELIST='bgp\[000x133\]' can't be read"),
}


def test_what_contradicts_itself_is_refused_wherever_it_is_read(monkeypatch):
    for environ, message in UNREADABLE.values():
        set_only(monkeypatch, environ)
        reads = (world, pl.distributed.rank, pl.distributed.world_size, call, lambda: call("fit", "replicate"))
        for read in reads:
            with pytest.raises(pl.DistributedError, match=message):
                read()


def set_only(monkeypatch, environ):
    """Of what launchers read, these variables alone."""
    ours = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MASTER_", "TORCHELASTIC_", "GROUP_")
    for name in list(os.environ):
        if name.startswith(ours) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


DATA = [(torch.ones(4, 3), torch.ones(4, 2))]
FIT = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "loss": torch.nn.functional.mse_loss}
CALLS = {
    "fit": lambda **o: pl.fit(torch.nn.Linear(3, 2), DATA, **FIT, **o),
    "evaluate": lambda **o: pl.evaluate(torch.nn.Linear(3, 2), DATA, loss=FIT["loss"], **o),
    "predict": lambda **o: pl.predict(torch.nn.Linear(3, 2), DATA, **o),
}


def call(function="fit", parallel=None):
    return CALLS[function](parallel=parallel)


# Never n trainings where one was meant.

SEVERAL = {
    "srun": step(1, 2),
    "mpirun": open_mpi(1, 2, local=1),
    "mpiexec": mpich(1, 2),
    "torchrun": TORCHRUN,
}
APART = r"parallel=None, and this process is rank \d of \d, by .*parallel=False"


@pytest.mark.parametrize("launcher", SEVERAL)
def test_several_processes_without_parallel_are_refused_and_run_apart_on_purpose(monkeypatch, launcher):
    set_only(monkeypatch, SEVERAL[launcher])
    for function in CALLS:
        with pytest.raises(pl.ArgumentError, match=APART):
            call(function)
        assert pl.run(call(function, False)).timestamp.batch == (1 if function == "fit" else 0)


def test_several_in_a_process_group_without_parallel_are_refused():
    def program(rank):
        with pytest.raises(pl.ArgumentError, match=f"is rank {rank} of 2, by its process group"):
            call()
        return pl.run(call("fit", False)).timestamp.batch

    assert [each.result for each in simulate(program, 2)] == [1, 1]


ONE = variables("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500")
STANDALONE = variables("TORCHELASTIC_RUN_ID=none GROUP_RANK=0 GROUP_WORLD_SIZE=1")


@pytest.mark.parametrize("parallel", [None, "replicate", pl.distributed.Parallel(data="own")])
def test_several_processes_that_believe_to_be_alone_are_refused(monkeypatch, parallel):
    """Neighbours: ``WORLD_SIZE=1``, a process group of one, a standalone torchrun in each task, of one rank or more."""
    for launcher in ("srun", "mpirun", "mpiexec"):
        set_only(monkeypatch, SEVERAL[launcher] | ONE)
        alone = f"{launcher} started 2 processes, and by WORLD_SIZE=1 this one is alone"
        with pytest.raises(pl.ArgumentError, match=alone):
            call("fit", parallel)
        assert pl.run(call("fit", False)).timestamp.batch == 1
        for size in ("1", "4"):
            set_only(monkeypatch, SEVERAL[launcher] | ONE | STANDALONE | {"WORLD_SIZE": size})
            with pytest.raises(pl.ArgumentError, match=f"{launcher} started 2 times torchrun|parallel=None"):
                call("fit", parallel)
        set_only(monkeypatch, SEVERAL[launcher])
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            with pytest.raises(pl.ArgumentError, match="by its process group this one is alone"):
                call("fit", parallel)
        finally:
            dist.destroy_process_group()


def test_one_process_is_one_process(monkeypatch):
    """A script without srun in an allocation of two tasks, too."""
    for environ in ({}, BATCH, step(0, 1), open_mpi(0, 1), mpich(0, 1), ONE, BATCH | ONE | STANDALONE):
        set_only(monkeypatch, environ)
        assert (pl.distributed.rank(), pl.distributed.world_size()) == (0, 1)
        for parallel in (None, False, "replicate", "shard"):
            assert pl.run(call("fit", parallel)).timestamp.batch == 1


NOWHERE = {
    "RANK without an address": TWO,
    "a port without a host": TWO | {"MASTER_PORT": "29500"},
    "a host without a port": TWO | {"MASTER_ADDR": "127.0.0.1"},
    "mpirun on two machines": open_mpi(1, 2, local_size=1),
    "mpiexec on two machines": mpich(1, 2, local_size=1),
    "mpiexec on one": mpich(1, 2),
    "a step that says nothing of nodes": step(1, 2) | {"SLURM_STEP_NODELIST": ""},
}


@pytest.mark.parametrize("function", CALLS)
def test_where_rank_0_is_not_known_the_call_says_what_to_set(monkeypatch, function):
    for environ in NOWHERE.values():
        set_only(monkeypatch, environ)
        with pytest.raises(pl.DistributedError, match=r"MASTER_ADDR and MASTER_PORT are not set .* set MASTER_ADDR to"):
            call(function, "replicate")
        set_only(monkeypatch, environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
        call(function, "replicate")


def test_cuda_is_the_gpu_of_this_rank(monkeypatch):
    for environ, gpus, expected in (
        (step(1, 2, local=1), 2, "cuda:1"),
        (step(1, 2, local=1), 1, "cuda:0"),  # srun --gpus-per-task=1
        (open_mpi(3, 4, local=3), 4, "cuda:3"),
        (TORCHRUN, 2, "cuda:1"),
        (TORCHRUN, 1, "cuda:1"),  # no GPU for this rank: torch says so
        (step(1, 2, local=1) | TWO, 8, "cuda:1"),
    ):
        set_only(monkeypatch, environ)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        devices = ("cuda", "cpu", "cuda:5")
        assert [device_of_rank(device) for device in devices] == [expected, "cpu", "cuda:5"]
    set_only(monkeypatch, TWO)
    with pytest.raises(pl.DistributedError, match=r"set LOCAL_RANK .* device=\"cuda:0\""):
        device_of_rank("cuda")


# Lists of nodes, and ports.


def test_lists_of_nodes():
    """As ``scontrol show hostnames`` of Slurm 22.05 prints them; of a long one only the first are made."""
    spread = ["node01", "node02", "node03", "node04", "node07", "other"]
    assert list(nodes("node[01-04,07],other")) == spread
    assert list(nodes("a[9-11]")) == ["a9", "a10", "a11"]
    assert list(nodes("rack[1-2]n[08-09]")) == ["rack1n08", "rack1n09", "rack2n08", "rack2n09"]
    assert list(nodes("node[1,3],10.0.0.1")) == ["node1", "node3", "10.0.0.1"]
    assert launched(step(0, 2, nodelist="n[0-999999999999]")).host == "n0"
    for text in ("", "a,", ",a", "a[", "a]", "a[]", "a[1-]", "a[1;2]", "a[[1]]", "a[1x2]", "a[-1]"):
        with pytest.raises(pl.DistributedError, match="can't be read; it is a list such as"):
            list(nodes(text))


@given(job=st.integers(1, 2**32), later=st.integers(0, 100), steps=st.tuples(st.integers(0, 100), st.integers(0, 100)))
@examples(40, 3000)
def test_steps_of_a_job_and_neighbouring_jobs_have_ports_of_their_own(job, later, steps):
    one, other, again = (
        world(step(0, 2, job=number, number=n)).port
        for number, n in ((job, steps[0]), (job + later, steps[1]), (job, steps[0]))
    )
    assert {one, other} <= set(PORTS)
    assert one == again
    assert (one == other) == (not later and steps[0] == steps[1])
