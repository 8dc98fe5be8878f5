"""What a launcher says of a process: read from the variables that it sets, or refused.

The variables are those that Slurm 22.05, Open MPI 4.1 and MPICH 4.0 set, printed by a script under ``srun``,
``sbatch``, ``salloc``, ``srun --pty`` and ``srun --mpi=pmi2``, and by ``mpirun`` and ``mpiexec``, also in a Slurm job.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop._internal.processes import World, launched, nodes, world
from pure_loop.distributed.engines import device_of_rank
from pure_loop.testing.ranks import simulate
from tests.support.problem import cross_entropy, fit, mlp, points
from tests.support.streams import assert_same
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


def named(prefix, rank, size):
    return variables(f"{prefix}RANK={rank} {prefix}SIZE={size} {prefix}LOCAL_RANK={rank} {prefix}LOCAL_SIZE={size}")


def of(launcher, rank, size, local=0, host=None, port=None):
    return World(launcher=launcher, rank=rank, size=size, local_rank=local, host=host, port=port)


TORCHRUN = variables("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=head MASTER_PORT=29500")
BY_RANK = "RANK and WORLD_SIZE"
OF_TORCHRUN = of(BY_RANK, 3, 4, 1, "head", 29500)
OF_STEP = of("srun", 1, 2, 0, "node01", 20202)
TWO = variables("RANK=1 WORLD_SIZE=2")
OF_RAY = {"RAY_RAYLET_PID": str(os.getppid())}
THERE = variables("MASTER_ADDR=10.0.0.1 MASTER_PORT=1234")
HERE = "127.0.0.1"
READ = [
    ({}, World()),
    (BATCH, World()),
    (variables("SLURM_JOB_ID=2 SLURM_NTASKS=2 SLURM_NODELIST=node[01-02]"), World()),
    (step(1, 2), OF_STEP),
    (step(1, 2, nodelist="node07", local=1, number=3), of("srun", 1, 2, 1, HERE, 20205)),
    (step(0, 1, nodelist="node07"), of("srun", 0, 1, 0, HERE, 20202)),
    (step(1, 2) | variables("PMI_RANK=1 PMI_SIZE=2 PMI_JOBID=2.0"), OF_STEP),
    (step(1, 2) | THERE, of("srun", 1, 2, 0, "10.0.0.1", 1234)),
    (TORCHRUN, OF_TORCHRUN),
    (step(0, 2) | TORCHRUN, OF_TORCHRUN),
    (step(1, 2, local=1) | TWO | THERE, of(BY_RANK, 1, 2, 1, "10.0.0.1", 1234)),
    (mpich(2, 4, local=0, local_size=2), of("mpiexec", 2, 4)),
    (named("MV2_COMM_WORLD_", 1, 4), of("MVAPICH2", 1, 4, 1)),
    (named("HOROVOD_", 1, 4) | THERE, of("horovodrun", 1, 4, 1, "10.0.0.1", 1234)),
    # A worker of Ray, which was started in a step: Ray says which it is, by RANK or not at all.
    (step(1, 2) | named("HOROVOD_", 1, 2) | {"PMIX_RANK": "1"} | OF_RAY, World()),
    (step(0, 1) | TORCHRUN | OF_RAY, OF_TORCHRUN),
    (step(1, 2) | {"RAY_RAYLET_PID": str(os.getpid())}, OF_STEP),  # started by srun in such a worker
    # Open MPI and MPICH start one process of their own on each node through srun.
    (step(1, 2) | open_mpi(3, 4, local=1, local_size=2), of("mpirun", 3, 4, 1)),
    ({"WORLD_SIZE": "1"}, World()),  # of a template
    ({"RANK": "0", "WORLD_SIZE": "1"}, World(launcher=BY_RANK)),
]


def test_what_a_launcher_sets_is_read():
    """Processes of one mpirun on one machine meet there, and those of another one elsewhere."""
    assert [world(environ) for environ, _ in READ] == [wanted for _, wanted in READ]
    for more in ({}, BATCH):
        worlds = [world(open_mpi(rank, 3) | more) for rank in range(3)]
        assert [each.rank for each in worlds] == [0, 1, 2]
        ((host, port),) = {each.address for each in worlds}
        assert host == HERE
        assert port in PORTS
    assert world(open_mpi(0, 3, namespace="1110900738")).port != port


def set_only(monkeypatch, environ):
    """Of what launchers read, these variables alone."""
    ours = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "HOROVOD_", "PALS_")
    ours += ("MASTER_", "TORCHELASTIC_", "GROUP_", "PET_", "RAY_", "LOCAL_")
    for name in list(os.environ):
        if name.startswith(ours) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


CALLS = {
    "fit": lambda parallel=None: fit(parallel=parallel, max_duration="1ba"),
    "evaluate": lambda parallel: pl.evaluate(mlp(), points(1), loss=cross_entropy, parallel=parallel),
    "predict": lambda parallel: pl.predict(mlp(), points(1), parallel=parallel),
}
UNREADABLE = [
    ({"RANK": "1"}, "RANK='1' is set .* and WORLD_SIZE is not"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set .* and RANK is not"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: .* from 0"),
    ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK='first' in the environment: it is a whole number"),
    (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    (step(0, 2) | {"SLURM_PROCID": ""}, "SLURM_PROCID is not"),
    (variables("PMIX_RANK=0 PMIX_NAMESPACE=prterun-1"), "PMIX_RANK='0' .* nothing says how many"),
    ({"PALS_RANKID": "1"}, "PALS_RANKID='1' .* nothing says how many"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
    ({"PMI_SIZE": "2"}, "PMI_RANK is not"),
    (step(0, 2, nodelist="bgp[000x133]"), r"SLURM_STEP_NODELIST='bgp\[000x133\]' can't be read"),
]


def test_what_contradicts_itself_is_refused_wherever_it_is_read(monkeypatch):
    for environ, message in UNREADABLE:
        set_only(monkeypatch, environ)
        reads = (pl.distributed.rank, pl.distributed.world_size, CALLS["fit"], lambda: CALLS["fit"]("replicate"))
        for read in (world, *reads):
            with pytest.raises(pl.errors.DistributedError, match=message):
                read()


# Never n trainings where one was meant.

SEVERAL = {
    "srun": step(1, 2),
    "mpirun": open_mpi(1, 2, local=1),
    "mpiexec": mpich(1, 2),
    "MVAPICH2": named("MV2_COMM_WORLD_", 1, 2),
    "horovodrun": named("HOROVOD_", 1, 2),
}
ONE = variables("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500")
STANDALONE = variables("TORCHELASTIC_RUN_ID=none GROUP_RANK=0 GROUP_WORLD_SIZE=1")
APART = r"parallel=None, and this process is rank \d of \d, by .*parallel=False"


def test_several_processes_without_parallel_are_refused_and_run_apart_on_purpose(monkeypatch):
    for environ in (*SEVERAL.values(), TORCHRUN):
        set_only(monkeypatch, environ)
        for name, call in CALLS.items():
            with pytest.raises(pl.errors.ArgumentError, match=APART):
                call(None)
            assert pl.run(call(False)).timestamp.batch == (name == "fit")

    def program(rank):
        with pytest.raises(pl.errors.ArgumentError, match=f"is rank {rank} of 2, by its process group"):
            fit()
        return pl.run(CALLS["fit"](False)).timestamp.batch

    assert [each.result for each in simulate(program, 2)] == [1, 1]


def test_several_processes_that_believe_to_be_alone_are_refused(monkeypatch):
    """By ``WORLD_SIZE=1``, a process group of one, a standalone torchrun in each task, of one rank or more."""

    def refused(says):
        for parallel in (None, "replicate", pl.distributed.Parallel(data="own")):
            with pytest.raises(pl.errors.ArgumentError, match=says):
                fit(parallel=parallel)

    for launcher, environ in SEVERAL.items():
        set_only(monkeypatch, environ | ONE)
        refused(f"{launcher} started 2 processes, and by WORLD_SIZE=1 this one is alone")
        assert pl.run(CALLS["fit"](False)).timestamp.batch == 1
        for size in ("1", "4"):
            set_only(monkeypatch, environ | ONE | STANDALONE | {"WORLD_SIZE": size})
            refused(f"{launcher} started 2 processes, and torchrun started this one, and knows of no|parallel=None")
        set_only(monkeypatch, environ)
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            refused("by its process group this one is alone")
        finally:
            dist.destroy_process_group()


# Of a process that believes to be alone: where it is one of several, what says so, and what to do.
ALONE = [
    # A script under torchrun whose RANK and WORLD_SIZE something has taken away, or set anew.
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 says .* without RANK and WORLD_SIZE this one is alone"),
    (ONE | {"LOCAL_RANK": "1"}, "LOCAL_RANK=1 says .* by WORLD_SIZE=1 this one is alone"),
    ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 says .* Leave RANK and WORLD_SIZE as"),
    (ONE | {"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 says"),
    (ONE | STANDALONE | {"GROUP_WORLD_SIZE": "2"}, "GROUP_WORLD_SIZE=2 says"),
    # A Pod of Kubeflow that starts the script without torchrun.
    (
        variables("PET_NNODES=2 PET_NODE_RANK=0 PET_MASTER_ADDR=head"),
        "PET_NNODES=2 .* on 2 machines.* torchrun train",
    ),
    (variables("PET_NNODES=2:4 PET_RDZV_ENDPOINT=head"), "PET_NNODES=2:4 .* on 2 machines"),
    # And one that starts it with a torchrun that is to know of no other Pod.
    (ONE | STANDALONE | {"PET_NNODES": "2"}, "PET_NNODES=2 .* torchrun started this one, and knows of no other"),
    (ONE | STANDALONE | {"PET_NNODES": "2", "WORLD_SIZE": "4"}, "PET_NNODES=2 .* torchrun started this|parallel=None"),
]


@pytest.mark.parametrize(("environ", "says"), ALONE)
def test_what_says_that_there_are_others_is_believed(monkeypatch, environ, says):
    set_only(monkeypatch, environ)
    for call in CALLS.values():
        for parallel in (None, "replicate", "shard"):
            with pytest.raises(pl.errors.ArgumentError, match=says):
                call(parallel)
        pl.run(call(False))


def test_a_process_group_of_one_on_each_rank_is_refused(monkeypatch):
    """Under torchrun, too."""
    for environ in (TORCHRUN, TWO, variables("PET_NNODES=2")):
        set_only(monkeypatch, environ)
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            for parallel in (None, "replicate"):
                with pytest.raises(pl.errors.ArgumentError, match=r"_SIZE|PET_NNODES.* by its process group this one"):
                    CALLS["fit"](parallel)
        finally:
            dist.destroy_process_group()


class Workers:
    """ray.train, in one of several workers, or in what is none."""

    def __init__(self, size):
        self.size = size

    def get_context(self):
        if not self.size:
            raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")
        return self

    def get_world_size(self):
        return self.size


def test_workers_of_ray_without_a_process_group_are_refused(monkeypatch):
    """As those of a DataParallelTrainer are."""
    set_only(monkeypatch, OF_RAY)
    monkeypatch.setitem(sys.modules, "ray.train", Workers(2))
    with pytest.raises(pl.errors.ArgumentError, match=r"Ray Train started 2 workers.*ray.train.torch.TorchTrainer"):
        CALLS["fit"]("replicate")
    for size in (0, 1):
        monkeypatch.setitem(sys.modules, "ray.train", Workers(size))
        assert pl.run(CALLS["fit"](None)).timestamp.batch == 1


def test_one_process_is_one_process(monkeypatch):
    """A script without srun in an allocation of two tasks, too."""
    single = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torchrun = ONE | STANDALONE | single
    launchers = (step(0, 1), open_mpi(0, 1), mpich(0, 1), ONE, torchrun, BATCH | torchrun)
    # One Pod, or as many as there are; and a worker of Ray in a step.
    others = (single, {"PET_NNODES": "1"}, torchrun | {"PET_NNODES": "1:4"}, step(1, 2) | OF_RAY)
    for environ in ({}, BATCH, *launchers, *others):
        set_only(monkeypatch, environ)
        assert (pl.distributed.rank(), pl.distributed.world_size()) == (0, 1)
        for parallel in (False, "replicate", "shard"):
            assert_same(pl.run(CALLS["fit"](parallel)), pl.run(CALLS["fit"](None)), str(parallel))
    assert not dist.is_initialized()


NOWHERE = [
    *(TWO, TWO | {"MASTER_PORT": "29500"}, TWO | {"MASTER_ADDR": HERE}),
    # On two machines, and on one; and a step that says nothing of nodes.
    *(open_mpi(1, 2, local_size=1), mpich(1, 2, local_size=1), mpich(1, 2)),
    step(1, 2) | {"SLURM_STEP_NODELIST": ""},
]


def test_where_rank_0_is_not_known_the_call_says_what_to_set(monkeypatch):
    for environ in NOWHERE:
        for call in CALLS.values():
            set_only(monkeypatch, environ)
            with pytest.raises(
                pl.errors.DistributedError, match=r"MASTER_ADDR and MASTER_PORT are not set .* set MASTER_ADDR to"
            ):
                call("replicate")
            set_only(monkeypatch, environ | THERE)
            call("replicate")


def test_cuda_is_the_gpu_of_this_rank(monkeypatch):
    for environ, gpus, expected in (
        (step(1, 2, local=1), 2, "cuda:1"),
        (step(1, 2, local=1), 1, "cuda:0"),  # srun --gpus-per-task=1
        (open_mpi(3, 4, local=3), 4, "cuda:3"),
        (TORCHRUN, 1, "cuda:1"),  # no GPU for this rank, as torch says
        (step(1, 2, local=1) | TWO, 8, "cuda:1"),
    ):
        set_only(monkeypatch, environ)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert [device_of_rank(device) for device in ("cuda", "cpu", "cuda:5")] == [expected, "cpu", "cuda:5"]
    set_only(monkeypatch, TWO)
    with pytest.raises(pl.errors.DistributedError, match=r"set LOCAL_RANK .* device=\"cuda:0\""):
        device_of_rank("cuda")


def test_lists_of_nodes():
    """As ``scontrol show hostnames`` of Slurm 22.05 prints them; of a long one only the first are made."""
    assert " ".join(nodes("node[01-04,07],other")) == "node01 node02 node03 node04 node07 other"
    assert " ".join(nodes("rack[1-2]n[8-10],10.0.0.1")) == "rack1n8 rack1n9 rack1n10 rack2n8 rack2n9 rack2n10 10.0.0.1"
    assert launched(step(0, 2, nodelist="n[0-999999999999]")).host == "n0"
    for text in ("", "a,", ",a", "a[", "a]", "a[]", "a[1-]", "a[1;2]", "a[[1]]", "a[1x2]", "a[-1]"):
        with pytest.raises(pl.errors.DistributedError, match="can't be read; it is a list such as"):
            list(nodes(text))


@given(job=st.integers(1, 2**32), later=st.integers(0, 100), steps=st.tuples(st.integers(0, 100), st.integers(0, 100)))
@examples(40, 3000)
def test_steps_of_a_job_and_neighbouring_jobs_have_ports_of_their_own(job, later, steps):
    numbers = ((job, steps[0]), (job + later, steps[1]), (job, steps[0]))
    one, other, again = (world(step(0, 2, job=each, number=n)).port for each, n in numbers)
    assert {one, other} <= set(PORTS)
    assert one == again
    assert (one == other) == (not later and steps[0] == steps[1])
