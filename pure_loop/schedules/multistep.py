"""A factor at each of several times."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import attrs

from pure_loop.errors import ArgumentTypeError
from pure_loop.ranges import Number, checked
from pure_loop.schedules._base import Schedule, amount_of, finished
from pure_loop.time import Time, TimeLike, Timestamp, read_time

__all__ = ["multistep"]


def _milestones(times: Iterable[TimeLike]) -> tuple[Time, ...]:
    if isinstance(times, str) or not isinstance(times, Iterable):
        raise ArgumentTypeError(f"milestones must be several times, such as [{times!r}, ...], got {times!r}")
    return tuple(read_time(time, "a milestone") for time in times)


@checked
@attrs.frozen
class multistep(Schedule):
    """``start``, multiplied by ``gamma`` at each of the ``milestones``, which may be in different units.

    >>> schedule = multistep(["1ba", "3ba"], gamma=0.5)
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [1.0, 0.5, 0.5, 0.25, 0.25]
    """

    milestones: tuple[Time, ...] = attrs.field(converter=_milestones)
    gamma: Annotated[float, Number()] = 0.1
    start: Annotated[float, Number()] = 1.0

    def __call__(self, timestamp: Timestamp) -> float:
        amounts = (amount_of(milestone, timestamp) for milestone in self.milestones)
        return self.start * self.gamma ** sum(finished(unit, timestamp) >= amount for amount, unit in amounts)
