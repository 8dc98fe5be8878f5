"""Programs on real ranks: a pool of processes that communicate through gloo, for a whole test session.

``Pool(2).run(program)`` sends a function to every process and returns the result of each rank. An exception on a rank
is raised with the rank's own traceback; a rank that hangs or dies is an error within the pool's timeout; and no process
is left behind.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from pure_loop._internal.arguments import check_integer, check_number
from pure_loop.errors import ArgumentTypeError, MissingExtraError, PureLoopError
from pure_loop.testing._surroundings import working_directory
from pure_loop.testing.ranks.simulation import environment

T = TypeVar("T")
# Of a rank: what it did, and what came of it; None: it died.
Answer: TypeAlias = "tuple[Any, ...] | None"

_WORKER = str(Path(__file__).resolve().with_name("_worker.py"))
_START = 120.0  # seconds that processes may take to import torch on a busy machine
_GRACE = 1.0  # seconds that the other ranks get to come to rest after one failed
_TAIL = 4000  # characters
_DDP = os.path.join("nn", "parallel", "distributed.py")


class RankError(PureLoopError, RuntimeError):
    """A rank of a pool raised, hung, died, or returned a value that can't be sent.

    Attributes:
        ranks: the ranks that failed.
        traceback: the traceback on the first of them, as text; empty if there is none.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), traceback: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.traceback = traceback


class Pool:
    """Real processes, one a rank, in one gloo process group on this machine.

    They start at the first :meth:`run`, which takes as long as importing torch, and live until :meth:`close`, the end
    of a ``with``, or the end of this process. Each computes with one thread, in the working directory that this process
    has when the program is run. After a failed program they form a new process group; if one of them hangs or died, all
    are killed, and the next run starts new ones. Settings of the process that a program changes (environment, default
    dtype, modes, random generators, working directory, number of threads) are restored after it; if one can't be, or a
    thread still runs, the next run starts new processes. Attributes of modules that a program replaces are not
    restored.

    Args:
        ranks: how many processes.
        timeout: how many seconds a program may take on all of them.
        checked: whether torch compares the collectives of the ranks before each of them, and reports differences (its
            level DETAIL). A collective takes five times as long, DistributedDataParallel crashes in it over gloo, and
            so does gathering a DTensor in torch 2.11. If False, the ranks form a new process group for every program,
            which takes some 50 ms.

    Raises:
        ArgumentTypeError, ArgumentError: an argument of a wrong type, or out of range.

    >>> import torch
    >>> def program(rank):
    ...     total = torch.tensor(rank + 1)
    ...     torch.distributed.all_reduce(total)
    ...     return total.item()
    >>> with Pool(2) as pool:
    ...     pool.run(program)
    [3, 3]
    """

    def __init__(self, ranks: int = 2, *, timeout: float = 60.0, checked: bool = True) -> None:
        check_integer("ranks", ranks, where="Pool", least=1, example="Pool(2)")
        wanted = "a finite number of seconds above 0"
        check_number("timeout", timeout, where="Pool", above=0, wanted=wanted, example="Pool(timeout=60)")
        self.ranks = ranks
        self.timeout = float(timeout)
        self.checked = bool(checked)
        self._team: _Team | None = None
        self._turn = threading.Lock()

    def run(self, program: Callable[[int], T]) -> list[T]:
        """Run a program on every rank at once.

        It is sent with cloudpickle, so it may be a lambda or a closure, and is called with the number of the rank. The
        default process group and the environment variables of torchrun are set; torch's default generator is seeded
        with the rank's number. Its output is shown only if it fails.

        Args:
            program: a function of the rank that returns a value that can be pickled.

        Returns:
            The values of all ranks, in their order.

        Raises:
            RankError: a rank raised (the exception is the error's cause, if it can be sent), died, returned a value
                that can't be pickled, or did not finish in time.
            ArgumentTypeError: the program is no function, or can't be sent to another process.
            MissingExtraError: cloudpickle is not installed.
        """
        if not hasattr(os, "killpg"):
            raise RankError(
                "a pool needs a POSIX system (Linux, macOS, WSL); simulate(program, ranks) runs everywhere."
            )
        payload = _pickled(program)
        with self._turn:
            if self._team is not None and not self._team.usable():
                self._team.end()
                self._team = None
            team = self._team = self._team or _Team(self.ranks, self.timeout, self.checked)
            try:
                return team.run(payload)
            finally:
                if not team.at_rest:
                    self._team = None
                    team.end()

    def close(self) -> None:
        """End the processes. A later :meth:`run` starts new ones."""
        with self._turn:
            team, self._team = self._team, None
            if team is not None:
                team.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool({self.ranks}, timeout={self.timeout}, checked={self.checked})"


