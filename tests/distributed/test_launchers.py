"""What a launcher says of a process: read from the variables that it sets, or refused.

The variables are those that Slurm 22.05, Open MPI 4.1 and MPICH 4.0 set, printed by a script under ``srun``,
``sbatch``, ``salloc``, ``srun --pty`` and ``srun --mpi=pmi2``, and by ``mpirun`` and ``mpiexec``, also in a Slurm job.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop._internal.processes import World, launched, nodes, world
from pure_loop.distributed.engines import device_of_rank
from pure_loop.testing.ranks import simulate

PORTS = range(20000, 32000)

# fmt: off
BATCH = {
    "SLURM_JOB_ID": "2", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_NODELIST": "node[01-02]", "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0",
}


def step(rank, size, *, nodelist="node[01-02]", local=0, job=2, number=0):
    return BATCH | {
        "SLURM_NTASKS": str(size), "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(number),
        "SLURM_STEP_NUM_TASKS": str(size), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local),
        "SLURM_STEP_NODELIST": nodelist,
    }
# fmt: on


def open_mpi(rank, size, *, local=0, local_size=None, namespace="1110900737"):
    result = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_RANK": local}
    result |= {"OMPI_COMM_WORLD_LOCAL_SIZE": size if local_size is None else local_size, "PMIX_RANK": rank}
    return {name: str(value) for name, value in result.items()} | {"PMIX_NAMESPACE": namespace}


def mpich(rank, size, local=0, local_size=None):
    result = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local, "PMI_FD": 5}
    result["MPI_LOCALNRANKS"] = size if local_size is None else local_size
    return {name: str(value) for name, value in result.items()}


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}

READ = {
    "nothing": ({}, World()),
    "a batch script": (BATCH, World()),
    "salloc": ({name: BATCH[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NODELIST")}, World()),
    "a step": (
        step(1, 2),
        World(launcher="srun", rank=1, size=2, local_rank=0, host="node01", port=20000 + 2 * 101),
    ),
    "a step on one node": (
        step(1, 2, nodelist="node07", local=1, number=3),
        World(launcher="srun", rank=1, size=2, local_rank=1, host="127.0.0.1", port=20000 + 2 * 101 + 3),
    ),
    "a step of one task": (
        step(0, 1, nodelist="node07"),
        World(launcher="srun", rank=0, size=1, local_rank=0, host="127.0.0.1", port=20202),
    ),
    "a step with PMI": (
        step(1, 2) | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "2.0"},
        World(launcher="srun", rank=1, size=2, local_rank=0, host="node01", port=20202),
    ),
    "torchrun": (
        TORCHRUN,
        World(launcher="RANK and WORLD_SIZE", rank=3, size=4, local_rank=1, host="head", port=29500),
    ),
    "torchrun in a step": (
        step(0, 2) | TORCHRUN,
        World(launcher="RANK and WORLD_SIZE", rank=3, size=4, local_rank=1, host="head", port=29500),
    ),
    "RANK of a step's task": (
        step(1, 2, local=1) | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "1234"},
        World(launcher="RANK and WORLD_SIZE", rank=1, size=2, local_rank=1, host="head", port=1234),
    ),
    "a step with another address": (
        step(1, 2) | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
        World(launcher="srun", rank=1, size=2, local_rank=0, host="10.0.0.1", port=1234),
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
    "a template's WORLD_SIZE": ({"WORLD_SIZE": "1"}, World(launcher="")),
    "RANK alone of one": ({"RANK": "0", "WORLD_SIZE": "1"}, World(launcher="RANK and WORLD_SIZE")),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_launcher_sets_is_read(name):
    environ, expected = READ[name]
    assert world(environ) == expected


@pytest.mark.parametrize("environ", [open_mpi, lambda rank, size, **o: open_mpi(rank, size) | BATCH])
def test_processes_of_one_mpirun_on_one_machine_meet_there_and_those_of_another_elsewhere(environ):
    worlds = [world(environ(rank, 3)) for rank in range(3)]
    assert [each.rank for each in worlds] == [0, 1, 2]
    ((host, port),) = {each.address for each in worlds}
    assert host == "127.0.0.1"
    assert port in PORTS
    assert world(open_mpi(0, 3, namespace="1110900738")).port != world(open_mpi(0, 3)).port


UNREADABLE = {
    "RANK without WORLD_SIZE": ({"RANK": "1"}, "RANK='1' is set .* and WORLD_SIZE is not"),
    "WORLD_SIZE without RANK": ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set .* and RANK is not"),
    "an empty RANK": ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is not"),
    "a rank that is none": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: .* from 0"),
    "a word": ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK='first' in the environment: it is a whole number"),
    "a negative number": ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
    "a port that is none": (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    "a step without a task": (step(0, 2) | {"SLURM_PROCID": ""}, "SLURM_PROCID is not"),
    "a task of another step": (step(5, 2), "SLURM_PROCID=5 with SLURM_STEP_NUM_TASKS=2"),
    "PMIX without a size": (
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"},
        "PMIX_RANK='0' .* nothing says how many",
    ),
    "half of Open MPI": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
    "half of PMI": ({"PMI_SIZE": "2"}, "PMI_RANK is not"),
    "a nodelist": (step(0, 2, nodelist="bgp[000x133]"), r"SLURM_STEP_NODELIST='bgp\[000x133\]' can't be read"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_contradicts_itself_is_refused_wherever_it_is_read(name, monkeypatch):
    environ, message = UNREADABLE[name]
    with pytest.raises(pl.DistributedError, match=message):
        world(environ)
    set_only(monkeypatch, environ)
    for read in (pl.distributed.rank, pl.distributed.world_size, lambda: call("fit"), lambda: call("fit", "replicate")):
        with pytest.raises(pl.DistributedError, match=message):
            read()


def set_only(monkeypatch, environ):
    """Of what launchers read, these variables alone."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MASTER_", "TORCHELASTIC_", "GROUP_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


