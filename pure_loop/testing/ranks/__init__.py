"""Several ranks: simulated in this process, exactly and in microseconds, or real processes that talk through gloo.

>>> import torch
>>> def program(rank):
...     total = torch.tensor([1.0 + rank])
...     torch.distributed.all_reduce(total)
...     return total.item()
>>> [ran.result for ran in simulate(program, 2)]
[3.0, 3.0]
"""

from __future__ import annotations

from pure_loop.testing.ranks._collectives import Collective, CollectiveError, UnsupportedCollectiveError
from pure_loop.testing.ranks.processes import Pool, RankError, shared_pool
from pure_loop.testing.ranks.simulation import NoSimulationError, Ran, simulate

__all__ = [
    "Collective",
    "CollectiveError",
    "NoSimulationError",
    "Pool",
    "Ran",
    "RankError",
    "UnsupportedCollectiveError",
    "shared_pool",
    "simulate",
]


def __dir__() -> list[str]:
    return list(__all__)
