"""What the others say when a rank raises, dies, hangs, leaves or does something else: who, and where, in time."""

from __future__ import annotations

import itertools
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
from tests.support.tiers import tiers

torch.set_num_threads(1)

KINDS = ("replicate", "shard")
TIMEOUT = 4.0
BATCHES = 4


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def pool():
    # torch's DistributedDataParallel crashes where gloo's collectives are checked, in torch itself.
    pool = shared_pool(3, checked=False)
    for kind in KINDS:
        pool.run(lambda rank, kind=kind: pl.run(fit(kind)) and None)  # what is imported is imported
    return pool


def fit(kind, *, batches=BATCHES, width=3, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    data = [(torch.ones(6, 2), torch.zeros(6, 1)) for _ in range(batches)]
    arguments = {
        "loss": torch.nn.functional.mse_loss,
        "optimizer": pl.optim.sgd(lr=0.1),
        "max_duration": "1ep",
        "parallel": Parallel(kind=kind, timeout=TIMEOUT),
    }
    return pl.fit(model, data, **{**arguments, **options})


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
    missing = [part for part in parts if not re.search(part, text)]
    assert not missing, f"{missing} is not in: {text}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "event"),
    tiers(
        itertools.product(KINDS, [Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_TRAIN_BATCH, Event.EPOCH_END]),
        [
            *(("replicate", Event.AFTER_DATALOADER), ("replicate", Event.AFTER_TRAIN_BATCH)),
            *(("shard", Event.BEFORE_LOSS), ("shard", Event.EPOCH_END)),
        ],
    ),
)
def test_a_rank_that_raises(pool, kind, event):
    def program(rank):
        @pl.algorithm(event)
        def fails(state):
            if rank == 1 and state.timestamp.batch >= 1:
                raise ValueError("no more")
            return state

        pl.run(fit(kind, algorithms=[fails]))

    for text, seconds in told(pool, program):
        says(text, "DistributedError", r"rank 1 raised ValueError after \w+ of batch \d: no more")
        assert seconds < TIMEOUT


@pytest.mark.slow
def test_a_loop_body_that_raises(pool, kind):
    def program(rank):
        for event, state in fit(kind):
            if rank == 1 and event is Event.BATCH_END and state.timestamp.batch == 2:
                raise KeyError("in the body")

    for text, _ in told(pool, program):
        says(text, "DistributedError", "rank 1 left the loop at BATCH_END of batch 2")


