"""Many ranks: the same loop under ``torchrun``, replicated or sharded, behind one seam, ``stages/engine.py``.

``fit(..., parallel="replicate")``: n ranks on their parts of each batch train as one does on the whole. Every rank
yields the same events, with equal timestamps, losses, gradients and metrics.

>>> import pure_loop as pl
>>> pl.distributed.rank(), pl.distributed.world_size()
(0, 1)

May import ``stages`` and what is below. Begin with ``parallel.py`` (what ``parallel=`` can be) and ``multi_rank.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily
from pure_loop._internal.processes import data_rank, rank, world_size
from pure_loop._internal.tree_ops import shard_like
from pure_loop.distributed.parallel import Parallel

if TYPE_CHECKING:
    from pure_loop.distributed.scripts import mean

__all__ = ["Parallel", "data_rank", "mean", "rank", "shard_like", "world_size"]


__getattr__ = _lazily(__name__, {"scripts": ["mean"]})


def __dir__() -> list[str]:
    return list(__all__)
