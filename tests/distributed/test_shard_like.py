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
from pure_loop.distributed import Parallel, shard_like
from pure_loop.errors import ArgumentError
from pure_loop.order import Plan
from pure_loop.testing.laws.ranks import compare, whole, witness
from pure_loop.testing.ranks import RankError
from tests.support.worlds import KINDS, an_epoch, pool

CASE = testing.Case(plan=Plan(batches=(7, 4), max_duration="5ba", microbatch_size=2), problem="tied")


def noise(field, event, *, in_parts=True):
    def add(state):
        random = pl.random.generator(state.seed, field, state.timestamp.batch, device=state.device)

        def noisy(tensor):
            drawn = torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=random)
            return tensor + 0.1 * (shard_like(drawn, tensor) if in_parts else drawn)

        return state.replace(**{field: {name: noisy(tensor) for name, tensor in getattr(state, field).items()}})

    return pl.Algorithm("noise", {event: add})


NOISES = {
    "gradients": lambda: noise("grads", Event.AFTER_TRAIN_BATCH),
    "parameters": lambda: noise("params", Event.BATCH_END),
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_keeps_the_law_of_ranks(name):
    testing.laws.world_size(NOISES[name], CASE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NOISES)
def test_compiled_ranks_draw_it_too(name, kind):
    alone = witness(whole(CASE, 2).stream(NOISES[name](), watch={Event.EPOCH_END}))

    def program(rank):
        with interpreted():
            options = {"compile": True, "parallel": kind, "watch": {Event.EPOCH_END}}
            return witness(
                CASE.stream(NOISES[name](), fit=lambda *args, **given: pl.fit(*args, **{**given, **options}))
            )

    for rank, seen in enumerate(pool(kind=kind).run(program)):
        compare(seen, alone, f"rank {rank}", 1e-5)


def test_a_part_is_one_of_the_whole_in_memory_of_its_own():
    def program(rank):
        data = [(torch.ones(4, 3), torch.ones(4, 5))]
        torch.manual_seed(0)
        state = pl.run(an_epoch(nn.Linear(3, 5), data, parallel=Parallel(kind="shard")))
        tensor = state.params["weight"]
        everything = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)
        parts = shard_like(everything, tensor)
        assert parts.placements == tensor.placements
        assert shard_like(parts, tensor) is parts
        assert shard_like(torch.ones(5), state.params["bias"]).shape == (5,)
        local = parts.to_local()
        assert shard_like(everything.t().contiguous().t(), tensor).to_local().is_contiguous()
        return local, local.untyped_storage().nbytes(), tensor.to_local().shape, parts.full_tensor()

    for rank, (local, bytes_held, shape, gathered) in enumerate(pool(kind="shard").run(program)):
        rows = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)
        assert torch.equal(local, rows.chunk(2)[rank])
        assert local.shape == shape
        assert bytes_held == local.numel() * 8
        assert torch.equal(gathered, rows)


def test_of_a_tensor_that_is_not_in_parts_it_is_the_whole():
    given = torch.ones(2, 3)
    assert shard_like(given, torch.zeros(2, 3)) is given
    with pytest.raises(ArgumentError, match=r"whole has shape \(3, 2\), and tensor has shape \(2, 3\)"):
        shard_like(given.t(), given)


def test_who_forgets_it_is_told():
    def program(rank):
        algorithm = noise("grads", Event.AFTER_TRAIN_BATCH, in_parts=False)
        data = [(torch.ones(2, 2), torch.ones(2, 2))]
        pl.run(an_epoch(nn.Linear(2, 2), data, algorithms=[algorithm], parallel="shard"))

    with pytest.raises(
        RankError, match=r"raised by algorithm 'noise'(?s:.)*shard_like\(whole, state\.params\[name\]\)"
    ):
        pool(kind="shard").run(program)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("field", "event"),
    [
        ("grads", Event.AFTER_TRAIN_BATCH),
        ("params", Event.BATCH_END),
        ("params", Event.BATCH_START),
        ("opt_state", Event.BATCH_END),
    ],
)
def test_what_an_algorithm_leaves_in_other_parts_is_refused_by_name(field, event, compiled):
    def program(rank):
        def changed(state):
            tree = optree.tree_map(gathered, getattr(state, field), namespace="pure_loop")
            return state.replace(**{field: tree})

        def gathered(leaf):
            return leaf.redistribute(placements=[Replicate()]) if hasattr(leaf, "placements") else leaf

        algorithm = pl.Algorithm("gathers", {event: changed})
        data = [(torch.ones(2, 2), torch.ones(2, 2))]
        with interpreted():
            options = {"optimizer": pl.optim.adamw(lr=0.1), "parallel": "shard", "compile": compiled}
            pl.run(an_epoch(nn.Linear(2, 2), data, algorithms=[algorithm], **options))

    parts = r"from parts by \(Shard\(dim=0\),\) to parts by \(Replicate\(\),\)"
    says = rf"'gathers' at {event.name} changed {field}\[.*{'parts by' if field == 'opt_state' else parts}"
    with pytest.raises(RankError, match=says):
        pool(kind="shard").run(program)


@pytest.mark.parametrize(("field", "event"), [("grads", Event.AFTER_TRAIN_BATCH), ("params", Event.BATCH_END)])
def test_of_whole_tensors_that_an_algorithm_puts_in_each_rank_takes_its_part(field, event):
    def halves(state):
        return state.replace(
            **{field: {name: 0.5 * full_tensor(tensor) for name, tensor in getattr(state, field).items()}}
        )

    def algorithm():
        return pl.Algorithm("halves", {event: halves})

    alone = witness(whole(CASE, 2).stream(algorithm()))

    def program(rank):
        return witness(CASE.stream(algorithm(), fit=lambda *args, **given: pl.fit(*args, **given, parallel="shard")))

    for rank, seen in enumerate(pool(kind="shard").run(program)):
        compare(seen, alone, f"rank {rank}", 1e-5)
