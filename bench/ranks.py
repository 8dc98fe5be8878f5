"""Streams of two ranks: each a process, whose digests stand one after the other."""

from __future__ import annotations

import sys

from bench.digests import Recorder
from bench.plans import Plan
from bench.streams import record
from pure_loop.testing.ranks import shared_pool

__all__ = ["record_on_ranks"]

RANKS = 2


def record_on_ranks(plan: Plan) -> Recorder:
    """The digests of what all ranks yield."""
    path = list(sys.path)

    def program(rank: int) -> Recorder:
        import torch

        sys.path[:] = path
        torch.set_num_threads(1)
        return record(plan)

    whole = Recorder()
    for rank, each in enumerate(shared_pool(RANKS, checked=False).run(program)):
        whole.names += each.names
        whole.records += each.records
        whole.notes += [f"rank {rank}: {note}" for note in each.notes]
        whole.changed += each.changed
    return whole
