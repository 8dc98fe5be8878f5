"""Stretches of training: when a method begins, and how far it is."""

from __future__ import annotations

from typing import Any

from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.schedules import linear
from pure_loop.time import Time, Timestamp, TimeUnit

__all__ = ["as_span", "is_past", "part_of_span"]


def as_span(value: Any, name: str, where: str) -> Time:
    """An amount of training that a setting says; 0 is the beginning.

    Raises:
        ArgumentError, ArgumentTypeError: it is none, or one of the clock.
    """
    try:
        time = Time.parse(value)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{where}: {name}={value!r}: {error}") from None
    if time.unit is TimeUnit.SECOND:
        raise ArgumentError(
            f"{where}: {name}={value!r} goes by the clock, so every run would be another one; count batches, samples, "
            f'tokens or epochs, or write a part of the duration: {name}="0.5dur".'
        )
    return time


def part_of_span(time: Time, timestamp: Timestamp) -> float:
    """The part of the first ``time`` of training that is over, in [0, 1]; 1 where that is no time at all."""
    return linear(0.0, 1.0, time)(timestamp) if time else 1.0


def is_past(time: Time, timestamp: Timestamp) -> bool:
    """Whether more than ``time`` of training is over.

    >>> is_past(Time("2ba"), Timestamp(batch=2)), is_past(Time("2ba"), Timestamp(batch=3))
    (False, True)
    """
    return linear(0.0, 1.0, time * 2)(timestamp) > 0.5 if time else True
