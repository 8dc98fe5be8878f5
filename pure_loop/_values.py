"""Values of arguments that many functions take, read or refused in one way."""

from __future__ import annotations

import math
from typing import Any

from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["as_float", "read_count", "read_flag", "read_name", "read_seconds"]


def as_float(number: float) -> float:
    """A number as a float; infinity for an int that is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def read_flag(name: str, value: Any) -> bool:
    """
    Raises:
        ArgumentTypeError: the value is neither True nor False: ``strict="no"`` would be true.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}={value!r}: write True or False.")
    return value


def read_count(name: str, value: Any, *, least: int = 0) -> int:
    """
    Raises:
        ArgumentTypeError, ArgumentError: the value is no int of at least ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r} of type {type(value).__name__}: give a whole number.")
    if value < least:
        raise ArgumentError(f"{name}={value!r}: give a whole number of at least {least}.")
    return value


def read_seconds(name: str, value: Any) -> float:
    """
    Raises:
        ArgumentTypeError, ArgumentError: the value is no finite number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name}={value!r} of type {type(value).__name__}: give a number of seconds.")
    seconds = as_float(value)
    if not 0 <= seconds < math.inf:
        raise ArgumentError(f"{name}={value!r}: give a finite number of seconds, 0 or more.")
    return seconds


def read_name(name: str, value: Any) -> str:
    """
    Raises:
        ArgumentTypeError: the value is no text, or an empty one.
    """
    if not isinstance(value, str) or not value:
        raise ArgumentTypeError(f"{name}={value!r}: give a text that is not empty.")
    return value
