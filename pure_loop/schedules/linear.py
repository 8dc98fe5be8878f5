"""A straight line from one value to another."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from typing import Annotated

import attrs

from pure_loop.ranges import Number, checked
from pure_loop.schedules._base import LASTING, Schedule, as_time, between, part_over
from pure_loop.time import Time, Timestamp

__all__ = ["linear"]


@checked
@attrs.frozen
class linear(Schedule):
    """From ``start`` to ``end`` over ``time``, and ``end`` from there on.

    >>> schedule = linear(1.0, 0.0, "4ba")
    >>> [schedule(Timestamp(batch=i)) for i in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    start: Annotated[float, Number()]
    end: Annotated[float, Number()]
    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)

    def __call__(self, timestamp: Timestamp) -> float:
        return between(self.start, self.end, part_over(self.time, timestamp))
