"""Half a cosine after a warmup."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

import math
from typing import Annotated

import attrs

from pure_loop.ranges import Number, checked
from pure_loop.schedules._base import LASTING, WarmupSchedule, as_time, as_warmup, between, leaves_room, warmed_up
from pure_loop.time import Time, Timestamp

__all__ = ["cosine"]


@checked
@attrs.frozen
class cosine(WarmupSchedule):
    """A warmup from 0 to ``peak``, then half a cosine from ``peak`` to ``final``, which ``time`` reaches.

    With ``tau`` the part of the time from the end of the warmup to ``time`` that is over, the value is
    ``final + (peak - final) (1 + cos(pi tau)) / 2`` (https://arxiv.org/abs/1608.03983, without restarts).
    Where the two times have units that can't be converted, ``tau`` begins at 0 and the warmup is a factor.

    >>> schedule = cosine("6ba", peak=1.0, warmup="2ba", final=0.5)
    >>> [round(schedule(Timestamp(batch=i)), 3) for i in range(8)]
    [0.0, 0.5, 1.0, 0.927, 0.75, 0.573, 0.5, 0.5]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    peak: Annotated[float, Number()] = 1.0
    warmup: Time | None = attrs.field(default=None, converter=as_warmup, validator=leaves_room)
    final: Annotated[float, Number()] = 0.0

    def __call__(self, timestamp: Timestamp) -> float:
        factor, tau = warmed_up(self.time, self.warmup, timestamp)
        return factor * between(self.peak, self.final, (1.0 - math.cos(math.pi * tau)) / 2.0)
