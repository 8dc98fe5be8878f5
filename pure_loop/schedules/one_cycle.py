"""One cycle: a rise from a small value to the peak, and a fall to nearly nothing, each half a cosine."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

import math
from typing import Annotated

import attrs

from pure_loop.ranges import Above, AtLeast, Between, checked
from pure_loop.schedules._base import LASTING, End, Schedule, as_time, between, part_over
from pure_loop.time import Time, Timestamp

__all__ = ["one_cycle"]


@checked
@attrs.frozen
class one_cycle(Schedule):
    """From ``start`` to ``peak`` over the part ``rise`` of ``time``, and to ``end`` over the rest; both half a cosine.

    With ``tau`` the part of ``time`` that is over, the value is ``peak`` at ``tau = rise`` and ``end`` from ``tau = 1``
    on (https://arxiv.org/abs/1708.07120). torch's OneCycleLR counts one step less: it is at the peak one batch earlier.

    Args:
        time: how long the cycle is.
        peak: the largest value.
        rise: the part of the time that rises.
        start: the first value; None: ``peak / 25``.
        end: the last value; None: ``start / 10000``.

    >>> schedule = one_cycle("10ba", peak=1.0)
    >>> [round(schedule(Timestamp(batch=i)), 3) for i in range(5)]
    [0.04, 0.28, 0.76, 1.0, 0.95]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    peak: Annotated[float, Above(0)] = 1.0
    rise: Annotated[float, Between(0, 1)] = attrs.field(default=0.3, kw_only=True)
    start: Annotated[float | None, AtLeast(0)] = attrs.field(default=None, kw_only=True)
    end: Annotated[float | None, AtLeast(0)] = attrs.field(default=None, kw_only=True)

    def __call__(self, timestamp: Timestamp) -> float:
        start = self.peak / 25.0 if self.start is None else self.start
        end = start / 1e4 if self.end is None else self.end
        tau = part_over(self.time, timestamp)
        if tau < self.rise:
            return between(start, self.peak, (1.0 - math.cos(math.pi * tau / self.rise)) / 2.0)
        return between(self.peak, end, (1.0 - math.cos(math.pi * (tau - self.rise) / (1.0 - self.rise))) / 2.0)

    def endless_warmup(self, end: End) -> Time | None:
        return self.time if self.rise < 1 and end.comes_before(self.time, self.rise) else None
