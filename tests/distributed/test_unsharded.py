"""Whole parameters that sharded graphs gather from the parts of all ranks: for as long as a rank computes."""

from __future__ import annotations

from unittest.mock import patch

import optree
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.tree_ops import is_sharded
from pure_loop.compile import interpreted, trees
from pure_loop.distributed.parameters import UnshardedParameters
from tests.support.worlds import an_epoch, pool


class Deciding(nn.Linear):
    """Which can't be traced."""

    def forward(self, x):
        return super().forward(x) if bool((x > 0).all()) else x[:, :1]


@pytest.mark.parametrize(
    ("model", "watch"), [(nn.Linear, {Event.BATCH_END}), (Deciding, None)], ids=["graphs", "no graph"]
)
def test_a_rank_holds_them_while_it_computes_and_no_longer_and_graphs_are_given_no_parts(model, watch):
    """Of an algorithm's memory neither, nor of the optimizer's."""
    batch = (torch.ones(4, 3), torch.ones(4, 1))

    def program(rank):
        made, alive, asked = [], [], []
        real, describes = UnshardedParameters.of, trees.describe

        def of(self, params):
            found = real(self, params)
            made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in found.values())
            return found

        def describe(tensor):
            asked.append(is_sharded(tensor))
            return describes(tensor)

        options = {"parallel": "shard", "compile": "where possible", "evaluators": {"val": [batch]}, "watch": watch}
        options |= {"algorithms": pl.algorithms.ema(half_life="1ba"), "optimizer": pl.optim.adamw(lr=0.1)}
        options |= {"eval_interval": "1ba", "microbatch_size": 1}
        with interpreted(), patch.object(UnshardedParameters, "of", of), patch.object(trees, "describe", describe):
            for event, state in an_epoch(model(3, 1), [batch] * 3, **options):  # noqa: B007 - the last one is read below
                if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_END):
                    alive.append(sum(not each.expired() for each in made))
        kept = optree.tree_leaves((state.algorithm_state, state.opt_state), namespace=NAMESPACE)
        assert any(map(is_sharded, kept))
        return len(made), set(alive), len(asked), any(asked)

    for made, alive, asked, parts in pool(kind="shard").run(program):
        assert made
        assert alive == {0}
        assert asked
        assert not parts
