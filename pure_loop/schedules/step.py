"""A factor at the end of each stretch of equal length."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from typing import Annotated

import attrs

from pure_loop.ranges import Number, checked
from pure_loop.schedules._base import LASTING, Schedule, amount_of, as_time, finished, whole_lengths
from pure_loop.time import Time, Timestamp

__all__ = ["step"]


@checked
@attrs.frozen
class step(Schedule):
    """``start``, multiplied by ``gamma`` at the end of each ``time``.

    >>> schedule = step("2ba", gamma=0.5)
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    gamma: Annotated[float, Number()] = 0.1
    start: Annotated[float, Number()] = 1.0

    def __call__(self, timestamp: Timestamp) -> float:
        length, unit = amount_of(self.time, timestamp)
        return self.start * self.gamma ** whole_lengths(finished(unit, timestamp), length) if length else self.start
