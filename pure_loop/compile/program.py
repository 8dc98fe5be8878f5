"""What programs, which are traced, and the scripts that call them share: States outside of an event, and handlers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from pure_loop.event import Event
from pure_loop.loop.driver import apply
from pure_loop.state import State, seal, with_fields

if TYPE_CHECKING:
    from pure_loop.compile.segment import Run, Traced

__all__ = ["Ended", "PerBatch", "at", "put_in"]

PerBatch: TypeAlias = tuple[Any, ...]
Ended: TypeAlias = "tuple[State, Tensor | None, PerBatch]"


def put_in(state: State, run: Run, names: Sequence[str]) -> State:
    """The State with what a graph gave: durable fields, and the first of the per-batch values, by these names."""
    fields = dict(zip(run.names, run.durable, strict=True))
    return with_fields(state, **fields, **dict(zip(names, run.per_batch, strict=False)))


def at(event: Event, state: State, traced: Traced) -> State:
    """The State of an event that only algorithms handle."""
    state = seal(state, event)
    result = traced.handlers.get(event)
    return state if result is None else apply(event, state, result, traced.stages)
