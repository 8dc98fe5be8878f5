"""Where ranks meet: bounded in time whatever the store does, and no stream reads what another one left.

The ranks are threads of this process, and the store is in its memory, or on the loopback.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import pytest
import torch.distributed as dist

import pure_loop as pl
from pure_loop.distributed import _rendezvous
from pure_loop.distributed._rendezvous import Rendezvous, within
from tests.support.problem import run
from tests.support.worlds import pool

# Seconds that a loaded machine may take for what it does at once; waits that are too long take a minute and more.
LOADED = 10.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name, value in {"_opened": None, "_unread": [], "_fell": False}.items():
        monkeypatch.setattr(_rendezvous, name, value)


@pytest.fixture
def store(monkeypatch):
    """A store that all ranks of this process share, each with numbers of its own."""
    store, numbers = dist.HashStore(), defaultdict(count)
    monkeypatch.setattr(_rendezvous, "_base", lambda rank, size, seconds: (store, numbers[rank]))
    return store


@pytest.fixture
def port(monkeypatch):
    """A free port of the loopback, in the environment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


def ranks(size, seconds=5.0):
    """The ranks of one stream."""
    return [Rendezvous(rank, size, seconds) for rank in range(size)]


def together(*calls):
    """What each call returns, or the error that it raises, in seconds that a machine may take."""

    def call(each):
        try:
            return each()
        except pl.errors.DistributedError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as threads:
        started = time.monotonic()
        found = list(threads.map(call, calls))
        assert time.monotonic() - started < 1.0 + LOADED
        return found


def meet(*here):
    return together(*(each.meet for each in here))


@pytest.mark.parametrize(("size", "missing", "names"), [(2, 1, "rank 0"), (4, 2, "ranks 0, 1"), (12, 11, "ranks 0, 1")])
def test_ranks_meet_again_and_again_and_those_that_never_start_are_named(store, size, missing, names):
    for _ in range(2):
        assert meet(*ranks(size)) == [False] * size
    for text in meet(*ranks(size, seconds=0.3)[missing:]):
        assert f"could not meet the others within 0.3 s: {names}" in text
        assert size != 12 or "and 3 more did not come" in text


def test_a_rank_that_fails_before_they_meet_is_named_at_once_and_the_next_stream_meets(store):
    """And what a rank reports afterwards is read by the others."""
    for delay in (0.0, 0.1):  # the others wait by then
        one, two, failing = ranks(3, seconds=60.0)

        def announce(delay=delay, failing=failing):
            time.sleep(delay)
            failing.announce("raised ValueError in its call of pl.fit: lr=-1")

        for text in together(one.meet, two.meet, announce)[:2]:
            assert "rank 2 raised ValueError in its call of pl.fit: lr=-1" in text
    one, two, three = ranks(3)
    assert meet(one, two, three) == [False] * 3
    three.report("fell", "left the loop")
    assert one.roll_call(0.0) == ({2: "fell|left the loop"}, True)


def test_rank_0_hosts_one_store_for_all_streams(port):
    for _ in range(2):
        assert ranks(1)[0].meet() is False
        store = _rendezvous._opened
    (one,) = ranks(1)
    one.meet()
    assert _rendezvous._opened is store


def test_rank_0_names_the_others(port):
    with pytest.raises(pl.errors.DistributedError, match=r"rank 0 of 3 could not meet .*: ranks 1, 2 did not come"):
        Rendezvous(0, 3, 0.3).meet()


@pytest.mark.parametrize("answers", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None], ids=["silent", "http", "closes"])
def test_another_program_at_the_port_is_not_waited_for(port, answers):
    """A server that accepts and says nothing, says something else, or closes the connection."""
    ended = threading.Event()

    def serve(server):
        held = []
        while not ended.is_set():
            with suppress(TimeoutError):
                connection, _ = server.accept()
                held.append(connection)
                connection.close() if answers is None else connection.sendall(answers)
        for each in held:
            each.close()

    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(0.05)
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            (text,) = meet(Rendezvous(1, 2, 0.5))
            assert f"rank 0, which hosts the store at 127.0.0.1:{port}" in text
            (text,) = meet(Rendezvous(0, 2, 0.5))
            assert f"rank 0 can't host a store at 127.0.0.1:{port}" in text
            assert "a port that is free" in text
        finally:
            ended.set()
            thread.join()


def test_a_host_that_never_starts_is_named_and_an_environment_without_it_refused(port, monkeypatch):
    (text,) = meet(Rendezvous(1, 2, 0.5))
    assert "rank 0, which hosts the store" in text
    assert "not started, stopped or dead" in text
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(pl.errors.DistributedError, match=r"MASTER_ADDR and MASTER_PORT are not set .* torchrun"):
        Rendezvous(1, 2, 0.5).meet()


def test_what_takes_too_long_is_left():
    gate = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, gate.wait)
    gate.set()
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError, match="inside"):
        within(5, lambda: {}["inside"])


def test_in_a_new_group_ranks_meet_after_a_call_to_which_one_came_alone():
    """Streams of a new group are counted from 0, or the rank that had one alone would wait in another than the rest."""

    def alone(rank):
        if rank == 0:
            with suppress(pl.errors.ArgumentError):
                run(parallel="replicate", max_duration="no duration")

    pool().run(alone)
    assert pool().run(lambda rank: run(parallel="replicate", max_duration="2ba").timestamp.batch) == [2, 2]
