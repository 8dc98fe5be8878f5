"""The inverse of a square root, after a warmup."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

import math
from typing import Annotated

import attrs

from pure_loop.ranges import Number, checked
from pure_loop.schedules._base import LASTING, WarmupSchedule, amount_of, as_time, finished
from pure_loop.time import Time, Timestamp

__all__ = ["inverse_sqrt"]


@checked
@attrs.frozen
class inverse_sqrt(WarmupSchedule):
    """From 0 to ``peak`` over ``warmup``, linearly, and ``peak sqrt(warmup / now)`` from there on.

    https://arxiv.org/abs/1706.03762, where ``peak`` is ``(d warmup)^-0.5`` for a model of width d.

    >>> schedule = inverse_sqrt("4ba")
    >>> [schedule(Timestamp(batch=i)) for i in (0, 1, 2, 4, 16)]
    [0.0, 0.25, 0.5, 1.0, 0.5]
    """

    warmup: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    peak: Annotated[float, Number()] = 1.0

    def __call__(self, timestamp: Timestamp) -> float:
        amount, unit = amount_of(self.warmup, timestamp)
        progress = finished(unit, timestamp)
        if progress < amount:
            return self.peak * float(progress / amount)
        return self.peak * math.sqrt(float(amount / progress)) if progress else self.peak