DATA = [(torch.ones(4, 3), torch.ones(4, 2))]
CALLS = {
    "fit": lambda **o: pl.fit(torch.nn.Linear(3, 2), DATA, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep", **o),
    "evaluate": lambda **o: pl.evaluate(torch.nn.Linear(3, 2), DATA, **o),
    "predict": lambda **o: pl.predict(torch.nn.Linear(3, 2), DATA, **o),
}


def call(function, parallel=None):
    options = {} if function == "predict" else {"loss": torch.nn.functional.mse_loss}
    return CALLS[function](parallel=parallel, **options)


# Never n trainings where one was meant.

SEVERAL = {
    "srun": step(1, 2),
    "srun, one node": step(1, 2, nodelist="node01", local=1),
    "mpirun": open_mpi(1, 2, local=1),
    "mpiexec": mpich(1, 2),
    "torchrun": TORCHRUN,
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("launcher", SEVERAL)
def test_several_processes_without_parallel_are_refused_and_run_apart_on_purpose(monkeypatch, launcher, function):
    """Neighbours: every launcher, every function; a process group of several; each computes alone with False."""
    set_only(monkeypatch, SEVERAL[launcher])
    with pytest.raises(
        pl.ArgumentError, match=r"parallel=None, and this process is rank \d of \d, by .*parallel=False"
    ):
        call(function)
    assert pl.run(call(function, False)).timestamp.batch == (1 if function == "fit" else 0)


def test_several_in_a_process_group_without_parallel_are_refused():
    def program(rank):
        with pytest.raises(pl.ArgumentError, match=f"is rank {rank} of 2, by its process group"):
            call("fit")
        return pl.run(call("fit", False)).timestamp.batch

    assert [each.result for each in simulate(program, 2)] == [1, 1]


ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
STANDALONE = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize("parallel", [None, "replicate", "shard", pl.distributed.Parallel(data="own")])
@pytest.mark.parametrize("launcher", ["srun", "mpirun", "mpiexec"])
def test_several_processes_that_believe_to_be_alone_are_refused(monkeypatch, launcher, parallel):
    """Neighbours: ``WORLD_SIZE=1``, a process group of one, a standalone torchrun in each task, of one rank or more."""
    set_only(monkeypatch, SEVERAL[launcher] | ONE)
    with pytest.raises(
        pl.ArgumentError, match=f"{launcher} started 2 processes, and by WORLD_SIZE=1 this one is alone"
    ):
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


@pytest.mark.parametrize("environ", [{}, BATCH, step(0, 1), open_mpi(0, 1), mpich(0, 1), ONE, BATCH | ONE | STANDALONE])
@pytest.mark.parametrize("parallel", [None, False, "replicate", "shard"])
def test_one_process_is_one_process(monkeypatch, environ, parallel):
    """A script without srun in an allocation of two tasks, too."""
    set_only(monkeypatch, environ)
    assert (pl.distributed.rank(), pl.distributed.world_size()) == (0, 1)
    assert pl.run(call("fit", parallel)).timestamp.batch == 1


NOWHERE = {
    "RANK without an address": {"RANK": "1", "WORLD_SIZE": "2"},
    "a port without a host": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"},
    "a host without a port": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    "mpirun on two machines": open_mpi(1, 2, local_size=1),
    "mpiexec on two machines": mpich(1, 2, local_size=1),
    "mpiexec on one": mpich(1, 2),
    "a step that says nothing of nodes": step(1, 2) | {"SLURM_STEP_NODELIST": ""},
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("where", NOWHERE)
def test_where_rank_0_is_not_known_the_call_says_what_to_set(monkeypatch, where, function):
    set_only(monkeypatch, NOWHERE[where])
    with pytest.raises(pl.DistributedError, match=r"MASTER_ADDR and MASTER_PORT are not set .* set MASTER_ADDR to"):
        call(function, "replicate")
    set_only(monkeypatch, NOWHERE[where] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    call(function, "replicate")


def test_parallel_true_is_no_choice():
    with pytest.raises(pl.ArgumentTypeError, match=r'parallel=True .* "replicate".*False'):
        call("fit", True)


# Devices.


@pytest.mark.parametrize(
    ("environ", "gpus", "expected"),
    [
        (step(1, 2, local=1), 2, "cuda:1"),
        (step(1, 2, local=1), 1, "cuda:0"),  # srun --gpus-per-task=1
        (open_mpi(3, 4, local=3), 4, "cuda:3"),
        (TORCHRUN, 2, "cuda:1"),
        (TORCHRUN, 1, "cuda:1"),  # no GPU for this rank: torch says so
        (step(1, 2, local=1) | {"RANK": "1", "WORLD_SIZE": "2"}, 8, "cuda:1"),
    ],
)
def test_cuda_is_the_gpu_of_this_rank(monkeypatch, environ, gpus, expected):
    set_only(monkeypatch, environ)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert device_of_rank("cuda") == expected
    assert device_of_rank("cpu") == "cpu"
    assert device_of_rank("cuda:5") == "cuda:5"


def test_without_a_local_rank_two_ranks_do_not_share_a_gpu(monkeypatch):
    set_only(monkeypatch, {"RANK": "1", "WORLD_SIZE": "2"})
    with pytest.raises(pl.DistributedError, match=r"set LOCAL_RANK .* device=\"cuda:0\""):
        device_of_rank("cuda")


# Lists of nodes, and ports.


def compressed(names):
    """A list of nodes as Slurm writes it: neighbours of one prefix and one width as ranges."""

    def split(name):
        head = name.rstrip("0123456789")
        return head, len(name) - len(head)

    parts = []
    for (head, width), group in itertools.groupby(names, split):
        if not width:
            parts.extend(group)
            continue
        runs = []
        for number in (name[len(head) :] for name in group):
            if runs and int(number) == int(runs[-1][-1]) + 1 and len(number) == len(runs[-1][-1]):
                runs[-1].append(number)
            else:
                runs.append([number])
        texts = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
        one = len(texts) == 1 and "-" not in texts[0]
        parts.append(head + (texts[0] if one else f"[{','.join(texts)}]"))
    return ",".join(parts)


HEADS = st.from_regex(r"[a-z][a-z0-9.-]{0,3}[a-z]", fullmatch=True)
RUNS = st.builds(
    lambda head, first, count, width: [f"{head}{number:0{width}d}" for number in range(first, first + count)],
    HEADS,
    st.integers(0, 1200),
    st.integers(1, 12),
    st.integers(1, 4),
)
NAMES = st.lists(RUNS | HEADS.map(lambda head: [head]), min_size=1, max_size=6).map(
    lambda runs: [*itertools.chain(*runs)]
)


@given(NAMES)
@example(["node01", "node02", "node03", "node04", "node07", "other"])
@example(["node9", "node10"])
def test_a_compressed_list_of_nodes_is_what_was_compressed(names):
    assert list(nodes(compressed(names))) == names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node[01-04,07],other", ["node01", "node02", "node03", "node04", "node07", "other"]),
        ("vm", ["vm"]),
        ("rack[1-2]n[08-09]", ["rack1n08", "rack1n09", "rack2n08", "rack2n09"]),
        ("node[1,3],10.0.0.1", ["node1", "node3", "10.0.0.1"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
    ],
)
def test_lists_of_nodes(text, expected):
    """As ``scontrol show hostnames`` of Slurm 22.05 prints them."""
    assert list(nodes(text)) == expected


@pytest.mark.parametrize("text", ["", "a,", ",a", "a[", "a]", "a[]", "a[1-]", "a[1;2]", "a[[1]]", "a[1x2]", "a[-1]"])
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(pl.DistributedError, match="can't be read; it is a list such as"):
        list(nodes(text))


def test_of_a_long_list_only_the_first_nodes_are_made():
    assert launched(step(0, 2, nodelist="n[0-999999999999]")).host == "n0"


@given(job=st.integers(1, 2**32), first=st.integers(0, 1000), more=st.integers(1, 1000))
def test_steps_of_one_job_have_ports_of_their_own(job, first, more):
    ports = [world(step(0, 2, job=job, number=number)).port for number in (first, first + more, first)]
    assert set(ports) <= set(PORTS)
    assert ports[0] == ports[2] != ports[1]


@given(job=st.integers(1, 2**32), later=st.integers(1, 100), steps=st.tuples(st.integers(0, 100), st.integers(0, 100)))
def test_neighbouring_jobs_have_ports_of_their_own(job, later, steps):
    one, other = (
        world(step(0, 2, job=number, number=n)).port for number, n in zip((job, job + later), steps, strict=True)
    )
    assert one != other
