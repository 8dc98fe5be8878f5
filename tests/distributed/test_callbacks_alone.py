"""A callback on the first rank alone that begins what all ranks do together is an error, and no wait for ever."""

from __future__ import annotations

import pytest
import torch

import pure_loop as pl
from tests.support.worlds import an_epoch, pool

DATA = [(torch.ones(4, 6), torch.zeros(4, 4))] * 2


def trained(all_ranks, parallel, read):
    """What the callback read, or the error of the first rank."""

    def program(rank):
        norms = []

        class Report(pl.Callback):
            def batch_end(self, state, logger):
                norms.append(float(read(state)))

        Report.all_ranks = all_ranks
        torch.manual_seed(0)
        try:
            pl.run(an_epoch(torch.nn.Linear(6, 4), DATA, callbacks=[Report()], parallel=parallel))
        except pl.DistributedError as error:
            return str(error)
        return norms

    return pool().run(program)


def norm(state):
    return pl.gradients.global_norm(state.params)


def module(state):
    return state.module().weight.sum()


@pytest.mark.parametrize("read", [norm, module])
def test_shards(read):
    first, second = trained(False, "shard", read)
    assert first.startswith("callback Report runs on the first rank alone, and reads shards that all ranks read")
    assert "all_ranks = True" in first
    assert "rank 0" in second
    one, other = trained(True, "shard", read)
    assert one == other
    assert len(one) == 2


def test_replicas_are_read_alone():
    first, second = trained(False, "replicate", norm)
    assert len(first) == 2
    assert second == []
