"""Parts of tensors: what algorithms add to them or leave in other parts, and wholes that are gathered of them."""

from __future__ import annotations

import re
from unittest.mock import patch

import optree
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.multiprocessing.reductions import StorageWeakRef

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.tree_ops import full_tensor, is_sharded
from pure_loop.compile import interpreted, trees
from pure_loop.distributed import shard_like
from pure_loop.distributed.parameters import UnshardedParameters
from pure_loop.errors import ArgumentError
from pure_loop.order import Plan
from pure_loop.testing.laws.ranks import compare, whole, witness
from tests.support.worlds import KINDS, an_epoch, pool, told

SQUARE = [(torch.ones(2, 2), torch.ones(2, 2))]
FIELDS = {"grads": Event.AFTER_TRAIN_BATCH, "params": Event.BATCH_END}


def changed(field, change):
    """An algorithm that changes each tensor of a field."""

    def function(state):
        return state.replace(**{field: {name: change(state, each) for name, each in getattr(state, field).items()}})

    return pl.Algorithm(change.__name__, {FIELDS[field]: function})


def noise(state, tensor, put=shard_like):
    random = pl.random.generator(state.seed, "noise", state.timestamp.batch)
    drawn = torch.randn(tensor.shape, dtype=tensor.dtype, generator=random)
    return tensor + 0.1 * put(drawn, tensor)


def halves(state, tensor):
    """Whole tensors, of which each rank takes its part."""
    return 0.5 * full_tensor(tensor)


@pytest.mark.slow  # waits for ranks that do not come
def test_one_rank_that_gathers_alone_is_told_so_and_ends_no_process(tmp_path):
    """In the loop's body and after the run; whole ones are gathered before and after by all ranks."""
    data, parallel = [(torch.ones(4, 2), torch.ones(4, 2))] * 2, pl.distributed.Parallel(kind="shard", timeout=5)
    calls = [
        lambda state: state.module(),
        lambda state: pl.export(state, tmp_path / "net.safetensors", "safetensors"),
        lambda state: pl.save(state, tmp_path / "net.safetensors", weights_only=True),
    ]

    def body(rank):
        for event, state in an_epoch(nn.Linear(2, 2), data, parallel=parallel):
            if event is Event.BATCH_END and rank == 0:
                state.module()
        state.module()

    def program(rank):
        state = pl.run(an_epoch(nn.Linear(2, 2), data, parallel=parallel))
        found = []
        for call in calls if rank == 0 else ():
            with pytest.raises(pl.errors.DistributedError) as caught:
                call(state)
            found.append(str(caught.value))
        torch.distributed.barrier()  # longer than a rank waits
        weight = state.module().weight.tolist()
        with pytest.raises(pl.errors.DistributedError) as caught:
            list(body(rank))
        return weight, [*found, str(caught.value)]

    (weight, first), (other, second) = pool(kind="shard").run(program)
    assert weight == other
    assert len(first) == 4
    for said in first:
        assert "all ranks call it together, and of 2 ranks rank 0 waited 5 s for 1" in said
    assert "rank 0 left the loop at BATCH_END of batch 1" in second[0]


def test_what_an_algorithm_adds_or_puts_in_is_that_of_one_rank():
    """Noise is drawn alike on all ranks, each of which takes its part."""
    case = testing.Case(plan=Plan(batches=(7, 4), max_duration="3ba", microbatch_size=2), problem="tied")
    ways = [(field, change) for field in FIELDS for change in (noise, halves)]

    def program(rank):
        return [[witness(case.stream(changed(*way), parallel=kind)) for way in ways] for kind in KINDS]

    alone = [witness(whole(case, 2).stream(changed(*way))) for way in ways]
    for rank in pool().run(program):
        for found, kind in zip(rank, KINDS, strict=True):
            for seen, wanted in zip(found, alone, strict=True):
                compare(seen, wanted, kind, 1e-5)


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
        assert local.untyped_storage().nbytes() == local.numel() * 8
        assert torch.equal(parts.full_tensor(), everything)

    pool(kind="shard").run(program)
    given = torch.ones(2, 3)
    assert shard_like(given, torch.zeros(2, 3)) is given
    with pytest.raises(ArgumentError, match=r"whole has shape \(3, 2\), and tensor has shape \(2, 3\)"):
        shard_like(given.t(), given)


