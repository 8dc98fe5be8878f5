"""Scripts of the user's own on two ranks: a GAN of two losses and two optimizers trains as on one."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import pure_loop as pl
from pure_loop import Event
from tests.support.worlds import pool, told


def gan():
    generator = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    return nn.ModuleDict({"generator": generator, "critic": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))})


OPTIMIZERS = {"critic": pl.optim.adam(lr=1e-2), "generator": pl.optim.sgd(lr=1e-1, momentum=0.9)}


def losses(models, player, real, noise):
    fake, critic = models["generator"](noise), models["critic"]
    if player == "critic":
        return softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
    return softplus(-critic(fake)).mean()


def adversarial(state, batches, *, exchanges=True, samples=7):
    rank, ranks = pl.distributed.rank(), pl.distributed.world_size()
    while state.timestamp < f"{batches}ba":
        random = pl.random.generator(state.seed, "batch", state.timestamp.batch)
        real, noise = torch.randn(2, samples, 2, generator=random, dtype=torch.float64)[:, rank::ranks]
        state = yield Event.BATCH_START, state.replace(batch=real + 3.0)
        total = 0.0
        mean = partial(pl.distributed.mean, weight=len(real)) if exchanges else lambda tree: tree
        for player, optimizer in OPTIMIZERS.items():
            loss = partial(losses, player=player, real=real + 3.0, noise=noise)
            state = pl.stages.update_part(state, player, loss, optimizer, mean=mean)
            total = total + state.loss
        state = yield Event.BATCH_END, state.replace(loss={"total": total}).count_batch(samples=samples)
    return state


def start(seed=0):
    with pl.random.seeded(seed):
        return pl.State.create(gan().double())


def script(seed=0, batches=6, parallel="replicate", state=None, callbacks=(), **options):
    steps = adversarial(start(seed) if state is None else state, batches, **options)
    return pl.drive(steps, callbacks=callbacks, algorithms=[pl.algorithms.ema(half_life="3ba")], parallel=parallel)


def trained(**options):
    """The parameters, and what a callback saw."""
    counted = []
    callbacks = [lambda event, state: counted.append(float(state.loss["total"])) if event is Event.BATCH_END else None]
    return dict(pl.run(script(callbacks=callbacks, **options)).params), counted


def test_two_losses_and_two_optimizers_on_two_ranks_are_those_of_one():
    """Batches of 7 samples, of which the ranks have 4 and 3; what callbacks see is on rank 0 alone; it resumes."""

    def program(rank):
        return *trained(), trained(state=pl.run(script(batches=3)))[0]

    params, counted = trained()
    (one, seen, resumed), (other, unseen, _) = pool().run(program)
    assert seen == pytest.approx(counted, rel=1e-12)
    assert unseen == []
    for name, tensor in params.items():
        assert torch.equal(one[name], other[name])
        for found in (one, resumed):
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


WRONG = [
    (lambda rank: script(parallel=None), "parallel=None, and this process is rank"),
    (lambda rank: script(parallel="shard"), "a script of your own computes with whole tensors"),
    (lambda rank: script(parallel=pl.distributed.Parallel(data="own")), "takes its part of the data itself"),
    (lambda rank: script(exchanges=False), "another State than rank 0 after BATCH_END of batch 1, .*mean"),
    (lambda rank: script(seed=rank), "resumes from another State than rank 0"),
    (lambda rank: script(batches=4 + rank), "different events|not at the same call"),
    (lambda rank: pl.distributed.mean(torch.ones(1)), "by no script that ranks run together"),
]


def test_what_would_train_apart_is_refused_and_a_rank_that_fails_is_named():
    """Apart on purpose, each rank has callbacks of its own."""

    def fails(state, rank):
        state = yield Event.BATCH_START, state
        if rank == 1:
            raise ValueError("no more")
        pl.distributed.mean(state.params)
        return state

    def apart(state):
        state = yield Event.BATCH_START, state
        return state

    def program(rank):
        counted = []
        callbacks = [lambda event, state: counted.append(event)]
        pl.run(pl.drive(apart(start(rank)), callbacks=callbacks, parallel=False))
        assert counted == [Event.BATCH_START]
        texts = []
        for make, _ in WRONG:
            with pytest.raises(pl.PureLoopError) as caught:
                pl.run(make(rank))
            texts.append(str(caught.value))
        return *texts, told(pl.drive(fails(start(), rank), parallel="replicate"))

    one, other = pool().run(program)
    for texts in (one, other):
        for text, (_, message) in zip(texts, WRONG, strict=False):
            assert re.search(message, text), text
    assert "rank 1 raised ValueError after BATCH_START of batch 0: no more" in one[-1]
    assert other[-1].startswith("ValueError: no more")
    for weight in (-1, float("nan"), "4"):
        with pytest.raises(pl.errors.ArgumentError, match="give a number of at least 0"):
            pl.distributed.mean(torch.ones(1), weight=weight)
