"""Which member of an ensemble the code that runs belongs to: what ``pl.each`` and the seeds of members ask.

Code that is called once for all members has no turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class _Turn:
    """The turn of one member, and whether anything has asked whose it is."""

    __slots__ = ("asked", "member")

    def __init__(self, member: int) -> None:
        self.member = member
        self.asked = False


_turn: ContextVar[_Turn | None] = ContextVar("turn", default=None)


def member() -> int | None:
    """The number of the member whose turn it is; None: it is no member's."""
    turn = _turn.get()
    if turn is None:
        return None
    turn.asked = True
    return turn.member


@contextmanager
def turn(number: int) -> Iterator[None]:
    """Inside, it is the turn of this member."""
    token = _turn.set(_Turn(number))
    try:
        yield
    finally:
        _turn.reset(token)


def of_each(function: Callable[[], T], count: int) -> list[T]:
    """What a function gives in the turn of each member: one value, where it doesn't ask whose turn it is.

    With a ``count`` of 0 there are no members.
    """
    if not count:
        return [function()]
    around = _turn.get()
    first = _Turn(0)
    token = _turn.set(first)
    try:
        values = [function()]
        if first.asked:
            if around is not None:
                around.asked = True
            for number in range(1, count):
                _turn.set(_Turn(number))
                values.append(function())
    finally:
        _turn.reset(token)
    return values


def for_all(function: Callable[[], T], count: int) -> T:
    """What a function gives in the turn of each member that trains, where that is equal for all.

    Raises:
        MembersDifferError: it is not.
    """
    values = of_each(function, count)
    running = _running.get() or [True] * count
    first = running.index(True) if len(values) > 1 else 0
    for number, value in enumerate(values):
        if running[number] and (type(value) is not type(values[first]) or value != values[first]):
            raise MembersDifferError(first, values[first], number, value)
    return values[first]


_running: ContextVar[list[bool] | None] = ContextVar("running", default=None)


@contextmanager
def among(running: list[bool]) -> Iterator[None]:
    """Inside, these members train; what the others decide is no matter."""
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)


def trains() -> bool:
    """Whether the member trains whose turn it is."""
    number, running = member(), _running.get()
    return running is None or number is None or running[number]


class MembersDifferError(Exception):
    """A value that has to be one for all members, and is another one for member ``number``."""

    def __init__(self, first: int, of_first: object, number: int, value: object) -> None:
        super().__init__(f"{of_first!r} for member {first}, and {value!r} for member {number}")
