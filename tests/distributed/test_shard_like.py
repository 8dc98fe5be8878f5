"""Noise for parameters and gradients, drawn alike on all ranks, each of which takes its part."""

from __future__ import annotations

import optree
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.compile import interpreted
from pure_loop.distributed import shard_like
from pure_loop.errors import ArgumentError
from pure_loop.order import Plan
from pure_loop.testing.laws.ranks import compare, whole, witness
from pure_loop.testing.ranks import RankError
from tests.support.worlds import KINDS, an_epoch, pool

CASE = testing.Case(plan=Plan(batches=(7, 4), max_duration="5ba", microbatch_size=2), problem="tied")
FIELDS = {"grads": Event.AFTER_TRAIN_BATCH, "params": Event.BATCH_END}
SQUARE = [(torch.ones(2, 2), torch.ones(2, 2))]


def changed(field, change, name="changes"):
    """An algorithm that changes each tensor of a field."""

    def function(state):
        return state.replace(**{field: {name: change(state, each) for name, each in getattr(state, field).items()}})

    return pl.Algorithm(name, {FIELDS[field]: function})


def noise(field, *, in_parts=True):
    def noisy(state, tensor):
        random = pl.random.generator(state.seed, field, state.timestamp.batch)
        drawn = torch.randn(tensor.shape, dtype=tensor.dtype, generator=random)
        return tensor + 0.1 * (shard_like(drawn, tensor) if in_parts else drawn)

    return changed(field, noisy, "noise")


def halves(field):
    """Whole tensors, of which each rank takes its part."""
    return changed(field, lambda state, tensor: 0.5 * full_tensor(tensor))


@pytest.mark.parametrize("field", FIELDS)
def test_what_an_algorithm_adds_or_puts_in_is_that_of_one_rank(field):
    for algorithm in (noise(field), halves(field)):
        alone = witness(whole(CASE, 2).stream(algorithm))
        for kind in KINDS:
            for seen in pool(kind=kind).run(
                lambda rank, kind=kind, algorithm=algorithm: witness(CASE.stream(algorithm, parallel=kind))
            ):
                compare(seen, alone, kind, 1e-5)


def test_a_part_is_one_of_the_whole_in_memory_of_its_own():
    def program(rank):
        state = pl.run(an_epoch(nn.Linear(3, 5), [(torch.ones(4, 3), torch.ones(4, 5))], parallel="shard"))
        tensor = state.params["weight"]
        everything = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)
        parts = shard_like(everything, tensor)
        assert parts.placements == tensor.placements
        assert shard_like(parts, tensor) is parts
        assert shard_like(torch.ones(5), state.params["bias"]).shape == (5,)
        local = parts.to_local()
        assert shard_like(everything.t().contiguous().t(), tensor).to_local().is_contiguous()
        assert torch.equal(local, everything.chunk(2)[rank])
        assert local.shape == tensor.to_local().shape
        assert local.untyped_storage().nbytes() == local.numel() * 8
        assert torch.equal(parts.full_tensor(), everything)

    pool(kind="shard").run(program)
    given = torch.ones(2, 3)
    assert shard_like(given, torch.zeros(2, 3)) is given
    with pytest.raises(ArgumentError, match=r"whole has shape \(3, 2\), and tensor has shape \(2, 3\)"):
        shard_like(given.t(), given)


def test_who_forgets_it_is_told():
    says = r"raised by algorithm 'noise'(?s:.)*shard_like\(whole, state\.params\[name\]\)"
    with pytest.raises(RankError, match=says):
        pool(kind="shard").run(
            lambda rank: pl.run(
                an_epoch(nn.Linear(2, 2), SQUARE, algorithms=[noise("grads", in_parts=False)], parallel="shard")
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "event", "compile"),
    [
        ("grads", Event.AFTER_TRAIN_BATCH, False),
        ("params", Event.BATCH_START, True),
        ("params", Event.BATCH_END, False),
        ("opt_state", Event.BATCH_END, True),
    ],
)
def test_what_an_algorithm_leaves_in_other_parts_is_refused_by_name(field, event, compile):
    """Slow: each is a failed program, after which ranks form a new group."""

    def gathered(leaf):
        return leaf.redistribute(placements=[Replicate()]) if hasattr(leaf, "placements") else leaf

    def gathers(state):
        return state.replace(**{field: optree.tree_map(gathered, getattr(state, field), namespace="pure_loop")})

    def program(rank):
        options = {"optimizer": pl.optim.adamw(lr=0.1), "parallel": "shard", "compile": compile}
        with interpreted():
            pl.run(an_epoch(nn.Linear(2, 2), SQUARE, algorithms=[pl.Algorithm("gathers", {event: gathers})], **options))

    parts = r"from parts by \(Shard\(dim=0\),\) to parts by \(Replicate\(\),\)"
    says = rf"'gathers' at {event.name} changed {field}\[.*{'parts by' if field == 'opt_state' else parts}"
    with pytest.raises(RankError, match=says):
        pool(kind="shard").run(program)
