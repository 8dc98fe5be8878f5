"""Optimizers as pairs of pure functions: ``init(params)`` and ``update(grads, opt_state, params, timestamp)``.

May import ``schedules``, ``state``, ``frozendict`` and what is below. Begin with ``optimizer.py``;
``kernels.py`` runs steps over lists of tensors, and each other file is one rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily
from pure_loop.optim.optimizer import Optimizer, rate_at

if TYPE_CHECKING:
    from pure_loop.optim.adam import adam, adamw
    from pure_loop.optim.from_torch import from_torch
    from pure_loop.optim.lamb import lamb
    from pure_loop.optim.lion import lion
    from pure_loop.optim.master_weights import master_weights
    from pure_loop.optim.muon import muon
    from pure_loop.optim.partition import partition
    from pure_loop.optim.sgd import sgd
    from pure_loop.optim.state_dicts import evaluation_params, load_state_dict, to_state_dict

__all__ = [
    "Optimizer",
    "adam",
    "adamw",
    "evaluation_params",
    "from_torch",
    "lamb",
    "lion",
    "load_state_dict",
    "master_weights",
    "muon",
    "partition",
    "rate_at",
    "sgd",
    "to_state_dict",
]

if not TYPE_CHECKING:
    __getattr__ = _lazily(
        __name__,
        {
            "adam": ("adamw",),
            "state_dicts": ("evaluation_params", "load_state_dict", "to_state_dict"),
        },
        __all__,
    )


def __dir__() -> list[str]:
    return __all__
