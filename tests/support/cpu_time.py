"""CPU time of a call, on a machine where other processes run, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["cpu_seconds", "within"]

T = TypeVar("T")


def cpu_seconds(function: Callable[[], T]) -> tuple[T, float]:
    """What a function returns, and the CPU seconds of this process that it took."""
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def within(most: float, function: Callable[[], T], tries: int = 3) -> T:
    """What a function returns that takes at most ``most`` CPU seconds in one of three tries.

    Neighbours on a core only add to CPU seconds, by a factor of two and more, and not to those of all tries alike: what
    costs too much does so in each of them.

    Raises:
        AssertionError: it takes longer in each.
    """
    taken: list[float] = []
    while not taken or min(taken) > most:
        assert len(taken) < tries, f"it takes {min(taken):.2f} CPU seconds, and at most {most:g} are allowed"
        result, seconds = cpu_seconds(function)
        taken.append(seconds)
    return result
