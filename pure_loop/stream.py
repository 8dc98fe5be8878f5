"""What ``fit``, ``evaluate``, ``predict``, ``drive`` and ``progress`` give: pairs to iterate over, and ``run``."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NoReturn

from pure_loop.errors import ArgumentError, ArgumentTypeError, StreamAttributeError
from pure_loop.event import Event
from pure_loop.state import State

__all__ = ["Stream", "pairs_of", "refuse_no_stream", "run"]


class Stream(Generator[tuple[Event, State], None, Any]):
    """A generator of ``(event, state)`` pairs; it runs as far as it is iterated over.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> stream.timestamp
    Traceback (most recent call last):
    ...
    pure_loop.errors.StreamAttributeError: a stream has no 'timestamp': ... state = pl.run(stream); state.timestamp
    >>> state = pl.run(stream)
    >>> state.timestamp.epoch
    2
    """

    __slots__ = ("__weakref__", "_pairs")

    def __init__(self, pairs: Generator[tuple[Event, State], None, Any]) -> None:
        self._pairs = pairs

    # A loop then asks the generator itself, which costs nothing, and lets it see where its States go.
    def __iter__(self) -> Generator[tuple[Event, State], None, Any]:
        return self._pairs

    # The methods of the generator, so that no frame of Python comes between it and the caller.
    __next__ = property(attrgetter("_pairs.__next__"))
    send = property(attrgetter("_pairs.send"))
    throw = property(attrgetter("_pairs.throw"))
    close = property(attrgetter("_pairs.close"))

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a stream has no length: it is a generator, which makes its pairs as they are asked for."
        )

    def __getitem__(self, key: Any) -> NoReturn:
        what = f"state.metrics[{key!r}]" if isinstance(key, str) else "pairs = list(stream)"
        raise ArgumentTypeError(
            f"stream[{key!r}]: a stream is a generator of (event, state). Write for event, state in stream: ..., or "
            f"state = pl.run(stream) for its last State; then {what}."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("gi_"):
            return getattr(self._pairs, name)
        if name.startswith("__"):
            raise AttributeError(name)
        of_state = f"; state.{name}" if name != "state" and hasattr(State, name) else ""
        raise StreamAttributeError(
            f"a stream has no {name!r}: it is a generator of (event, state), which runs as it is iterated over. Write "
            f"for event, state in stream: ..., or, for its last State, state = pl.run(stream){of_state}"
        )

    def __repr__(self) -> str:
        return "Stream of (event, state)"


def refuse_no_stream(given: Any, function: str) -> None:
    """
    Raises:
        ArgumentTypeError: what ``function`` was given can't be iterated over, or holds no pairs for certain.
    """
    if isinstance(given, str | bytes | Mapping | type) or not isinstance(given, Iterable):
        called = " (a function: call it)" if callable(given) else ""
        raise ArgumentTypeError(f"{function}({given!r}){called}: give the stream itself, {function}(pl.fit(...)).")


def pairs_of(stream: Iterable[Any], function: str, ended: list[State] | None = None) -> Iterator[tuple[Event, State]]:
    """The pairs of a stream, of a generator around one, or of a list of pairs.

    Args:
        stream: what ``function`` was given.
        function: for the error.
        ended: where the State is put that the stream returns.

    Raises:
        ArgumentTypeError: its first element is no pair.
    """
    iterator: Any = iter(stream)
    # In a list, out of which it is taken: a variable would keep the State for as long as the others come.
    first = []
    try:
        first.append(next(iterator))
    except StopIteration as stop:
        value = stop.value
    else:
        if not (isinstance(first[0], tuple) and len(first[0]) == 2 and isinstance(first[0][1], State)):
            raise ArgumentTypeError(
                f"{function} was given a {type(stream).__name__} whose first element is of type "
                f"{type(first[0]).__name__}, no pair of an event and a State: give the stream itself, "
                f"{function}(pl.fit(...))."
            )
        yield first.pop()
        value = yield from iterator
    if ended is not None and isinstance(value, State):
        ended.append(value)


def run(stream: Iterable[tuple[Event, State]]) -> State:
    """Run a stream to its end and give its last State: with ``watch=``, that of the last event that is watched.

    Where none of them comes, it is the State in which the stream ended.

    Raises:
        ArgumentTypeError: what is given holds no pairs of an event and a State.
        ArgumentError: the stream yields nothing, and returns nothing.
    """
    refuse_no_stream(stream, "pl.run")
    state: State | None = None
    ended: list[State] = []
    for _, state in pairs_of(stream, "pl.run", ended):  # noqa: B007
        pass
    if state is not None:
        return state
    if not ended:
        raise ArgumentError("the stream yielded nothing: it was run to its end before, or is no stream of fit's own.")
    return ended.pop()
