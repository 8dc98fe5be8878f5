"""A power of what is left, after a warmup."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from typing import Annotated

import attrs

from pure_loop.ranges import Above, Number, checked
from pure_loop.schedules._base import LASTING, WarmupSchedule, as_time, as_warmup, between, leaves_room, warmed_up
from pure_loop.time import Time, Timestamp

__all__ = ["polynomial"]


@checked
@attrs.frozen
class polynomial(WarmupSchedule):
    """A warmup from 0 to ``peak``, then ``final + (peak - final) (1 - tau)^power``, with the times of :class:`cosine`.

    >>> schedule = polynomial("4ba", power=2)
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    power: Annotated[float, Above(0)] = 1.0
    peak: Annotated[float, Number()] = 1.0
    warmup: Time | None = attrs.field(default=None, converter=as_warmup, validator=leaves_room)
    final: Annotated[float, Number()] = 0.0

    def __call__(self, timestamp: Timestamp) -> float:
        factor, tau = warmed_up(self.time, self.warmup, timestamp)
        return factor * between(self.final, self.peak, (1.0 - tau) ** self.power)