def gathering(field, event):
    """An algorithm that leaves whole tensors on each rank, as parts."""

    def gathered(leaf):
        return leaf.redistribute(placements=[Replicate()]) if hasattr(leaf, "placements") else leaf

    def gathers(state):
        return state.replace(**{field: optree.tree_map(gathered, getattr(state, field), namespace="pure_loop")})

    return pl.Algorithm("gathers", {event: gathers})


WAYS = [("grads", Event.AFTER_TRAIN_BATCH), ("params", Event.BATCH_END), ("opt_state", Event.BATCH_END)]
WAYS += [("params", Event.BATCH_START), ("opt_state", Event.BATCH_END)]


def test_what_an_algorithm_leaves_in_other_parts_is_refused_by_name():
    """One that forgets ``shard_like`` is told."""

    def program(rank):
        options = {"optimizer": pl.optim.adamw(lr=0.1), "parallel": "shard"}
        forgets = changed("grads", lambda state, tensor: noise(state, tensor, lambda drawn, _: drawn))
        tried = [(each, {}) for each in (forgets, *(gathering(*way) for way in WAYS[:3]))]
        tried += [(gathering(*way), {"compile": True}) for way in WAYS[3:]]
        with interpreted():
            return [
                told(an_epoch(nn.Linear(2, 2), SQUARE, algorithms=[each], **options, **more)) for each, more in tried
            ]

    parts = r"from parts by \(Shard\(dim=0\),\) to parts by \(Replicate\(\),\)"
    for forgotten, *texts in pool(kind="shard").run(program):
        assert re.search(r"raised by algorithm(?s:.)*shard_like\(whole, state\.params\[name\]\)", forgotten)
        for text, (field, event) in zip(texts, WAYS, strict=True):
            said = rf"'gathers' at {event.name} changed {field}\[.*{'parts by' if field == 'opt_state' else parts}"
            assert re.search(said, text), text


class Deciding(nn.Linear):
    """Which can't be traced."""

    def forward(self, x):
        return super().forward(x) if bool((x > 0).all()) else x[:, :1]


def test_a_rank_holds_wholes_while_it_computes_and_no_longer_and_graphs_are_given_no_parts():
    """Of an algorithm's memory neither, nor of the optimizer's."""
    batch = (torch.ones(4, 3), torch.ones(4, 1))
    real, describes = UnshardedParameters.of, trees.describe

    def program(rank):
        made, alive, asked = [], [], []

        def of(self, params):
            found = real(self, params)
            made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in found.values())
            return found

        def describe(tensor):
            asked.append(is_sharded(tensor))
            return describes(tensor)

        options = {"parallel": "shard", "compile": "where possible", "evaluators": {"val": [batch]}}
        options |= {"algorithms": pl.algorithms.ema(half_life="1ba"), "optimizer": pl.optim.adamw(lr=0.1)}
        options |= {"eval_interval": "1ba", "microbatch_size": 1}
        for model, watch in ((nn.Linear, {Event.BATCH_END}), (Deciding, None)):
            with interpreted(), patch.object(UnshardedParameters, "of", of), patch.object(trees, "describe", describe):
                for event, state in an_epoch(model(3, 1), [batch] * 3, watch=watch, **options):
                    if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_END):
                        alive.append(sum(not each.expired() for each in made))
                        kept = optree.tree_leaves((state.algorithm_state, state.opt_state), namespace=NAMESPACE)
                        assert any(map(is_sharded, kept))
                        del kept
            assert made
            assert set(alive) == {0}
            assert asked
            assert not any(asked)
            del made[:], alive[:], asked[:]

    pool(kind="shard").run(program)
