"""What the others say when a rank dies or hangs: who, and where. Of one that raises, leaves or does something else, see
``test_ranks_that_differ.py``. Slow: ranks wait for their timeout."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel
from pure_loop.testing.ranks import Pool, RankError, processes, shared_pool
from tests.support.worlds import KINDS, an_epoch

pytestmark = pytest.mark.slow

TIMEOUT = 4.0


@pytest.fixture(scope="module")
def pool():
    # torch's DistributedDataParallel crashes where gloo's collectives are checked, in torch itself.
    pool = shared_pool(3, checked=False)
    for kind in KINDS:
        pool.run(lambda rank, kind=kind: pl.run(fit(kind)) and None)  # what is imported is imported
    return pool


def fit(kind, **options):
    torch.manual_seed(0)
    data = [(torch.ones(6, 2), torch.zeros(6, 1))] * 4
    return an_epoch(torch.nn.Linear(2, 1), data, parallel=Parallel(kind=kind, timeout=TIMEOUT), **options)


def told(pool, program, *, failing=1):
    """What every rank was told: the text of its error, and how long it took, for all but the failing rank."""

    def guarded(rank):
        started = time.monotonic()
        try:
            program(rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - started
        return "nothing", time.monotonic() - started

    return [each for rank, each in enumerate(pool.run(guarded)) if rank != failing]


def says(text, *parts):
    missing = [part for part in ("DistributedError", *parts) if not re.search(part, text)]
    assert not missing, f"{missing} is not in: {text}"


def test_a_rank_that_is_killed(tmp_path, monkeypatch):
    """One that is at work meanwhile, for less than the timeout, is not blamed beside it, however long training took.
    Slow: three processes of its own, which wait for the timeout."""
    # The pool ends as soon as a rank is dead; here the others get the time that they need to say so.
    monkeypatch.setattr(processes, "_GRACE", 30.0)

    def program(rank):
        try:
            for event, state in fit("replicate"):
                if event is Event.BATCH_START and state.timestamp.batch == 0:
                    time.sleep(3 * TIMEOUT)  # longer than all that follows: what counts is the last exchange
                if event is Event.BEFORE_FORWARD and state.timestamp.batch == 1:
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if rank == 2:
                        time.sleep(TIMEOUT / 2)
        except pl.DistributedError as error:
            (tmp_path / f"{rank}").write_text(str(error))
            raise
        time.sleep(60)  # it must not come to its end

    with Pool(3, timeout=120, checked=False) as pool:
        pool.run(abs)  # three processes that import torch take their time, which is not what is measured
        with pytest.raises(RankError, match="rank 1 of 3 was killed by SIGKILL"):
            pool.run(program)
    for rank in (0, 2):
        text = (tmp_path / f"{rank}").read_text()
        for part in (": rank 1 did not come to what follows", r"killed, or hanging; last heard of \d+\.\d s ago"):
            assert re.search(part, text), text


@pytest.mark.parametrize(("kind", "event"), [("replicate", Event.BATCH_END), ("shard", Event.BEFORE_LOSS)])
def test_a_rank_that_hangs(pool, kind, event):
    """Slow: it hangs for longer than the timeout."""

    def program(rank):
        @pl.algorithm(event)
        def hangs(state):
            if rank == 1 and state.timestamp.batch == 1:
                time.sleep(TIMEOUT + 7)
            return state

        pl.run(fit(kind, algorithms=[hangs]))

    for text, _ in told(pool, program):
        heard = r"hanging; last heard of ([4-9]|\d\d)\.\d s ago, where the timeout is 4 s"
        says(text, "rank 1 did not come to what follows", heard)


@pytest.mark.parametrize("unused", [None, True, False])
def test_parameters_that_only_some_batches_reach(pool, unused):
    """Slow: without ``find_unused_parameters`` a rank is told by the next batch."""

    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.one(x) if x[0, 0] > 0 else self.two(x)

    def program(rank):
        # Each rank reaches one half, and the last batch the first one alone.
        inputs = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, 2.0]])
        data = [(inputs, torch.zeros(3, 1)), (inputs.abs(), torch.zeros(3, 1))]
        parallel = Parallel(find_unused_parameters=unused, timeout=TIMEOUT)
        stream = an_epoch(Halves(), data, parallel=parallel)
        grads = [dict(state.grads) for event, state in stream if event is Event.AFTER_TRAIN_BATCH]
        return [[name for name, tensor in each.items() if tensor is None] for each in grads]

    if unused is False:
        assert any("find_unused_parameters=True" in text for text, _ in told(pool, program, failing=None))
    else:
        assert pool.run(program) == [[[], ["two.weight", "two.bias"]]] * 3
