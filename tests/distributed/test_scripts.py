"""Scripts of the user's own on two ranks: a GAN of two losses and two optimizers trains as on one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import pure_loop as pl
from pure_loop import Event, FrozenDict
from tests.support.worlds import pool


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


OPTIMIZERS = {"critic": pl.optim.adam(lr=1e-2), "generator": pl.optim.sgd(lr=1e-1, momentum=0.9)}


def losses(gan, player, real, noise):
    fake = gan.generator[2](gan.generator[0](noise))
    if player == "critic":
        return softplus(-gan.critic(real)).mean() + softplus(gan.critic(fake.detach())).mean()
    return softplus(-gan.critic(fake)).mean()


def params_of(state, player):
    return FrozenDict((name, tensor) for name, tensor in state.params.items() if name.startswith(player))


def adversarial(state, batches, samples=7, *, exchanges=True):
    rank, ranks = pl.distributed.rank(), pl.distributed.world_size()
    while state.timestamp < f"{batches}ba":
        random = pl.random.generator(state.seed, "batch", state.timestamp.batch)
        real, noise = torch.randn(2, samples, 2, generator=random, dtype=torch.float64)[:, rank::ranks]
        state = yield Event.BATCH_START, state.replace(batch=real + 3.0)
        total = 0.0
        for player, optimizer in OPTIMIZERS.items():

            def loss(params, player=player, state=state, real=real, noise=noise):
                everything = FrozenDict({**state.params, **params})
                play = partial(losses, player=player, real=real + 3.0, noise=noise)
                return state.model.apply(play, everything, state.buffers, training=True)[0]

            params = params_of(state, player)
            value, grads = pl.stages.value_and_grad(loss, params)
            if exchanges:
                value, grads = pl.distributed.mean((value, grads), weight=len(real))
            params, opt_state = optimizer.update(grads, state.opt_state[player], params, state.timestamp)
            opt_state = {**state.opt_state, player: opt_state}
            state = state.replace(params={**state.params, **params}, opt_state=opt_state)
            total = total + value
        before, now = state.timestamp, state.timestamp.next_batch(samples=samples)
        state = state.replace(loss={"total": total}, timestamp=now, previous_timestamp=before)
        state = yield Event.BATCH_END, state
    return state


def start(seed=0):
    with pl.random.seeded(seed):
        state = pl.State.create(GAN().double())
    return state.replace(opt_state={name: each.init(params_of(state, name)) for name, each in OPTIMIZERS.items()})


def trained(rank, parallel="replicate", **options):
    counted = []
    callbacks = [lambda event, state: counted.append(float(state.loss["total"])) if event is Event.BATCH_END else None]
    average = pl.algorithms.ema(half_life="3ba")
    stream = pl.drive(adversarial(start(), 6), callbacks=callbacks, algorithms=[average], parallel=parallel, **options)
    state = pl.run(stream)
    return {name: tensor.clone() for name, tensor in state.params.items()}, counted


def test_two_losses_and_two_optimizers_on_two_ranks_are_those_of_one():
    """Batches of 7 samples, of which the ranks have 4 and 3; what callbacks see is on rank 0 alone."""
    params, counted = trained(0)
    (one, seen), (other, unseen) = pool().run(trained)
    assert seen == pytest.approx(counted, rel=1e-12)
    assert unseen == []
    for name, tensor in params.items():
        assert torch.equal(one[name], other[name])
        assert torch.allclose(one[name], tensor, rtol=1e-10, atol=1e-12), name


def test_it_resumes_on_another_number_of_ranks():
    def program(rank):
        halfway = pl.run(pl.drive(adversarial(start(), 3), parallel="replicate"))
        return pl.run(pl.drive(adversarial(halfway, 6), parallel="replicate")).params["critic.0.weight"].clone()

    alone = program(0)
    for found in pool().run(program):
        assert torch.allclose(found, alone, rtol=1e-10, atol=1e-12)


WRONG = {
    "no parallel": (lambda rank: trained(rank, None), "parallel=None, and this process is rank"),
    "sharded": (lambda rank: trained(rank, "shard"), "a script of your own computes with whole tensors"),
    "own data": (lambda rank: trained(rank, pl.distributed.Parallel(data="own")), "takes its part of the data itself"),
    "no exchange": (
        lambda rank: pl.run(pl.drive(adversarial(start(), 6, exchanges=False), parallel="replicate")),
        "another State than rank 0 after BATCH_END of batch 1, .*mean",
    ),
    "another start": (
        lambda rank: pl.run(pl.drive(adversarial(start(rank), 6), parallel="replicate")),
        "resumes from another State than rank 0",
    ),
    "an end of its own": (
        lambda rank: pl.run(pl.drive(adversarial(start(), 4 + rank), parallel="replicate")),
        "different events|not at the same call",
    ),
    "outside of a script": (lambda rank: pl.distributed.mean(torch.ones(1)), "by no script that ranks run together"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_train_apart_is_refused(name):
    program, message = WRONG[name]

    def refused(rank):
        with pytest.raises(pl.PureLoopError, match=message):
            program(rank)

    pool().run(refused)


def test_a_rank_that_fails_is_named():
    def program(rank):
        def fails(state):
            state = yield Event.BATCH_START, state
            if rank == 1:
                raise ValueError("no more")
            pl.distributed.mean(state.params)
            return state

        try:
            pl.run(pl.drive(fails(start()), parallel="replicate"))
        except (ValueError, pl.DistributedError) as error:
            return str(error)

    one, other = pool().run(program)
    assert "rank 1 raised ValueError after BATCH_START of batch 0: no more" in one
    assert other == "no more"


def test_apart_on_purpose_each_has_callbacks_of_its_own():
    def program(rank):
        counted = []
        callbacks = [lambda event, state: counted.append(event)]
        pl.run(pl.drive(apart(start(rank)), callbacks=callbacks, parallel=False))
        return len(counted)

    assert pool().run(program) == [2, 2]


def apart(state):
    state = yield Event.BATCH_START, state
    state = yield Event.BATCH_END, state
    return state


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "4"])
def test_weights_are_numbers(weight):
    with pytest.raises(pl.ArgumentError, match="give a number of at least 0"):
        pl.distributed.mean(torch.ones(1), weight=weight)
