"""Taps: a law's own code around every call of an algorithm's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs

from pure_loop.algorithm import Algorithm, bind
from pure_loop.event import Event
from pure_loop.random.guards import guard, is_users
from pure_loop.state import State
from pure_loop.testing.subject import Subject
from pure_loop.testing.violation import moment

__all__ = ["Call", "Tap", "tapped"]


@attrs.frozen
class Call:
    """One call of a function of an algorithm.

    Attributes:
        kind: ``"handler"``, ``"when"`` or ``"init"``.
        algorithm: its name.
        position: of the algorithm in the list.
        event: the event of the State.
        index: of the handler among those of the event.
        state: the first argument.
        rest: further arguments: the stages, or nothing.
        function: the function itself.
    """

    kind: str
    algorithm: str
    position: int
    event: Event
    index: int
    state: State
    rest: tuple[Any, ...]
    function: Callable[..., Any]

    def __call__(self) -> Any:
        """Call the function as the loop would."""
        return self._drawing(self.function)

    def _drawing(self, function: Callable[..., Any]) -> Any:
        """Call it with the global generators seeded, as the loop does for code of the user's."""
        path = (self.kind, self.algorithm, self.index)
        with guard(self.state.replace(event=self.event), path) if is_users(function) else nullcontext():
            return function(self.state, *self.rest)

    def of(self, fresh: Sequence[Algorithm]) -> Any:
        """Call the same function of other instances."""
        algorithm = fresh[self.position]
        if self.kind == "handler":
            return self._drawing(algorithm.handlers[self.event][self.index])
        function = algorithm.init if self.kind == "init" else algorithm.when
        assert function is not None
        return self._drawing(function)

    @property
    def name(self) -> str:
        """The name of the function in messages."""
        part = {"handler": "", "when": "the predicate `when` of ", "init": "`init` of "}[self.kind]
        return f"{part}algorithm {self.algorithm!r}"

    @property
    def where(self) -> str:
        """The name of the moment in messages."""
        return moment(self.state)


Tap = Callable[[Call], Any]


def tapped(subject: Subject, algorithms: Sequence[Algorithm], tap: Tap) -> tuple[Algorithm, ...]:
    """The algorithms, with ``tap`` called instead of each of their functions; it returns what the function would."""
    subject.watched = True
    return tuple(_tapped(subject, algorithm, position, tap) for position, algorithm in enumerate(algorithms))


def _tapped(subject: Subject, algorithm: Algorithm, position: int, tap: Tap) -> Algorithm:
    name = algorithm.name

    def around(kind: str, function: Callable[..., Any], event: Event | None = None, index: int = 0) -> Any:
        def call(state: State, *rest: Any) -> Any:
            if kind == "init" and any(tensor.is_meta for tensor in state.params.values()):
                return function(state, *rest)  # the loop reads shapes from it, and no State receives it
            at = event if event is not None else state.event or Event.INIT
            if kind == "handler":
                subject.fired[name, at] += 1
            return tap(Call(kind, name, position, at, index, state, rest, function))

        return call

    def handler(function: Callable[..., Any], event: Event, index: int, takes_stages: bool) -> Callable[..., Any]:
        call = around("handler", function, event, index)
        # The loop reads from the signature whether the handler takes the stages.
        if takes_stages:
            return lambda state, stages: call(state, stages)
        return lambda state: call(state)

    handlers = {
        event: [handler(bound.function, event, index, bound.takes_stages) for index, bound in enumerate(listed)]
        for event, listed in bind([algorithm]).items()
    }
    init = None if algorithm.init is None else around("init", algorithm.init)
    when = None if algorithm.when is None else around("when", algorithm.when)
    return Algorithm(
        name,
        handlers,
        None if init is None else lambda state: init(state),
        when=None if when is None else lambda state: when(state),
    )
