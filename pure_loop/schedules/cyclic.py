"""Triangles one after the other, between two values."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from typing import Annotated

import attrs

from pure_loop.ranges import Above, Number, checked
from pure_loop.schedules._base import LASTING, End, Schedule, amount_of, as_time, between, finished, whole_lengths
from pure_loop.time import Time, Timestamp

__all__ = ["cyclic"]


@checked
@attrs.frozen
class cyclic(Schedule):
    """From ``low`` to ``high`` and back in each ``time``, linearly; ``high`` comes after the part ``rise`` of it.

    https://arxiv.org/abs/1506.01186.

    Args:
        time: how long a cycle is.
        low, high: the values between which it moves.
        rise: the part of a cycle that rises.
        gamma: what the height of the triangles, ``high - low``, is multiplied by after each cycle; 0.5 is the method
            that is known as triangular2.

    >>> schedule = cyclic("4ba", low=0.0, high=1.0, gamma=0.5)
    >>> [schedule(Timestamp(batch=i)) for i in range(8)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    low: Annotated[float, Number()] = 0.1
    high: Annotated[float, Number()] = 1.0
    rise: Annotated[float, Number(above=0, below=1)] = attrs.field(default=0.5, kw_only=True)
    gamma: Annotated[float, Above(0)] = attrs.field(default=1.0, kw_only=True)

    def __call__(self, timestamp: Timestamp) -> float:
        length, unit = amount_of(self.time, timestamp)
        if not length:
            return self.low
        progress = finished(unit, timestamp)
        cycle = whole_lengths(progress, length)
        tau = float((progress - cycle * length) / length)
        height = tau / self.rise if tau < self.rise else (1.0 - tau) / (1.0 - self.rise)
        return between(self.low, self.low + (self.high - self.low) * self.gamma**cycle, height)

    def endless_warmup(self, end: End) -> Time | None:
        return self.time if self.low == 0 and end.comes_before(self.time, self.rise) else None
