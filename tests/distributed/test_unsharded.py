"""Whole parameters from the parts of all ranks, and gradients on their way into parts: for sharded graphs."""

from __future__ import annotations

from unittest.mock import patch
from weakref import ref

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.tree_ops import is_sharded, local_tensor
from pure_loop.compile import interpreted, trees
from pure_loop.distributed import parameters
from pure_loop.distributed.parameters import UnshardedParameters
from pure_loop.frozendict import FrozenDict
from tests.support.tiers import examples
from tests.support.worlds import an_epoch, pool

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), min_size=1)


@pytest.mark.slow
@given(
    tensors=tensors,
    reached=st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3),
    capacity=st.sampled_from([1, 100, 25 << 20]),
    ranks=st.sampled_from([2, 2, 3]),
)
@examples(6, 200)
def test_they_are_those_of_distributed_tensors(tensors, reached, capacity, ranks):
    def program(rank):
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")

        def numbers(seed, shape, dtype):
            # Sums of small whole numbers are exact.
            return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

        wanted = {str(i): numbers(i, *each) for i, each in enumerate(tensors)}
        params = FrozenDict((name, distribute_tensor(each, mesh, [Shard(0)])) for name, each in wanted.items())
        trained = list(wanted)[::2]
        with patch.object(parameters, "_CAPACITY", capacity):
            wholes = UnshardedParameters(params, trained)
        gathered = wholes.of(params)
        assert list(gathered) == list(params)
        for name, whole in gathered.items():
            assert whole.shape == wanted[name].shape
            assert whole.dtype is wanted[name].dtype
            assert whole.is_contiguous()
            assert torch.equal(whole, wanted[name])
        assert wholes.of(params) is gathered
        assert wholes.of(FrozenDict(params)) is gathered
        # Others are gathered, and those of before are gone by then.
        before = list(map(ref, gathered.values()))
        del gathered, whole
        real = parameters._all_gather

        def gather(*given, **options):
            assert all(each() is None for each in before)
            return real(*given, **options)

        others = FrozenDict((name, each.clone()) for name, each in params.items())
        with patch.object(parameters, "_all_gather", gather):
            assert wholes.of(others).keys() == params.keys()
        total = {}
        for index, some in enumerate(reached):
            for other in range(ranks):
                found = {
                    name: numbers(100 * index + 10 * other + i, wanted[name].shape, wanted[name].dtype)
                    if some[i % len(some)]
                    else None
                    for i, name in enumerate(trained)
                }
                for name, each in found.items():
                    if each is not None:
                        total[name] = total.get(name, 0) + each
                if other == rank and index < len(reached) - 1:
                    wholes.add(found)
                elif other == rank:
                    last = found
        parts = wholes.scatter(last)
        assert not last
        assert parts.keys() == total.keys()
        for name, part in parts.items():
            like = local_tensor(distribute_tensor(total[name], mesh, [Shard(0)]))
            assert part.shape == like.shape
            assert torch.equal(part, like)
        return True

    assert all(pool(ranks, "shard").run(program))


class Deciding(nn.Linear):
    """Which can't be traced."""

    def forward(self, x):
        return super().forward(x) if bool((x > 0).all()) else x[:, :1]


@pytest.mark.slow
@pytest.mark.parametrize("watch", [{Event.BATCH_END}, None], ids=["batches", "everything"])
@pytest.mark.parametrize("model", [nn.Linear, Deciding])
def test_a_rank_holds_them_while_it_computes_and_no_longer(watch, model):
    batch = (torch.ones(4, 3), torch.ones(4, 1))

    def program(rank):
        made, alive = [], []
        real = UnshardedParameters.of

        def of(self, params):
            found = real(self, params)
            made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in found.values())
            return found

        with interpreted(), patch.object(UnshardedParameters, "of", of):
            options = {"parallel": "shard", "compile": "where possible", "evaluators": {"val": [batch]}}
            options |= {"eval_interval": "1ba", "watch": watch, "microbatch_size": 1}
            for event, _ in an_epoch(model(3, 1), [batch] * 3, **options):
                if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_END):
                    alive.append(sum(not each.expired() for each in made))
        return len(made), alive

    for made, alive in pool(kind="shard").run(program):
        assert made
        assert set(alive) == {0}


@pytest.mark.parametrize("watch", [{Event.BATCH_END}, None], ids=["batches", "everything"])
def test_graphs_are_given_no_parts(watch):
    """Of an algorithm's memory neither, nor of the optimizer's."""
    batch = (torch.ones(4, 3), torch.ones(4, 1))

    def program(rank):
        asked = []
        real = trees.describe

        def describe(tensor):
            asked.append(is_sharded(tensor))
            return real(tensor)

        with interpreted(), patch.object(trees, "describe", describe):
            options = {"parallel": "shard", "compile": True, "evaluators": {"val": [batch]}, "eval_interval": "1ba"}
            options |= {"algorithms": pl.algorithms.ema(half_life="1ba"), "optimizer": pl.optim.adamw(lr=0.1)}
            state = pl.run(an_epoch(nn.Linear(3, 1), [batch] * 3, watch=watch, **options))
        kept = optree.tree_leaves((state.algorithm_state, state.opt_state), namespace=NAMESPACE)
        return any(map(is_sharded, kept)), len(asked), any(asked)

    for kept, asked, parts in pool(kind="shard").run(program):
        assert kept
        assert asked
        assert not parts
