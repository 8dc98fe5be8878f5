"""Optimizers as pairs of pure functions: ``init(params)`` and ``update(grads, opt_state, params, timestamp)``."""

from __future__ import annotations

from pure_loop.optim.adam import adam, adamw
from pure_loop.optim.from_torch import from_torch
from pure_loop.optim.optimizer import Optimizer
from pure_loop.optim.partition import partition
from pure_loop.optim.sgd import sgd

__all__ = ["Optimizer", "adam", "adamw", "from_torch", "partition", "sgd"]
