"""Optimizers as pairs of pure functions: ``init(params)`` and ``update(grads, opt_state, params, timestamp)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._lazy import lazily as _lazily
from pure_loop.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from pure_loop.optim.adam import adam, adamw
    from pure_loop.optim.from_torch import from_torch
    from pure_loop.optim.partition import partition
    from pure_loop.optim.sgd import sgd

__all__ = ["Optimizer", "adam", "adamw", "from_torch", "partition", "sgd"]

__getattr__ = _lazily(
    __name__,
    {
        "adam": "pure_loop.optim.adam",
        "adamw": "pure_loop.optim.adam",
        "from_torch": "pure_loop.optim.from_torch",
        "partition": "pure_loop.optim.partition",
        "sgd": "pure_loop.optim.sgd",
    },
)


def __dir__() -> list[str]:
    return __all__
