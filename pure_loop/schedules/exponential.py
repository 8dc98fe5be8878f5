"""A factor over each stretch of equal length, smoothly."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from typing import Annotated

import attrs

from pure_loop.ranges import Above, Number, checked
from pure_loop.schedules._base import LASTING, Schedule, amount_of, as_time, finished
from pure_loop.time import Time, Timestamp

__all__ = ["exponential"]


@checked
@attrs.frozen
class exponential(Schedule):
    """``start gamma^(now / time)``: multiplied by ``gamma`` over each ``time``, smoothly.

    >>> schedule = exponential("2ba", gamma=0.25)
    >>> [schedule(Timestamp(batch=i)) for i in range(4)]
    [1.0, 0.5, 0.25, 0.125]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    gamma: Annotated[float, Above(0)]
    start: Annotated[float, Number()] = 1.0

    def __call__(self, timestamp: Timestamp) -> float:
        length, unit = amount_of(self.time, timestamp)
        return self.start * self.gamma ** float(finished(unit, timestamp) / length) if length else self.start
