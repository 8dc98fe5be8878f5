"""A pool of processes, and what it does with every fault.

Programs are functions of their test, which are sent as they are: of another one a process would import this module.
"""

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

from pure_loop.errors import ArgumentTypeError, MissingExtraError
from pure_loop.testing.ranks.processes import Pool, RankError, shared_pool
from pure_loop.testing.ranks.simulation import simulate


def ended(pids, within=10.0):
    """Whether no process with these numbers is left, a zombie or an orphan included."""
    until = time.monotonic() + within
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def pids(pool):
    return pool.run(lambda rank: os.getpid())


def test_what_raises_and_what_can_not_be_sent_leaves_the_processes_as_they_are(monkeypatch):
    def raising(rank):
        print("before it")
        if rank == 1:
            time.sleep(0.05)
            raise ZeroDivisionError("on one")
        dist.all_reduce(torch.ones(2))

    def sums(rank):
        x = torch.tensor([rank])
        dist.all_reduce(x)
        return x.item()

    def stubborn(rank):
        raise type("StubbornError", (Exception,), {"__reduce__": lambda self: (int, ("no number",))})

    with Pool(2, timeout=20) as pool:
        with pytest.raises(RankError, match="rank 1 of 2 raised ZeroDivisionError: on one") as caught:
            pool.run(raising)
        error = caught.value
        assert isinstance(error, RuntimeError)
        assert error.ranks == (1,)
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert error.traceback.startswith("Traceback")
        assert "_worker.py" not in error.traceback
        for part in (error.traceback.strip(), 'raise ZeroDivisionError("on one")', "Rank 1 wrote:\n\nbefore it"):
            assert part in str(error)
        before, lock = pids(pool), threading.Lock()
        for program, kind, says in (
            (lambda rank: lock, ArgumentTypeError, "can't be sent to another process"),
            (3, ArgumentTypeError, "pass a function of the rank"),
            (lambda rank: (i for i in range(3)) if rank else 0, RankError, "1 of 2 returned a generator that can't"),
            (stubborn, RankError, r"rank \d of 2 raised .*StubbornError"),
            (lambda rank: dist.destroy_process_group(), RankError, "the program destroyed the default process group"),
        ):
            with pytest.raises(kind, match=says):
                pool.run(program)
        # They came to rest, so no process was killed, and no message of an old program is left.
        assert pool.run(sums) == [1, 1]
        assert pids(pool) == before
        with pytest.raises(RankError, match="mismatch between collectives"):
            pool.run(lambda rank: dist.all_reduce(torch.ones(2 + rank)))
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'pure_loop\[testing\]'"):
            pool.run(lambda rank: rank)
    assert shared_pool(2) is shared_pool(2)
    assert len({shared_pool(2), shared_pool(3), shared_pool(2, checked=False)}) == 3


@pytest.mark.slow  # processes that hang and die
def test_faults_end_processes_and_the_next_run_starts_new_ones(tmp_path):
    def hangs(rank):
        helper = subprocess.Popen(["sleep", "600"])
        (tmp_path / str(rank)).write_text(str(helper.pid))
        if rank == 1:
            dist.all_reduce(torch.ones(1))

    def dies(rank):
        if rank == 0:
            print("last words", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    pool = Pool(2, timeout=3, checked=False)
    first = pids(pool)
    says = r"(?s)rank 1 of 2 did not answer within 3 s.*Rank 1 is at:.*in hangs"
    with pytest.raises(RankError, match=says) as caught:
        pool.run(hangs)
    assert caught.value.ranks == (1,)
    assert ended([*first, *(int((tmp_path / str(rank)).read_text()) for rank in range(2))])
    second = pids(pool)
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2 was killed by SIGKILL without an answer.*last words"):
        pool.run(dies)
    assert ended(second)
    pool.close()
    pool.close()


ENDLESS = """
import os, threading, time
from pure_loop.testing.ranks.processes import Pool
def endless(rank):
    print(os.getpid(), file=open("told", "w"), flush=True)
    while True:
        pass
pool = Pool(1)
threading.Thread(target=lambda: pool.run(endless), daemon=True).start()
while not os.path.exists("told") or not open("told").read().strip():
    time.sleep(0.02)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow  # a process that is killed
def test_processes_end_with_the_one_that_started_them(tmp_path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
    ran = subprocess.run([sys.executable, "-c", ENDLESS], env=environ, cwd=tmp_path, timeout=120, capture_output=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert ended([int((tmp_path / "told").read_text())])


@pytest.mark.thorough  # DistributedDataParallel, which a checked pool can't run
def test_distributed_data_parallel():
    def program(rank):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        model = torch.nn.parallel.DistributedDataParallel(model)
        model(torch.arange(12.0).view(4, 3) + rank).square().sum().backward()
        return [p.grad.tolist() for p in model.parameters()], [b.tolist() for b in model.buffers()]

    assert shared_pool(2, checked=False).run(program) == [ran.result for ran in simulate(program, 2)]
    with pytest.raises(RankError, match=r"SIGSEGV .* use Pool\(checked=False\)"):
        shared_pool(2).run(program)
