"""What programs, which are traced, and the scripts that call them share: States outside of an event, and handlers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from pure_loop.driver import apply, seal
from pure_loop.event import Event
from pure_loop.state import State, holding

if TYPE_CHECKING:
    from pure_loop.compile.stretch import Run, Traced

__all__ = ["Ended", "Flight", "at", "put_in"]

Flight: TypeAlias = tuple[Any, ...]
Ended: TypeAlias = "tuple[State, Tensor | None, Flight]"


def put_in(state: State, run: Run, in_flight: Sequence[str]) -> State:
    """The State with what a graph gave: durable fields, and the first of those in flight, by these names."""
    fields = dict(zip(run.names, run.durable, strict=True))
    return holding(state, **fields, **dict(zip(in_flight, run.flight, strict=False)))


def at(event: Event, state: State, traced: Traced) -> State:
    """The State of an event that nobody but algorithms attends to."""
    state = seal(state, event)
    found = traced.handlers.get(event)
    return state if found is None else apply(event, state, found, traced.stages)
