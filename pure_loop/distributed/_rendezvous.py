"""The store through which ranks meet before they have a process group, and report failures; every call is bounded.

A process keeps one store for all of its streams. Each stream takes the store's next number, which is a prefix of its
keys, so a stream never reads the keys of an earlier one: not its addresses, and not its failures. Under ``torchrun``
the store is the agent's; where the default process group is the user's, it is that group's; otherwise rank 0 hosts it.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import ref

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, whatever the stub says
from torch.distributed import distributed_c10d as c10d

from pure_loop._internal.processes import world
from pure_loop._internal.torch_private import default_store
from pure_loop.errors import DistributedError

T = TypeVar("T")

# What a store raises where its server is gone, silent, or another program.
_UNREACHABLE = (RuntimeError, ValueError, OSError)
# Seconds that a rank tries to report a failure, and that the process of the host stays for the others to read it.
_REPORT = 10.0
# Seconds in which a rank that is alive notices that a connection broke, and reports it. It may be at work: in a forward
# pass, or waiting for its turn on a machine with more processes than cores.
_ROLL_CALL = 5.0
# How much longer a thread is given than what it calls waits.
_MORE = 1.25
# Seconds that the end of the process waits for threads that were left.
_GRACE = 2.0
# Seconds between two looks at what the others report.
_POLL = 0.05

_left: list[Thread] = []
# Whether the last stream of this process ended with an error.
_fell = False
# The store that this process opened itself, for which environment, and the numbers of its streams.
_opened: tuple[tuple[Any, ...], Any, Iterator[int]] | None = None
# The default process group that lent its store last, and the numbers of its streams. A new group has a new store, in
# which ranks count alike even if one of them failed in a call that the others did not come to.
_group: tuple[ref[Any], Iterator[int]] | None = None
# Streams that failed where this process hosts the store: the store, the number of ranks, and until when it stays.
_unread: list[tuple[Any, int, float]] = []


def within(seconds: float, function: Callable[[], T]) -> T:
    """What a function returns or raises; where it takes longer, a daemon thread is left with it.

    A store blocks for ever, whatever its timeout, if its server is stopped, or is another program.

    Raises:
        TimeoutError: it takes longer than so many seconds.
    """
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:  # raised below, in the thread that asked
            answers.put((None, error))

    thread = Thread(target=run, daemon=True, name="pure_loop rendezvous")
    thread.start()
    try:
        value, error = answers.get(timeout=max(seconds, 0.0))
    except Empty:
        if not _left:
            atexit.register(_await_threads)
        _left.append(thread)
        raise TimeoutError("The store does not answer.") from None
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _await_threads() -> None:
    """Most end soon; one that returned from torch while the interpreter is finalised would abort the process."""
    until = time.monotonic() + _GRACE
    for thread in _left:
        thread.join(max(until - time.monotonic(), 0.0))


class Rendezvous:
    """The keys of one stream in the store: which ranks are there, and what became of them.

    Args:
        rank, size: this process among how many.
        seconds: how long the others are waited for.
    """

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self._patience = seconds
        self._store: Any = None
        self._is_lost = False

    @property
    def store(self) -> Any:
        """A store for a process group that this stream makes."""
        return c10d.PrefixStore("group", self._store)

    def meet(self) -> bool:
        """Wait until all ranks are here; gives whether they have a default process group.

        Raises:
            DistributedError: some ranks did not come in time, or failed before they came; names them.
        """
        global _fell
        # After a stream that ended here with an error the others may still be waiting for this rank in that one.
        self._patience = 2 * self.seconds if _fell else self.seconds
        _fell = False
        until = time.monotonic() + self._patience
        try:
            within(_MORE * self._patience, lambda: self._arrive(self._patience))
            left = max(until - time.monotonic(), 0.001)
            # A rank that fails before it comes sets this key, too.
            within(_MORE * left + 0.2, lambda: self._store.wait(["go"], timedelta(seconds=left)))
            failures, groups = within(max(self.seconds / 2, 0.5), self._look)
        except _UNREACHABLE as error:
            raise DistributedError(self._absence(error)) from error
        if failures:
            self.finish()
            raise DistributedError(
                f"rank {self.rank} of {self.size} waited for the others to start: "
                f"{'; '.join(f'rank {rank} {text}' for rank, text in failures.items()).rstrip('.')}."
            )
        if 0 < groups < self.size:
            self.finish()
            raise DistributedError(
                f"{groups} of the {self.size} ranks have a default process group, and rank {self.rank} has "
                f"{'one' if dist.is_initialized() else 'none'}: call torch.distributed.init_process_group on all "
                "ranks, or on none."
            )
        return groups > 0

    def _open(self, seconds: float) -> Any:
        if self._store is None:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            base, numbers = _base(self.rank, self.size, seconds)
            self._store = c10d.PrefixStore(f"pure_loop/{attempt}/{next(numbers)}", base)
        return self._store

    def _arrive(self, seconds: float) -> None:
        store = self._open(seconds)
        store.set(f"here/{self.rank}", "1")
        if dist.is_initialized():
            store.add("groups", 1)
        if store.add("count", 1) == self.size:
            store.set("go", "1")

    def _look(self) -> tuple[dict[int, str], int]:
        """What ranks that failed have reported, and how many have a default process group."""
        store = self._store
        reports = {rank: store.get(str(rank)).decode() for rank in range(self.size) if store.check([str(rank)])}
        failures = {rank: text.partition("|")[2] for rank, text in reports.items() if text.startswith("fell")}
        return failures, int(store.add("groups", 0))

    def _absence(self, error: BaseException) -> str:
        head = f"rank {self.rank} of {self.size} could not meet the others within {self._patience:g} s: "
        same = "Start all ranks with one launcher; each makes the same calls of fit, evaluate and predict, in order."
        try:
            missing = within(min(self.seconds / 2, 2.0), self._missing)
        except _UNREACHABLE:
            return f"{head}{self._host()}. {first_line(error)} {same}"
        if not missing:
            return f"{head}{first_line(error)} {same}"
        return f"{head}{named(missing)} did not come: not started, stopped, dead, or in another call. {same}"

    def _missing(self) -> list[int]:
        # One that never came into being may be coming into being in another thread.
        if self._store is None:
            raise TimeoutError
        return [rank for rank in range(self.size) if not self._store.check([f"here/{rank}"])]

    def _host(self) -> str:
        """Where the store is that can't be reached, and which rank is missing with it."""
        if _opened is None and dist.is_initialized():
            return "the store of the default process group does not answer: its host is stopped or dead"
        here = world()
        address = f"{here.host}:{here.port}"
        if _is_agents():
            return f"the store of torchrun's agent at {address} does not answer"
        if self.rank == 0:
            return f"rank 0 can't host a store at {address}: give MASTER_ADDR its host, MASTER_PORT a port that is free"
        return (
            f"rank 0, which hosts the store at {address}, does not answer: it is not started, stopped or dead, or "
            "another program listens at MASTER_PORT"
        )

    # Failures.

    def announce(self, text: str) -> None:
        """Report that this rank fails before it meets the others: they stop waiting for it, and are told why."""

        def report() -> None:
            store = self._open(_REPORT)
            store.set(str(self.rank), f"fell|{text}")
            store.set("go", "1")

        try:
            within(_MORE * _REPORT, report)
        except _UNREACHABLE:
            return  # there is no store, so no other rank waits at it
        self.finish(_REPORT)

    def report(self, kind: str, text: str) -> None:
        """Report what became of this rank: it "fell", or "waited" for another one."""
        try:
            within(1.0, lambda: self._store.set(str(self.rank), f"{kind}|{text}"))
        except _UNREACHABLE:
            self._is_lost = True  # the process that hosts the store is gone, and no other rank can read it

    def roll_call(self, waited: float) -> tuple[dict[int, str], bool]:
        """What the other ranks report of themselves, and whether the store can be reached.

        Args:
            waited: seconds since they were last heard of. Ranks that had the whole timeout get half of it again, those
                of a connection that broke at once get what is left of it.
        """
        if self._is_lost:
            return {}, False
        seconds = min(_ROLL_CALL, max(self.seconds - waited, self.seconds / 2))
        store = self._store
        answers: dict[int, str] = {}
        peers = [rank for rank in range(self.size) if rank != self.rank]

        def ask() -> None:
            until = time.monotonic() + seconds
            while len(answers) < len(peers) and time.monotonic() < until:
                for rank in peers:
                    if rank not in answers and store.check([str(rank)]):
                        answers[rank] = store.get(str(rank)).decode()
                if any(text.startswith("fell") for text in answers.values()):
                    return
                time.sleep(_POLL)

        try:
            within(_MORE * seconds + 0.2, ask)
        except _UNREACHABLE:
            self._is_lost = True
            return dict(answers), False
        return answers, True

    @property
    def hosted_by_rank_0(self) -> bool:
        """Whether the store can't be reached where rank 0 is stopped or dead."""
        return self.rank != 0 and not _is_agents()

    def finish(self, seconds: float = _ROLL_CALL) -> None:
        """This rank has read what others reported. The process of the host stays until all have, or so many seconds."""
        global _fell
        _fell = True
        store = self._store
        if self._is_lost:
            return
        try:
            within(1.0, lambda: store.add("done", 1))
        except _UNREACHABLE:
            return  # gone, with what there was to read
        if self.rank == 0 and not _is_agents():
            if not _unread:
                atexit.register(_stay)
            _unread.append((store, self.size, time.monotonic() + seconds))


