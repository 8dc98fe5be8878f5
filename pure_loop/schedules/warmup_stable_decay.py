"""Warmup, stable, decay: a rise to the peak, the peak for most of the time, and a fall at the end."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from typing import Annotated

import attrs

from pure_loop.errors import ArgumentError
from pure_loop.ranges import Number, checked
from pure_loop.schedules._base import LASTING, WarmupSchedule, amount_of, as_time, between, finished, part_over
from pure_loop.time import Time, Timestamp

__all__ = ["warmup_stable_decay"]


@checked
@attrs.frozen
class warmup_stable_decay(WarmupSchedule):
    """From 0 to ``peak`` over ``warmup``, then ``peak``, and to ``final`` over the last ``decay`` of ``time``; linear.

    https://arxiv.org/abs/2404.06395.

    Args:
        warmup: how long the rise takes.
        time: when ``final`` is reached; warmup and decay are part of it.
        decay: how long the fall takes, in the unit of ``time``.
        peak, final: the values.

    >>> schedule = warmup_stable_decay("2ba", "10ba", "2ba")
    >>> [schedule(Timestamp(batch=i)) for i in range(11)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    warmup: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    decay: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    peak: Annotated[float, Number()] = 1.0
    final: Annotated[float, Number()] = 0.0

    def __attrs_post_init__(self) -> None:
        if self.decay.unit is not self.time.unit or self.decay > self.time:
            raise ArgumentError(
                f"warmup_stable_decay: decay={str(self.decay)!r} is no part of time={str(self.time)!r}: write both in "
                'one unit, and decay as the shorter one: warmup_stable_decay("100ba", "1000ba", "200ba").'
            )
        if self.warmup.unit is self.time.unit and self.warmup + self.decay > self.time:
            raise ArgumentError(
                f"warmup_stable_decay: warmup={str(self.warmup)!r} and decay={str(self.decay)!r} are longer than "
                f"time={str(self.time)!r}, of which both are a part."
            )

    def __call__(self, timestamp: Timestamp) -> float:
        (amount, unit), (decay, _) = amount_of(self.time, timestamp), amount_of(self.decay, timestamp)
        if finished(unit, timestamp) > amount - decay:
            return between(self.peak, self.final, part_over(self.time, timestamp, amount - decay))
        return part_over(self.warmup, timestamp) * self.peak
