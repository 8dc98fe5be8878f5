"""Callbacks and loggers as subjects of laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis.strategies import SearchStrategy

import pure_loop as pl
from pure_loop.algorithm import Algorithm, Composition
from pure_loop.callback import Callback, Logger, LoggerGroup
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loop.observers import observers
from pure_loop.state import State
from pure_loop.testing.subject import Problems, Subject, assigned, drawn_from, fresh_copies

__all__ = ["CallbackSubject"]


class CallbackSubject(Subject):
    """A callback on trial; every run gets a fresh instance.

    Args:
        value: a function without arguments that makes a callback, a logger or a function of ``(event, state)``; or a
            callback, which is copied as it is now.
        problems, plans: of the cases, as in :func:`pure_loop.testing.check_callback`.

    Attributes:
        is_logger: whether it is a logger.

    Raises:
        ArgumentTypeError: ``value`` is not, and does not make, a callback.

    >>> CallbackSubject(pl.callbacks.SpeedMonitor).name
    'SpeedMonitor'
    """

    kind = "callback"
    laws = "testing.laws.of_callbacks"
    called = "make_callback"

    def __init__(self, value: Any, problems: Problems = None, plans: SearchStrategy[Any] | None = None) -> None:
        if isinstance(value, Algorithm | Composition) or not (callable(value) or isinstance(value, Callback)):
            raise ArgumentTypeError(
                f"check_callback({value!r}): give a function that makes a callback, such as its class. For an "
                "algorithm, use check_algorithm."
            )
        self._make: Callable[[], Any] = fresh_copies(value) if isinstance(value, Callback) else value
        result = self.make()
        name = getattr(result, "__name__", type(result).__name__)
        self.is_logger = isinstance(result, Logger)
        super().__init__(
            name,
            ((name, event) for event in self.table(result)),
            drawn_from(problems, plans),
            assigned(self.called, value),
        )

    @classmethod
    def made_of(cls, value: Any) -> CallbackSubject:
        return value if isinstance(value, cls) else cls(value)

    def make(self) -> Any:
        """A fresh instance."""
        result = self._make()
        if not isinstance(result, Callback) and (not callable(result) or isinstance(result, type | Algorithm)):
            raise ArgumentTypeError(
                f"the factory returned {result!r} of type {type(result).__name__}; it must return a pl.Callback, a "
                "pl.Logger or a function of (event, state)."
            )
        return result

    def table(self, observer: Any) -> dict[Event, Any]:
        """The observers that the loop calls for it, by event."""
        result, _, _ = observers([] if self.is_logger else [observer], [observer] if self.is_logger else [])
        return result

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``fit`` that attach a fresh instance."""
        observer = self.make()
        if self.is_logger:
            return {"loggers": [observer]}
        return {"callbacks": [observer], "loggers": [pl.Logger()]}

    def without(self) -> dict[str, Any]:
        """The arguments of the runs that those with it are compared with.

        A callback with ``needs_grad_norm`` is the reason that States have a ``grad_norm``; they have one there, too.
        """
        return {"callbacks": [_Norm()]} if getattr(self.make(), "needs_grad_norm", False) else {}


class _Norm(Callback):
    """Has ``state.grad_norm`` computed, and does nothing."""

    all_ranks = needs_grad_norm = True

    def fit_start(self, state: State, logger: LoggerGroup) -> None: ...