_shared: dict[tuple[int, bool], Pool] = {}


def shared_pool(ranks: int = 2, *, checked: bool = True) -> Pool:
    """The pool of this number of ranks, shared in this process; it is closed when the process ends.

    Args:
        ranks, checked: as for :class:`Pool`.

    Raises:
        ArgumentTypeError, ArgumentError: not a number of ranks.

    >>> shared_pool(2) is shared_pool(2)
    True
    """
    pool = _shared.get((ranks, checked))
    return pool if pool is not None else _shared.setdefault((ranks, checked), Pool(ranks, checked=checked))


def close_shared_pools() -> None:
    """End the processes of all shared pools; the next run of one starts new ones."""
    for pool in _shared.values():
        pool.close()


def _pickled(program: object) -> bytes:
    if not callable(program):
        raise ArgumentTypeError(f"Pool.run({program!r}): pass a function of the rank, `def program(rank): ...`.")
    try:
        dumps = import_module("cloudpickle").dumps
    except ImportError:
        raise MissingExtraError(
            "Programs are sent to other processes with cloudpickle, which is not installed: "
            "pip install 'pure_loop[testing]'."
        ) from None
    try:
        payload: bytes = dumps(program)
    except Exception as error:
        raise ArgumentTypeError(
            f"Pool.run({program!r}): the program can't be sent to another process ({type(error).__name__}: {error}). "
            "Open files, connections, locks, generators and streams inside the program, not outside it."
        ) from error
    return payload


class _Rank:
    """One process, the connection to it, and the file that holds what it writes."""

    def __init__(self, rank: int, ranks: int, timeout: float, directory: str, environ: dict[str, str]) -> None:
        self.rank = rank
        self.worn = False  # whether a program changed a setting that can't be restored
        self.asked_at = 0  # the size of the file when the last program was sent
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the rank ends
        self.connection, theirs = Pipe()
        # By the path of the file: `-m` would import the package before sys.path is set. A session of its own: processes
        # that the program starts are killed with it, and Ctrl-C reaches the pool alone.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-u", _WORKER, str(theirs.fileno()), directory],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=environ,
            cwd=directory,  # it stays as long as the processes; that of the pool may be removed
            start_new_session=True,
        )
        theirs.close()
        self.send((sys.path, rank, ranks, timeout))

    def send(self, message: object) -> None:
        self.asked_at = os.fstat(self.log.fileno()).st_size
        with suppress(OSError):  # it died, which shows when it is waited for
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Answer:
        """Its answer; None if it died instead."""
        try:
            # A process that it started may hold the connection open after it died, without ever writing to it.
            if not self.connection.poll():
                return None
            answer: Answer
            self.worn, answer = pickle.loads(self.connection.recv_bytes())
            return answer
        except (EOFError, OSError):
            return None

    def wrote(self, since: int) -> str:
        size = os.fstat(self.log.fileno()).st_size
        # pread, which doesn't move the position: the process shares it and writes there.
        return os.pread(self.log.fileno(), _TAIL, max(since, size - _TAIL)).decode(errors="replace").strip()

    def tail(self) -> str:
        text = self.wrote(self.asked_at)
        return f"\n\nRank {self.rank} wrote:\n\n{text}" if text else ""

    def stands_at(self) -> str:
        """Its current traceback, written by a signal handler in C, which works while the interpreter is busy."""
        since = os.fstat(self.log.fileno()).st_size
        self.process.send_signal(signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.025)
            text = self.wrote(since)
            if "File " in text:
                lines = [line for line in text.splitlines() if _WORKER not in line]
                return "\n".join([f"\n\nRank {self.rank} is at:\n", *lines])
        return self.tail()

    def fate(self) -> str:
        self.kill()
        code = self.process.wait()
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, and so has all that it started
            os.killpg(self.process.pid, signal.SIGKILL)


