"""A rise from 0 before another schedule."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import attrs

from pure_loop.ranges import checked
from pure_loop.schedules._base import (
    LASTING,
    End,
    Schedule,
    as_schedule,
    as_time,
    constant,
    part_over,
    refuse_no_numbers,
    warmup_in,
)
from pure_loop.time import Time, Timestamp

__all__ = ["warmup"]


@checked
@attrs.frozen
class warmup(Schedule):
    """``schedule``, multiplied by a factor that rises from 0 to 1 over ``time``.

    >>> from pure_loop.schedules import step
    >>> schedule = warmup("4ba", step("6ba", gamma=0.5))
    >>> [schedule(Timestamp(batch=i)) for i in range(8)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.5]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    schedule: Callable[[Timestamp], float] = attrs.field(default=constant(1.0), converter=as_schedule)

    def __call__(self, timestamp: Timestamp) -> float:
        try:
            return part_over(self.time, timestamp) * self.schedule(timestamp)
        except TypeError:
            refuse_no_numbers((self.schedule,), timestamp)
            raise

    def endless_warmup(self, end: End) -> Time | None:
        return self.time if end.comes_before(self.time) else warmup_in(self.schedule, end)
