"""Half cosines one after the other, each longer than the one before."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated

import attrs

from pure_loop.ranges import AtLeast, Number, checked
from pure_loop.schedules._base import LASTING, Exact, Schedule, amount_of, as_time, between, finished, whole_lengths
from pure_loop.time import Time, Timestamp

__all__ = ["cosine_restarts"]


@checked
@attrs.frozen
class cosine_restarts(Schedule):
    """Half cosines from ``peak`` to ``final``, the first over ``time``, each ``growth`` times as long as before.

    Warm restarts: https://arxiv.org/abs/1608.03983.

    >>> schedule = cosine_restarts("2ba", growth=2)
    >>> [round(schedule(Timestamp(batch=i)), 3) for i in range(7)]
    [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 1.0]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    peak: Annotated[float, Number()] = 1.0
    final: Annotated[float, Number()] = 0.0
    growth: Annotated[float, AtLeast(1)] = 1.0

    def __call__(self, timestamp: Timestamp) -> float:
        length, unit = amount_of(self.time, timestamp)
        rest: Exact = finished(unit, timestamp)
        if not length:
            return self.final
        if self.growth == 1:
            rest -= whole_lengths(finished(unit, timestamp), length) * length
        growth = Fraction(repr(self.growth))  # exact: 1.5 times 1.5 times a count is no float of that name
        while rest >= length:
            rest, length = rest - length, length * growth
        return between(self.peak, self.final, (1.0 - math.cos(math.pi * float(rest / length))) / 2.0)
