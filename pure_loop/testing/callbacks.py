"""Callbacks and loggers on trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis.strategies import SearchStrategy

import pure_loop as pl
from pure_loop.algorithm import Algorithm, Composition
from pure_loop.callback import Callback, Logger, observers
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.testing.subject import Problems, Subject, assigned, drawn_from, fresh_copies

__all__ = ["CallbackSubject"]


class CallbackSubject(Subject):
    """A callback on trial, made anew for every run.

    Args:
        given: a function without arguments that makes a callback, a logger or a function of ``(event, state)``; or a
            callback, which is copied as it is now.
        problems, plans: what to draw cases from, as in :func:`pure_loop.testing.check_callback`.

    Attributes:
        is_logger: whether it is a logger.

    Raises:
        ArgumentTypeError: something else, or a function that makes something else.

    >>> CallbackSubject(pl.callbacks.SpeedMonitor).name
    'SpeedMonitor'
    """

    kind = "callback"
    laws = "testing.laws.of_callbacks"
    called = "make_callback"

    def __init__(self, given: Any, problems: Problems = None, plans: SearchStrategy[Any] | None = None) -> None:
        if isinstance(given, Algorithm | Composition) or not (callable(given) or isinstance(given, Callback)):
            raise ArgumentTypeError(
                f"{given!r}: give a function that makes a callback, such as its class; an algorithm is for "
                "check_algorithm."
            )
        self._make: Callable[[], Any] = fresh_copies(given) if isinstance(given, Callback) else given
        made = self.make()
        name = getattr(made, "__name__", type(made).__name__)
        self.is_logger = isinstance(made, Logger)
        super().__init__(
            name,
            ((name, event) for event in self.table(made)),
            drawn_from(problems, plans),
            assigned(self.called, given),
        )

    @classmethod
    def made_of(cls, given: Any) -> CallbackSubject:
        return given if isinstance(given, cls) else cls(given)

    def make(self) -> Any:
        """A fresh one."""
        made = self._make()
        if not isinstance(made, Callback) and (not callable(made) or isinstance(made, type | Algorithm)):
            raise ArgumentTypeError(
                f"the factory returned {made!r} of type {type(made).__name__}, and makes a pl.Callback, a pl.Logger, "
                "or a function of (event, state)."
            )
        return made

    def table(self, observer: Any) -> dict[Event, Any]:
        """The observers that the loop makes of it, by event."""
        found, _, _ = observers([] if self.is_logger else [observer], [observer] if self.is_logger else [])
        return found

    def arguments(self) -> dict[str, Any]:
        """What ``fit`` is given, so that a fresh one takes part."""
        observer = self.make()
        if self.is_logger:
            return {"loggers": [observer]}
        return {"callbacks": [observer], "loggers": [pl.Logger()]}
