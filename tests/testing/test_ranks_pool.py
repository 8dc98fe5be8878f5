"""A pool of processes, and what it does with every fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from pure_loop.testing.ranks.processes import Pool, RankError, shared_pool
from tests.support.simulating import RANKS, program_of, results


@pytest.fixture(scope="module")
def pool():
    with Pool(RANKS, timeout=20) as pool:
        yield pool


def ended(pids, within=10.0):
    """Whether no process with these numbers is left, a zombie or an orphan included."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(os.path.exists(f"/proc/{pid}") if os.path.exists("/proc/self") else _lives(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(pool):
    return pool.run(lambda rank: os.getpid())


@pytest.mark.slow
def test_an_exception_reaches_the_parent_and_the_others_go_on(pool):
    def program(rank):
        print("before it")
        if rank == 1:
            time.sleep(0.05)
            raise ZeroDivisionError("on one")
        dist.all_reduce(torch.ones(2))

    before = pids(pool)
    begun = time.monotonic()
    with pytest.raises(RankError, match=f"rank 1 of {RANKS} raised ZeroDivisionError: on one") as caught:
        pool.run(program)
    assert time.monotonic() - begun < 10
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.ranks == (1,)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.traceback.startswith("Traceback")
    assert 'raise ZeroDivisionError("on one")' in error.traceback
    assert "_worker.py" not in error.traceback
    assert error.traceback.strip() in str(error)
    assert "Rank 1 wrote:\n\nbefore it" in str(error)
    # They came to rest, so no process was killed, and no message of the old program is left.
    assert pids(pool) == before
    assert pool.run(program_of([("all_reduce", "SUM")], "int64", 2)) == [[[30, 33]]] * RANKS


def test_collectives_that_differ_are_an_error_on_gloo_too(pool):
    with pytest.raises(RankError, match="mismatch between collectives"):
        pool.run(lambda rank: dist.all_reduce(torch.ones(2 + rank)))


def test_what_can_not_be_sent(pool, monkeypatch):
    lock = threading.Lock()
    before = pids(pool)
    with pytest.raises(ArgumentTypeError, match="can't be sent to another process"):
        pool.run(lambda rank: lock)
    with pytest.raises(ArgumentTypeError, match="pass a function of the rank"):
        pool.run(3)
    with pytest.raises(RankError, match="rank 2 of 3 returned a generator that can't be pickled"):
        pool.run(lambda rank: (i for i in range(3)) if rank == 2 else rank)

    class StubbornError(Exception):
        def __reduce__(self):
            return (int, ("no number",))

    def stubborn(rank):
        raise StubbornError

    with pytest.raises(RankError, match=r"rank \d of 3 raised .*StubbornError") as caught:
        pool.run(stubborn)
    assert caught.value.__cause__ is None
    with pytest.raises(RankError, match="the program destroyed the default process group"):
        pool.run(lambda rank: dist.destroy_process_group())
    assert pids(pool) == before
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pure_loop\[testing\]'"):
        pool.run(lambda rank: rank)


@pytest.mark.slow
def test_faults_end_processes_and_the_next_run_starts_new_ones(tmp_path):
    pool = Pool(2, timeout=3, checked=False)
    assert repr(pool) == "Pool(2, timeout=3.0, checked=False)"
    first = pids(pool)
    sums = program_of([("all_reduce", "SUM")], "int64", 2)
    assert pool.run(sums) == results(sums, 2)

    def hangs(rank):
        helper = subprocess.Popen(["sleep", "600"])
        (tmp_path / str(rank)).write_text(str(helper.pid))
        if rank == 1:
            dist.all_reduce(torch.ones(1))
        return rank

    begun = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 did not answer within 3 s") as caught:
        pool.run(hangs)
    assert 2.5 < time.monotonic() - begun < 30
    assert caught.value.ranks == (1,)
    assert "Rank 1 is at:" in str(caught.value)
    assert "in hangs" in str(caught.value)
    helpers = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert ended(first)
    assert ended(helpers)

    def dies(rank):
        if rank == 0:
            print("last words", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    second = pids(pool)
    assert not set(first) & set(second)
    with pytest.raises(RankError, match="rank 0 of 2 was killed by SIGKILL without an answer") as caught:
        pool.run(dies)
    assert caught.value.ranks == (0,)
    assert "last words" in str(caught.value)
    assert ended(second)
    pool.close()
    pool.close()


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, threading, time\n"
        "from pure_loop.testing.ranks.processes import Pool\n"
        "def endless(rank):\n"
        "    print(os.getpid(), file=open(told, 'w'), flush=True)\n"
        "    while True:\n"
        "        pass\n"
        f"told = {str(tmp_path / 'told')!r}\n"
        "pool = Pool(1)\n"
        "threading.Thread(target=lambda: pool.run(endless), daemon=True).start()\n"
        "while not os.path.exists(told) or not open(told).read().strip():\n"
        "    time.sleep(0.02)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, str(script)], env=environ, timeout=120, capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert ended([int((tmp_path / "told").read_text())])


@pytest.mark.slow
def test_a_program_runs_where_this_process_is_and_a_folder_may_be_removed(tmp_path, monkeypatch):
    folders = [tmp_path / "first", tmp_path / "second"]
    with Pool(RANKS, timeout=20) as pool:
        for folder in folders:
            folder.mkdir()
            monkeypatch.chdir(folder)
            assert pool.run(lambda rank: os.getcwd()) == [str(folder)] * RANKS
            folder.rmdir()
        started = pids(pool)
        assert all(map(os.path.isdir, pool.run(lambda rank: os.getcwd())))
        assert pids(pool) == started


def test_a_pool_with_bad_arguments():
    for arguments, error in (
        ({"ranks": "2"}, ArgumentTypeError),
        ({"ranks": True}, ArgumentTypeError),
        ({"ranks": 0}, ArgumentError),
        ({"timeout": "1"}, ArgumentTypeError),
        ({"timeout": 0}, ArgumentError),
        ({"timeout": float("nan")}, ArgumentError),
    ):
        with pytest.raises(error, match=r"Pool\("):
            Pool(**arguments)


def test_one_pool_is_shared():
    assert shared_pool(2) is shared_pool(2)
    assert shared_pool(2) is not shared_pool(3)
    assert shared_pool(2) is not shared_pool(2, checked=False)
    assert shared_pool(2).ranks == 2
