"""Settings of algorithms, read and refused when an algorithm is made and not when it first runs."""

from __future__ import annotations

import math

from pure_loop._values import as_float
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.time import Time

__all__ = ["check_flag", "check_fraction", "check_integer", "check_positive", "check_time"]


def _number(where: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{where}: {name} is a number, got {value!r} of type {type(value).__name__}.")
    return as_float(value)


def check_fraction(where: str, name: str, value: object, example: str) -> float:
    """``value`` as a float in ``[0, 1)``."""
    number = _number(where, name, value)
    if not 0.0 <= number < 1.0:
        raise ArgumentError(f"{where}: {name} is at least 0 and less than 1, got {value!r}; write {example}.")
    return number


def check_positive(where: str, name: str, value: object, example: str) -> float:
    """``value`` as a float that is above 0 and finite."""
    number = _number(where, name, value)
    if not 0.0 < number < math.inf:
        raise ArgumentError(f"{where}: {name} is above 0 and finite, got {value!r}; write {example}.")
    return number


def check_integer(where: str, name: str, value: object, example: str, *, least: int) -> int:
    """``value`` as an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(
            f"{where}: {name} is a whole number, got {value!r} of type {type(value).__name__}; write {example}."
        )
    if value < least:
        raise ArgumentError(f"{where}: {name} is at least {least}, got {value!r}; write {example}.")
    return value


def check_flag(where: str, name: str, value: object) -> bool:
    """``value``, if it is a bool."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{where}: {name} is True or False, got {value!r}.")
    return value


def check_time(where: str, name: str, value: str | int | Time) -> Time:
    """``value`` as a Time that is above 0."""
    try:
        time = Time.parse(value)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{where}: {name}={value!r}: {error}") from None
    if not time:
        raise ArgumentError(f"{where}: {name}={value!r} is no time at all; leave the algorithm out instead.")
    return time
