"""Batches by epoch and position: what a loader, a sampler, a generator or a list becomes.

May import: ``errors``, ``_internal``, ``random``. Begin with ``source.py``: a ``Source`` gives the batches of an epoch
from any position. ``dataloaders.py`` makes one of any dataloader, ``batch.py`` opens and moves a batch, and
``samples.py`` counts and splits it.
"""

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily

if TYPE_CHECKING:
    from pure_loop.data.position import Position
    from pure_loop.data.tokens import register_position

__all__ = ["Position", "register_position"]

if not TYPE_CHECKING:
    # What data with indices has no use for.
    __getattr__ = _lazily(__name__, {"position": ("Position",), "tokens": ("register_position",)})


def __dir__() -> list[str]:
    return list(__all__)
