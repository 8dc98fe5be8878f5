"""What the driver calls at an event: handlers of algorithms, which return a State, and observers, which don't."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs

from pure_loop.errors import CallbackReturnError
from pure_loop.event import Event
from pure_loop.state import State

__all__ = ["Handler", "HandlerFunction", "Handlers", "Observer", "Observers", "refuse_return"]

HandlerFunction: TypeAlias = Callable[..., State]


@attrs.frozen
class Handler:
    """One function of an algorithm at one event."""

    algorithm: str
    function: HandlerFunction
    when: Callable[[State], bool] | None
    takes_stages: bool
    # Its path in seeds, if it may draw from global generators; None: it draws from none.
    path: tuple[str | int, ...] | None = None
    # Whether it is given the State of all members of an ensemble, and not that of each.
    across_members: bool = False


@attrs.frozen
class Observer:
    """One callback at one event; ``records`` is that of the callback."""

    name: str
    observe: Callable[[Event, State], object]
    records: bool = False
    # Its path in seeds, if it may draw from global generators; None: it draws from none.
    path: tuple[str | int, ...] | None = None


Handlers: TypeAlias = Mapping[Event, tuple[Handler, ...]]
Observers: TypeAlias = Mapping[Event, tuple[Observer, ...]]


def refuse_return(value: object, name: str, event: Event) -> None:
    """
    Raises:
        CallbackReturnError: always; a callback returned something.
    """
    raise CallbackReturnError(
        f"callback {name} returned {type(value).__name__} at {event.name}. Callbacks observe and return nothing; what "
        "changes training is an algorithm: @pl.algorithm(Event...) on a function State -> State."
    )
