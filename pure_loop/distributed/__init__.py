"""Many ranks: the same loop under ``torchrun``, replicated or sharded, behind one seam (:mod:`pure_loop.engine`).

``fit(..., parallel="replicate")``: n ranks on their parts of each batch train as one does on the whole. Every rank
yields the same events, with equal timestamps, losses, gradients and metrics.

>>> import pure_loop as pl
>>> pl.distributed.rank(), pl.distributed.world_size()
(0, 1)
"""

from __future__ import annotations

from pure_loop._parts import shard_like
from pure_loop.distributed.parallel import Parallel, rank, world_size

__all__ = ["Parallel", "rank", "shard_like", "world_size"]