class _Team:
    """The processes of a pool from their start to their end."""

    def __init__(self, ranks: int, timeout: float, checked: bool) -> None:
        self.owner = os.getpid()
        self.at_rest = False
        self._timeout = timeout
        self._checks = checked
        self._rounds = 0
        self._apart = True
        self._directory = tempfile.mkdtemp(prefix="pure_loop-")
        self._ranks: list[_Rank] = []
        # Also runs when a pool is dropped, and when the interpreter exits.
        self.end = weakref.finalize(self, _end, self._ranks, self._directory, self.owner)
        try:
            for rank in range(ranks):
                environ = {**os.environ, **environment(rank, ranks), **_settings(checked)}
                self._ranks.append(_Rank(rank, ranks, timeout, self._directory, environ))
            self._raise_failure(self._answers(_START), _START)
        except BaseException:
            self.end()
            raise

    def usable(self) -> bool:
        """Whether all processes are alive and unchanged; a forked copy of this process must not use the original's."""
        return self.owner == os.getpid() and all(rank.process.poll() is None and not rank.worn for rank in self._ranks)

    def run(self, payload: bytes) -> list[Any]:
        """The results of all ranks.

        Raises:
            RankError: as :meth:`Pool.run` says; ``at_rest`` tells whether the processes can be used again.
        """
        self.at_rest = False
        if self._apart:
            # Separately: a rank would leave at once, if its program fails, while others are still connecting.
            self._rounds += 1
            store = os.path.join(self._directory, str(self._rounds))
            self._raise_failure(self._ask(("meet", store), _START), _START)
        self._apart = True
        answers = self._ask(("run", sys.path, working_directory(), payload), self._timeout)
        self.at_rest = len(answers) == len(self._ranks) and None not in answers.values()
        self._raise_failure(answers, self._timeout)
        # Unchecked ranks can leave messages in the group that the next program would receive.
        self._apart = not self._checks
        return [self._loaded(rank, answer[1]) for rank, answer in sorted(answers.items()) if answer is not None]

    def _ask(self, message: tuple[object, ...], seconds: float) -> dict[int, Answer]:
        for rank in self._ranks:
            rank.send(message)
        return self._answers(seconds)

    def _answers(self, seconds: float) -> dict[int, Answer]:
        """The answers of the ranks that answer in time; None for one that dies."""
        answers: dict[int, Answer] = {}
        until, failed = time.monotonic() + seconds, False
        while len(answers) < len(self._ranks) and (left := until - time.monotonic()) > 0:
            waiting = [item for item in self._ranks if item.rank not in answers]
            ready = wait([item.connection for item in waiting], min(left, 0.25))
            for item in waiting:
                if item.connection in ready or item.process.poll() is not None:
                    answer = answers[item.rank] = item.receive()
                    if not failed and (answer is None or answer[0] == "error"):
                        failed, until = True, min(until, time.monotonic() + _GRACE)
        return answers

    def _raise_failure(self, answers: dict[int, Answer], seconds: float) -> None:
        """
        Raises:
            RankError: about the first failure: a rank that dies or raises makes others fail, too.
        """
        of = f"of {len(self._ranks)}"
        dead = [item for item in self._ranks if item.rank in answers and answers[item.rank] is None]
        if dead:
            fates = "; ".join(f"rank {item.rank} {of} {item.fate()} without an answer" for item in dead)
            wrote = "".join(item.tail() for item in dead)
            if self._checks and _DDP in wrote:
                fates += " (torch's DistributedDataParallel can't be checked: use Pool(checked=False))"
            raise RankError(f"{fates}.{wrote}", tuple(item.rank for item in dead))
        errors = [(answer[1], rank, *answer[2:]) for rank, answer in answers.items() if answer and answer[0] == "error"]
        if errors:
            _, rank, doing, line, text, cause = min(errors, key=lambda error: error[:2])
            message = f"rank {rank} {of} {doing} {line}\n\n{text.strip()}{self._ranks[rank].tail()}"
            raise RankError(message, (rank,), text) from _exception(cause)
        late = [item for item in self._ranks if item.rank not in answers]
        if late:
            names = ", ".join(str(item.rank) for item in late)
            raise RankError(
                f"rank{'s' if len(late) > 1 else ''} {names} {of} did not answer within {seconds:g} s. A collective "
                "that not every rank calls waits for ever: simulate(program, ranks) names it. A program that needs "
                f"longer gets it from Pool(timeout=...).{''.join(item.stands_at() for item in late)}",
                tuple(item.rank for item in late),
            )

    def _loaded(self, rank: int, payload: bytes) -> object:
        try:
            return pickle.loads(payload)
        except Exception as error:
            what = f"what can't be read here: {type(error).__name__}: {error}"
            raise RankError(f"rank {rank} of {len(self._ranks)} returned {what}", (rank,)) from error


def _exception(payload: bytes | None) -> BaseException | None:
    try:
        error: object = None if payload is None else pickle.loads(payload)
    except Exception:
        return None  # a class that can't be made anew from its arguments; its traceback is in the message all the same
    return error if isinstance(error, BaseException) else None


def _settings(checked: bool) -> dict[str, str]:
    """What torch reads from the environment of a rank."""
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if checked else "OFF"}
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback:
        settings["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return settings


def _end(ranks: list[_Rank], directory: str, owner: int) -> None:
    mine = os.getpid() == owner  # a forked copy of the process only closes what it got with the copy
    for rank in ranks if mine else ():
        rank.kill()
    for rank in ranks:
        if mine:
            rank.process.wait()
        rank.connection.close()
        rank.log.close()
    if mine:
        shutil.rmtree(directory, ignore_errors=True)
