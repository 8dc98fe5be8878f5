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
    """What a function gives in the turn of each member, where that is equal for all.

    Raises:
        MembersDifferError: it is not.
    """
    values = of_each(function, count)
    for number, value in enumerate(values):
        if type(value) is not type(values[0]) or value != values[0]:
            raise MembersDifferError(values[0], number, value)
    return values[0]


class MembersDifferError(Exception):
    """A value that has to be one for all members, and is another one for member ``number``."""

    def __init__(self, first: object, number: int, value: object) -> None:
        super().__init__(f"{first!r} for member 0, and {value!r} for member {number}")
