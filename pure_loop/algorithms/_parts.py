"""Batches of a step that has several (``fit(batches_per_step=)``), one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pure_loop.data.group import Batches
from pure_loop.random import derive
from pure_loop.state import State

__all__ = ["by_part"]


def by_part(handler: Callable[..., State]) -> Callable[..., State]:
    """A handler that changes ``state.batch`` alone, applied to each batch of a step.

    Each batch has draws of its own: the handler receives a State with another seed for each but the first.
    """

    @functools.wraps(handler)
    def changed(state: State, *stages: Any) -> State:
        if type(state.batch) is not Batches:
            return handler(state, *stages)
        parts = []
        for number, part in enumerate(state.batch):
            seed = derive(state.seed, "part", number) if number else state.seed
            parts.append(handler(state.replace(batch=part, seed=seed), *stages).batch)
        return state.replace(batch=Batches(tuple(parts)))

    return changed