@pytest.mark.slow
def test_a_rank_that_leaves_the_loop(pool, kind):
    def program(rank):
        stream = fit(kind)
        for event, state in stream:
            if rank == 1 and event is Event.BATCH_END and state.timestamp.batch == 2:
                stream.close()
                return

    for text, _ in told(pool, program):
        says(text, "DistributedError", "rank 1 left the loop at BATCH_END of batch 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("replicate", Event.BEFORE_FORWARD),
        pytest.param("shard", Event.AFTER_TRAIN_BATCH, marks=pytest.mark.thorough),
    ],
    ids=KINDS,
)
def test_a_rank_that_is_killed(kind, where, tmp_path, monkeypatch):
    """One that is at work meanwhile, for less than the timeout, is not blamed beside it, however long training took."""
    # The pool ends as soon as a rank is dead; here the others get the time that they need to say so.
    monkeypatch.setattr(processes, "_GRACE", 12.0)

    def program(rank):
        try:
            for event, state in fit(kind):
                if event is Event.BATCH_START and state.timestamp.batch == 0:
                    time.sleep(3 * TIMEOUT)  # longer than all that follows: what counts is the last exchange
                if event is where and state.timestamp.batch == 1:
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if rank == 2:
                        time.sleep(TIMEOUT / 2)
        except pl.DistributedError as error:
            (tmp_path / f"{rank}").write_text(str(error))
            raise
        time.sleep(20)  # it must not come to its end

    with Pool(3, timeout=60, checked=False) as pool:
        pool.run(abs)  # three processes that import torch take their time, which is not what is measured
        started = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of 3 was killed by SIGKILL"):
            pool.run(program)
    for rank in (0, 2):
        text = (tmp_path / f"{rank}").read_text()
        says(text, ": rank 1 did not come to what follows", r"killed, or hanging; last heard of (\d|1[01])\.\d s ago")
    assert time.monotonic() - started < 45


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("replicate", Event.BATCH_END),
        pytest.param("replicate", Event.BEFORE_LOSS, marks=pytest.mark.thorough),
        pytest.param("shard", Event.BATCH_END, marks=pytest.mark.thorough),
        pytest.param("shard", Event.BEFORE_LOSS, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_hangs(pool, kind, event):
    def program(rank):
        @pl.algorithm(event)
        def hangs(state):
            if rank == 1 and state.timestamp.batch == 1:
                time.sleep(TIMEOUT + 7)
            return state

        pl.run(fit(kind, algorithms=[hangs]))

    for text, seconds in told(pool, program):
        says(
            text,
            "DistributedError",
            "rank 1 did not come to what follows",
            r"hanging; last heard of ([4-9]|1\d)\.\d s ago, where the timeout is 4 s",
        )
        assert seconds < TIMEOUT + 8


def test_a_rank_with_a_batch_less(pool, kind):
    def program(rank):
        pl.run(fit(kind, batches=BATCHES - (rank == 1)))

    for text, _ in told(pool, program, failing=None):
        says(
            text, "DistributedError", "'batches': 3} on rank 1 and {'batches': 4} on rank 0", r"Parallel\(data='own'\)"
        )


def test_a_rank_with_another_model(pool, kind):
    def program(rank):
        pl.run(fit(kind, width=3 + (rank == 1)))

    for text, _ in told(pool, program, failing=None):
        says(text, "DistributedError", "rank 1 of 3", r"params\['0.weight'\] is \(4, 2\)", r"\(3, 2\) .* on rank 0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_duration": "2ep"}, "max_duration is '?2ep"),
        ({"algorithms": [pl.algorithms.sam()]}, r"algorithms is .*sam"),
        ({"microbatch_size": 1}, "microbatch_size is '?1"),
        ({"clip_grad": 0.1}, "clip_grad is '?0.1"),
        ({"optimizer": pl.optim.sgd(lr=0.2)}, r"optimizer is .*0\.2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_rank_with_other_settings(pool, options, what):
    def program(rank):
        pl.run(fit("replicate", **(options if rank == 1 else {})))

    for text, _ in told(pool, program, failing=None):
        says(text, "DistributedError", "rank 1 of 3", "about to do something else", what)


def test_a_rank_that_evaluates_alone(pool):
    def program(rank):
        data = [(torch.ones(6, 2), torch.zeros(6, 1))]
        pl.run(fit("replicate", evaluators=data, eval_interval=lambda state: rank == 1))

    for text, _ in told(pool, program, failing=None):
        says(text, "DistributedError", "ranks are at different events", "EVAL", "rank 1 is about to come to EVAL_END")


@pytest.mark.slow
def test_training_resumes_in_a_new_stream_after_a_fault(pool, kind):
    def program(rank):
        kept = None
        try:
            for event, state in fit(kind):
                if event is Event.BATCH_END and state.timestamp.batch == 2:
                    kept = state
                if rank == 1 and event is Event.BEFORE_LOSS and state.timestamp.batch == 2:
                    raise ValueError
        except (ValueError, pl.DistributedError):
            pass
        assert kept is not None
        if kind == "shard":
            return pl.run(fit(kind)).timestamp.batch  # its State is in parts that a broken group held
        return _go_on(kept)

    def _go_on(state):
        data = [(torch.ones(6, 2), torch.zeros(6, 1)) for _ in range(BATCHES)]
        stream = pl.fit(
            state,
            data,
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ep",
            parallel=Parallel(kind=kind, timeout=TIMEOUT),
        )
        return pl.run(stream).timestamp.batch

    assert pool.run(program) == [4, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("unused", [None, True, False])
def test_parameters_that_only_some_batches_reach(pool, unused):
    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.one(x) if x[0, 0] > 0 else self.two(x)

    def program(rank):
        torch.manual_seed(0)
        # Each rank reaches one half, and the last batch the first one alone.
        data = [(torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, 2.0]]), torch.zeros(3, 1))]
        data.append((data[0][0].abs(), data[0][1]))
        stream = pl.fit(
            Halves(),
            data,
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.adamw(lr=0.1),
            max_duration="1ep",
            parallel=Parallel(find_unused_parameters=unused, timeout=TIMEOUT),
        )
        grads = [dict(state.grads) for event, state in stream if event is Event.AFTER_TRAIN_BATCH]
        return [{name: tensor is None for name, tensor in each.items()} for each in grads]

    if unused is False:
        texts = [text for text, _ in told(pool, program, failing=None)]
        assert any("find_unused_parameters=True" in text for text in texts)
        return
    for first, last in pool.run(program):
        assert not any(first.values())
        assert [name for name, missing in last.items() if missing] == ["two.weight", "two.bias"]
