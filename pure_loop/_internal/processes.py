"""This process among those that train together: its rank, and what a launcher says of it in the environment.

``torchrun`` sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``; set by hand, these
override every other launcher. ``srun`` sets the variables of a step, ``mpirun`` those of Open MPI or PMI. Those
of a Slurm job (``SLURM_NTASKS``, ``SLURM_PROCID``) say nothing: a batch script has them too, and is one process.

A child that this process forks has the objects of its parent, and neither its threads nor its place: what a stream
began in the parent is the parent's to end, and the child writes nothing, and waits for no thread.
"""

from __future__ import annotations

import os
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec
from weakref import WeakMethod

import attrs

from pure_loop.errors import DistributedError

_SET_ADDRESS = (
    "set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port there, on all ranks (mpirun -x MASTER_ADDR "
    "-x MASTER_PORT; mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500), or start the ranks with torchrun"
)
# Below the ports that Linux gives to connections by itself, 32768 and above.
_PORTS = range(20000, 32000)
# Steps of consecutive jobs have other ports, unless a job has more steps than this.
_STEPS = 101

# Of launchers of MPI: the variables of rank, size, rank on this node and size on this node, by those that set them, and
# of what is shared by the processes of one call, and by no others.
_OF_MPI = {
    "mpirun": (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    ),
    "mpiexec": (
        ("PMI_RANK", "PMI_SIZE"),
        (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
        ("PMI_JOBID", "PMIX_NAMESPACE"),
    ),
    "MVAPICH2": (
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        (("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),),
        (),
    ),
    "horovodrun": (("HOROVOD_RANK", "HOROVOD_SIZE"), (("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),), ()),
}
# What launchers set beside the number of processes, and alone where that is not known.
_NO_SIZE = ("PMIX_RANK", "PALS_RANKID")


@attrs.frozen(kw_only=True)
class World:
    """This process among those that were started with it.

    Attributes:
        launcher: what started them; empty where nothing says that there are others.
        rank: of this process.
        size: how many processes.
        local_rank: this process among those on its machine; None: not known.
        host: where rank 0 is; None: not known.
        port: at which rank 0 can be reached; None: not known.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    host: str | None = None
    port: int | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where rank 0 is.

        Raises:
            DistributedError: it isn't known.
        """
        if self.host is None or self.port is None:
            raise DistributedError(
                f"MASTER_ADDR and MASTER_PORT are not set in the environment, and {self.launcher or 'nothing else'} "
                f"doesn't say where rank 0 of {self.size} is: {_SET_ADDRESS}."
            )
        return self.host, self.port


def world(environ: Mapping[str, str] = os.environ) -> World:
    """What ``RANK`` and ``WORLD_SIZE`` say, or else another launcher.

    Raises:
        DistributedError: the variables contradict each other, or one of them is missing.

    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[03-04]"}
    >>> world(step | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"})
    World(launcher='srun', rank=1, size=2, local_rank=0, host='node03', port=20707)
    """
    result = _named(environ, "RANK and WORLD_SIZE", ("RANK", "WORLD_SIZE"))
    if result is None:
        result = launched(environ)
        alone = next((name for name in _NO_SIZE if environ.get(name)), None)
        if not (result.launcher or alone is None or _is_of_ray(environ)):
            raise DistributedError(
                f"{alone}={environ[alone]!r} says that a launcher started this process, and nothing says how many: set "
                "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start the ranks with torchrun."
            )
        local = result.local_rank
    else:
        # Where RANK is that of a step's task, so is its place on the machine.
        step = launched(environ) if "LOCAL_RANK" not in environ else World()
        local = step.local_rank if (step.rank, step.size) == (result.rank, result.size) else None
    host, port = environ.get("MASTER_ADDR") or result.host, result.port
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT")
    if environ.get("LOCAL_RANK"):
        local = _number(environ, "LOCAL_RANK")
    return attrs.evolve(result, local_rank=local, host=host, port=port)


def rank() -> int:
    """The rank of this process: in the process group, else as its launcher says (``torchrun``, ``srun``, ``mpirun``).

    Raises:
        DistributedError: what the launcher says can't be read.

    >>> rank()
    0
    """
    dist = torch_distributed()
    return world().rank if dist is None else int(dist.get_rank())


def world_size() -> int:
    """The number of ranks: of the process group, else as the launcher says (``torchrun``, ``srun``, ``mpirun``), or 1.

    Raises:
        DistributedError: what the launcher says can't be read.

    >>> world_size()
    1
    """
    dist = torch_distributed()
    return world().size if dist is None else int(dist.get_world_size())


# The stream that computes with ranks that have the same data, while it is open, and which data this rank has in it.
_computing: list[tuple[object, int]] = []


def compute_on_data_rank(stream: object, number: int | None) -> None:
    """What :func:`data_rank` gives until the stream calls this with None."""
    _computing[:] = [item for item in _computing if item[0] is not stream]
    if number is not None:
        _computing.append((stream, number))


def data_rank() -> int:
    """The number of this rank's data: part of every seed that must differ between ranks with other samples.

    It is :func:`rank`, except under ``Parallel(parallelize=...)``, where ranks that compute one model together have one
    number.

    >>> data_rank()
    0
    """
    return _computing[-1][1] if _computing else rank()


def whereabouts(ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, int | None]:
    """Which machine this is, and which of its processes, of a run with so many ranks; None: no launcher says so."""
    if ranks == 1:
        return {"local_rank": 0, "local_world_size": 1, "node_rank": 0}
    says = {"local_world_size": ("LOCAL_WORLD_SIZE",), "node_rank": ("GROUP_RANK", "SLURM_NODEID")}
    result = {name: [_number(environ, key) for key in keys if environ.get(key)] for name, keys in says.items()}
    return {"local_rank": world(environ).local_rank} | {name: next(iter(found), None) for name, found in result.items()}


def torch_distributed() -> types.ModuleType | None:
    """torch.distributed, if there is a default process group; it is imported wherever one exists."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def launched(environ: Mapping[str, str] = os.environ) -> World:
    """What ``srun``, ``mpirun`` or ``mpiexec`` say, whatever ``RANK`` and ``WORLD_SIZE`` do.

    Raises:
        DistributedError: the variables contradict each other, or one of them is missing.
    """
    if _is_of_ray(environ):
        return World()
    step = _step(environ)
    for launcher, (names, of_node, shared) in _OF_MPI.items():
        result = _named(environ, launcher, names)
        if result is None:
            continue
        if step is not None and (step.rank, step.size) == (result.rank, result.size):
            return step  # started by srun --mpi=..., which knows where the others are
        for rank, size in of_node:
            if environ.get(rank) and environ.get(size):
                key = next((environ[name] for name in shared if environ.get(name)), None)
                here = _number(environ, size) == result.size and key is not None
                return attrs.evolve(
                    result,
                    local_rank=_number(environ, rank),
                    host="127.0.0.1" if here else None,
                    port=_PORTS[zlib.crc32(key.encode()) % len(_PORTS)] if here and key is not None else None,
                )
        return result
    return step or World()


def _is_of_ray(environ: Mapping[str, str]) -> bool:
    """Whether this is a worker of Ray: what Slurm or MPI have set is of what started Ray on this machine."""
    return environ.get("RAY_RAYLET_PID") == str(os.getppid())


def machines(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """What says that others were started as this was, with ``torchrun`` or without: that, and what is to be done."""
    launch = launched(environ)
    if launch.size > 1:
        yield (
            f"{launch.launcher} started {launch.size} processes",
            f"Unset RANK and WORLD_SIZE, and create no process group: ranks meet by what {launch.launcher} sets",
        )
    least = environ.get("PET_NNODES", "").partition(":")[0]  # of torchrun: a number, or from:to
    if least.isdecimal() and int(least) > 1:
        yield (
            f"PET_NNODES={environ['PET_NNODES']} says that torchrun is to be started on {least} machines",
            "Start the script by torchrun train.py, which reads the variables PET_*",
        )


def others(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """What says that this process is one of several, and what is to be done where it believes to be alone.

    >>> [says for says, _ in others({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "3"})]
    ['LOCAL_RANK=3 says that there are more processes']
    """
    yield from machines(environ)
    for name, most in (("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1), ("GROUP_WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
        if environ.get(name) and _number(environ, name) > most:
            yield (
                f"{name}={environ[name]} says that there are more processes",
                "Leave RANK and WORLD_SIZE as the launcher sets them, and create no process group of one rank",
            )
    workers = _workers_of_ray()
    if workers > 1:
        yield (
            f"Ray Train started {workers} workers",
            "Start them with ray.train.torch.TorchTrainer, which makes a process group of them",
        )


def _workers_of_ray() -> int:
    train = sys.modules.get("ray.train")
    try:
        return 1 if train is None else int(train.get_context().get_world_size())
    except RuntimeError:
        return 1  # no worker of a trainer: the script that starts them, a task, a trial


def _step(environ: Mapping[str, str]) -> World | None:
    """The task of a Slurm step; None in a batch script, and elsewhere."""
    if not environ.get("SLURM_STEP_NUM_TASKS"):
        return None
    result = _named(environ, "srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    assert result is not None
    local = _number(environ, "SLURM_LOCALID") if environ.get("SLURM_LOCALID") else None
    host = port = None
    if environ.get("SLURM_STEP_NODELIST"):
        listed = nodes(environ["SLURM_STEP_NODELIST"])
        host = next(listed)
        if next(listed, None) is None:
            host = "127.0.0.1"  # whether or not the name of the machine can be resolved on it
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID"):
        number = _number(environ, "SLURM_JOB_ID") * _STEPS + _number(environ, "SLURM_STEP_ID")
        port = _PORTS[number % len(_PORTS)]
    return attrs.evolve(result, local_rank=local, host=host, port=port)


def _named(environ: Mapping[str, str], launcher: str, names: tuple[str, str]) -> World | None:
    """Rank and size in two variables; None where neither is set."""
    absent = [name for name in names if not environ.get(name)]
    if len(absent) == 2:
        return None
    if absent == [names[0]] and environ[names[1]] == "1":
        return None  # a template that says so of each job: this process
    if absent:
        present = names[1 - names.index(absent[0])]
        raise DistributedError(
            f"{present}={environ[present]!r} is set in the environment, and {absent[0]} is not: set both, or unset "
            f"both (env -u {present} python train.py), for one process."
        )
    rank, size = _number(environ, names[0]), _number(environ, names[1])
    if rank >= size:
        raise DistributedError(
            f"{names[0]}={rank} with {names[1]}={size}: ranks are numbered from 0 to {names[1]} - 1."
        )
    return World(launcher=launcher, rank=rank, size=size)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise DistributedError(f"{name}={text!r} in the environment: it is a whole number, at least 0.")
    return int(text)


_PART = r"(?:[^,\[\]]|\[[^\[\]]*\])+"


def nodes(text: str) -> Iterator[str]:
    """The nodes of a list in the format of Slurm, in order.

    Raises:
        DistributedError: it is no such list.

    >>> list(nodes("node[01-03,07],other"))
    ['node01', 'node02', 'node03', 'node07', 'other']
    """
    if not re.fullmatch(rf"{_PART}(,{_PART})*", text):
        raise _unreadable(text)
    for part in re.findall(_PART, text):
        yield from _expanded(part, text)


def _expanded(part: str, text: str) -> Iterator[str]:
    head, opened, rest = part.partition("[")
    if not opened:
        yield part
        return
    inside, _, tail = rest.partition("]")
    for item in inside.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item)
        if match is None:
            raise _unreadable(text)
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            for end in _expanded(tail, text):
                yield f"{head}{number:0{len(first)}d}{end}"


def _unreadable(text: str) -> DistributedError:
    return DistributedError(
        f"SLURM_STEP_NODELIST={text!r} can't be read; it is a list such as 'node[01-04,07],other'. Set MASTER_ADDR to "
        "the host of rank 0."
    )


P = ParamSpec("P")

_generation = 0
_forgetting: list[WeakMethod[Callable[[], None]]] = []


def generation() -> int:
    """How many forks lie between this process and the one that imported this: another number than before in a child."""
    return _generation


def here(function: Callable[P, object]) -> Callable[P, None]:
    """The function in this process; in a child that is forked from now on it does nothing."""
    began = _generation

    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        if began == _generation:
            function(*args, **kwargs)

    return called


def in_child(method: Callable[[], None]) -> None:
    """Call this method of an object, as long as there is one, in every child that is forked from now on.

    Args:
        method: ``object.name``: it forgets threads, what was given to them, and locks that they may have.
    """
    _forgetting[:] = [reference for reference in _forgetting if reference() is not None]
    _forgetting.append(WeakMethod(method))


def _after() -> None:
    global _generation
    _generation += 1
    for reference in _forgetting:
        method = reference()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after)
