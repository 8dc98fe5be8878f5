"""The parts of a stream of ``fit`` that tools replace, for as long as they look at it: handlers, observers, stages.

Nothing in the loop depends on that, and a stream that no tool looks at has nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any

import attrs

from pure_loop.algorithm import Handler
from pure_loop.callback import Logger
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loop.call import Fit
from pure_loop.loop.observers import Observer
from pure_loop.loop.stream import Stream, arguments_of
from pure_loop.state import State

__all__ = ["Parts", "replace_each", "set_attribute", "set_method"]


@attrs.frozen
class Parts:
    """What a stream of ``fit`` is made of: the arguments of its generator, which has not begun.

    Attributes:
        fit: the call of ``fit``.
        handlers: of algorithms, by event.
        observers: what callbacks and loggers are called by.
        loggers: those that are there.
        state: with which the stream begins.
    """

    fit: Fit
    handlers: dict[Event, tuple[Handler, ...]]
    observers: dict[Event, tuple[Observer, ...]]
    loggers: tuple[Logger, ...]
    state: State

    @classmethod
    def of(cls, stream: Any, function: str) -> Parts:
        """
        Raises:
            ArgumentTypeError: it is no stream of ``fit``.
            ArgumentError: it has begun.
        """
        pairs = iter(stream) if isinstance(stream, Stream) else None
        if not isinstance(pairs, Generator):
            raise ArgumentTypeError(
                f"{function}({type(stream).__name__}): give the stream of fit itself, pl.{function}(pl.fit(...))."
            )
        if getgeneratorstate(pairs) != GEN_CREATED:
            raise ArgumentError(
                f"{function}: the stream has begun: give a new one, pl.{function}(pl.fit(...)); from a State on, "
                f"pl.{function}(pl.fit(state, ...))."
            )
        arguments: Mapping[str, Any] = arguments_of(pairs)
        script = arguments.get("script")
        begun = arguments_of(script) if isinstance(script, Generator) else arguments
        fit, state = begun.get("fit"), begun.get("state")
        if not isinstance(fit, Fit) or not isinstance(state, State):
            raise ArgumentTypeError(
                f"{function}: this is the stream of another function than fit, or of pl.progress: give that of fit "
                f"itself, pl.{function}(pl.fit(...))."
            )
        closed = (getattr(close, "__self__", None) for close in arguments["closing"])
        loggers = tuple(item for item in closed if isinstance(item, Logger))
        return cls(fit, arguments["handlers"], arguments["observers"], loggers, state)


def set_attribute(restoring: ExitStack, target: Any, name: str, value: Any) -> None:
    """Set an attribute, of a frozen record too."""
    restoring.callback(object.__setattr__, target, name, getattr(target, name))
    object.__setattr__(target, name, value)


def set_method(restoring: ExitStack, target: Any, name: str, method: Any) -> None:
    """Put a method into an instance, until ``restoring`` ends."""
    variables: dict[str, Any] = vars(target)
    if name in variables:
        restoring.callback(variables.__setitem__, name, variables[name])
    else:
        restoring.callback(variables.pop, name)
    variables[name] = method


def replace_each(
    restoring: ExitStack, table: dict[Event, tuple[Any, ...]], replace: Callable[[Event, Any], Any]
) -> None:
    """Replace what a table has for each event, until ``restoring`` ends."""
    for event, listed in list(table.items()):
        restoring.callback(table.__setitem__, event, listed)
        table[event] = tuple(replace(event, item) for item in listed)