def _forget() -> None:
    """In a forked child: the connections are the parent's, which would read what is written to them."""
    global _opened, _group
    _opened = _group = None
    _left.clear()
    _unread.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _is_agents() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _base(rank: int, size: int, seconds: float) -> tuple[Any, Iterator[int]]:
    """The store of this process, and the numbers of its streams.

    Raises:
        DistributedError: the environment doesn't say where it is.
        RuntimeError: it can't be opened.
    """
    global _opened, _group
    here = world()
    where = (here.host, here.port, rank, size, os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    if _opened is not None and _opened[0] == where:
        return _opened[1:]
    if dist.is_initialized():
        group = dist.group.WORLD
        if _group is None or _group[0]() is not group:
            _group = ref(group), count()
        return default_store(), _group[1]
    host, port = here.address
    store = TCPStore(
        host,
        port,
        size,
        is_master=rank == 0 and not _is_agents(),
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,  # a process group of the user's in this process shares the server
    )
    _opened = where, store, count()
    return _opened[1:]


def _stay() -> None:
    """At the exit of the process that hosts the store: until the others have read why a stream failed."""

    def wait() -> None:
        for store, size, until in _unread:
            while int(store.add("done", 0)) < size and time.monotonic() < until:
                time.sleep(_POLL)

    try:
        within(_MORE * _REPORT, wait)
    except _UNREACHABLE:
        return  # the store is a process group's that the program has closed


def named(ranks: Sequence[int]) -> str:
    """
    >>> named([2]), named([0, 3])
    ('rank 2', 'ranks 0, 3')
    """
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, of at most 600 characters."""
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= 600 else line[:600] + " ..."
