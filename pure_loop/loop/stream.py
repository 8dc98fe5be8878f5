"""What ``fit``, ``evaluate``, ``predict``, ``drive`` and ``progress`` return: pairs to iterate over; and ``run``."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from inspect import GEN_CLOSED, GEN_CREATED, GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from operator import attrgetter
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from pure_loop._internal.closing import call_all
from pure_loop._internal.tracebacks import OWN_HIDDEN, user_place
from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingAttributeError, NeverIteratedWarning
from pure_loop.event import Event
from pure_loop.state import State

_PROGRESS = {GEN_CREATED: "not started", GEN_RUNNING: "running", GEN_SUSPENDED: "started", GEN_CLOSED: "ended"}


# Those that may have begun and not ended.
_open: WeakSet[Any] = WeakSet()


# Those that nothing has iterated over.
_waiting: WeakSet[Stream] = WeakSet()


@atexit.register
def _close_all() -> None:
    """End the streams that variables of modules keep: when these are cleared, what a stream calls to end is gone."""
    for stream in () if hasattr(sys, "last_value") else list(_waiting):
        stream.__del__()
    generators = [pairs for pairs in _open if isinstance(pairs, GeneratorType)]
    started = [pairs for pairs in generators if getgeneratorstate(pairs) == GEN_SUSPENDED]
    interrupt = getattr(sys, "last_value", None)
    if not isinstance(interrupt, KeyboardInterrupt):
        return call_all(pairs.close for pairs in started)
    # Ctrl-C in the loop's body; what streams say of it comes after the traceback.
    notes = len(getattr(interrupt, "__notes__", ()))
    call_all([partial(end_by, pairs, interrupt) for pairs in started], interrupt)
    for note in getattr(interrupt, "__notes__", [])[notes:]:
        print(note, file=sys.stderr)
    return None


class Stream(Generator[tuple[Event, State], None, Any]):
    """A generator of ``(event, state)`` pairs; it runs as far as it is iterated over.

    One that is dropped before it is iterated over or closed warns, as a coroutine that was never awaited does: nothing
    was trained. It does not where an error is being handled, or ended the program.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> stream.timestamp
    Traceback (most recent call last):
    ...
    pure_loop.errors.MissingAttributeError: a stream has no 'timestamp': ... state = pl.run(stream); state.timestamp
    >>> state = pl.run(stream)
    >>> state.timestamp.epoch
    2
    """

    __slots__ = ("__weakref__", "_pairs", "_place", "settings")

    def __init__(
        self, pairs: Generator[tuple[Event, State], None, Any], settings: Mapping[str, object] | None = None
    ) -> None:
        self._pairs = pairs
        # The arguments of fit but the model, for what compares streams; None: it is not of fit, or has begun.
        self.settings = settings
        # Where it was made, for the warning; None: something asked for its pairs.
        self._place: tuple[str, int] | None = user_place()
        _open.add(pairs)
        _waiting.add(self)

    def __del__(self) -> None:
        place = getattr(self, "_place", None)  # a copy has none
        if place is None or sys.is_finalizing() or getgeneratorstate(self._pairs) != GEN_CREATED:
            return
        self._place = None
        if sys.exception() is not None:
            return  # an error came in between
        text = (
            "the stream that is made here was never iterated over, so nothing was computed: write "
            "for event, state in stream: ..., or state = pl.run(stream). stream.close() says that it isn't needed."
        )
        warnings.warn_explicit(text, NeverIteratedWarning, *place)

    # A loop then asks the generator itself, which costs nothing, and lets it see where its States go.
    def __iter__(self) -> Generator[tuple[Event, State], None, Any]:
        self._place = self.settings = None
        _waiting.discard(self)
        return self._pairs

    def __bool__(self) -> bool:
        return True

    if TYPE_CHECKING:

        def send(self, value: None, /) -> tuple[Event, State]: ...

        def throw(self, kind: Any, value: Any = None, traceback: Any = None, /) -> tuple[Event, State]: ...

    else:
        # The methods of the generator, so that no frame of Python comes between it and the caller.
        # ``fit().close()`` drops the stream before the call: what asks for these has the generator.
        __next__, send, throw, close = (
            property(lambda self, read=attrgetter(name): read(iter(self)))
            for name in ("__next__", "send", "throw", "close")
        )

        # What follows a stream doesn't have, and type checkers say so, too.
        def __len__(self) -> NoReturn:
            raise ArgumentTypeError("a stream has no length: it is a generator, which makes each pair when it is read.")

        def __getitem__(self, key: object) -> NoReturn:
            what = f"state.metrics[{key!r}]" if isinstance(key, str) else "pairs = list(stream)"
            raise ArgumentTypeError(
                f"stream[{key!r}]: a stream is a generator of (event, state). Write for event, state in stream: ..., "
                f"or state = pl.run(stream) for its last State; then {what}."
            )

        def __getattr__(self, name: str) -> Any:
            if name.startswith("gi_"):
                return getattr(self._pairs, name)
            if name.startswith("__"):
                raise AttributeError(name)
            of_state = f"; state.{name}" if name != "state" and hasattr(State, name) else ""
            raise MissingAttributeError(
                f"a stream has no {name!r}: it is a generator of (event, state), which runs as it is iterated over. "
                f"Write for event, state in stream: ..., or, for its last State, state = pl.run(stream){of_state}"
            )

    def __repr__(self) -> str:
        # Not of which event it is: reading the frame's variables would add a reference to the State.
        return f"Stream of (event, state), {_PROGRESS[getgeneratorstate(self._pairs)]}"


def refuse_no_stream(value: object, function: str) -> None:
    """
    Raises:
        ArgumentTypeError: what ``function`` was given can't be iterated over, or holds no pairs for certain.
    """
    if isinstance(value, str | bytes | Mapping | type) or not isinstance(value, Iterable):
        called = " (a function: call it)" if callable(value) and not isinstance(value, State) else ""
        raise ArgumentTypeError(f"{function}({value!r}){called}: give the stream itself, {function}(pl.fit(...)).")


def pairs_of(stream: Iterable[Any], function: str) -> Generator[tuple[Event, State], None, Any]:
    """The pairs of a stream, of a generator around one, or of a list of pairs; returns what the stream returns.

    Args:
        stream: what ``function`` was given.
        function: for the error.

    Raises:
        ArgumentTypeError: its first element is no pair.
    """
    iterator: Any = iter(stream)
    try:
        # In no variable, which would refer to the State for as long as the others come.
        yield _checked(next(iterator), stream, function)
    except StopIteration as stop:
        return stop.value
    return (yield from iterator)


def _checked(pair: Any, stream: Any, function: str) -> tuple[Event, State]:
    """
    Raises:
        ArgumentTypeError: it is no pair of an event and a State.
    """
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], State):
        return pair
    raise ArgumentTypeError(
        f"{function} was given a {type(stream).__name__} whose first element is of type {type(pair).__name__}, no pair "
        f"of an event and a State: give the stream itself, {function}(pl.fit(...))."
    )


def end_by(stream: Iterable[object], error: BaseException) -> None:
    """Let an error between two pairs, such as Ctrl-C, end a stream as it does within it.

    Raises:
        BaseException: this error, if the stream had begun and not ended.
    """
    iterator = iter(stream) if isinstance(stream, Generator) else None
    if isinstance(iterator, GeneratorType) and getgeneratorstate(iterator) == GEN_SUSPENDED:
        with suppress(StopIteration):  # of a generator that catches it and ends
            iterator.throw(error)


def run(stream: Iterable[tuple[Event, State]]) -> State:
    """Run a stream to its end and return its last State: with ``watch=``, that of the last event that is watched.

    If there is none, it is the State in which the stream ended.

    Raises:
        ArgumentTypeError: the argument holds no pairs of an event and a State.
        ArgumentError: the stream yields nothing, and returns nothing.
    """
    refuse_no_stream(stream, "pl.run")
    state: State | None = None
    pairs = pairs_of(stream, "pl.run")
    try:
        while True:
            _, state = next(pairs)
    except StopIteration as stop:
        ended = stop.value
    except BaseException as error:
        # The stream would be left open for as long as the traceback refers to this frame.
        with OWN_HIDDEN:
            end_by(stream, error)
            raise
    if state is not None:
        return state
    if not isinstance(ended, State):
        raise ArgumentError("the stream yielded nothing: it was run to its end before, or is no stream of fit's own.")
    return ended
