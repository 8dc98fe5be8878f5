"""Schedules one after the other."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs

from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.ranges import checked
from pure_loop.schedules._base import End, Schedule, amount_of, as_schedule, field_names, finished, warmup_in
from pure_loop.time import Time, TimeLike, Timestamp, TimeUnit, read_time

__all__ = ["chain"]

_SHIFTED = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.ITERATION: "iteration",
}


@checked
@attrs.frozen(init=False)
class chain(Schedule):
    """``first``, and from each time on the schedule that stands beside it.

    Args:
        first: the first schedule, or a number.
        *rest: pairs of a time and the schedule, or number, that follows there.
        restart: whether a schedule counts from its own start; if not, all count from the start of training. A schedule
            that restarts counts in the unit of its time.

    Raises:
        ArgumentError: with ``restart`` a schedule that counts in another unit than its time.
        ArgumentTypeError: something else than pairs.

    >>> from pure_loop.schedules import constant, linear
    >>> schedule = chain(constant(1.0), ("2ba", linear(1.0, 0.0, "2ba")), restart=True)
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """

    first: Callable[[Timestamp], float]
    rest: tuple[tuple[Time, Callable[[Timestamp], float]], ...]
    restart: bool

    def __init__(
        self,
        first: Callable[[Timestamp], float] | float,
        *rest: tuple[TimeLike, Callable[[Timestamp], float] | float],
        restart: bool = False,
    ) -> None:
        stages = []
        for pair in rest:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ArgumentTypeError(f'chain: {pair!r} is no pair of a time and a schedule: ("10ep", schedule).')
            stages.append((read_time(pair[0], "chain: a time"), as_schedule(pair[1])))
        if restart:
            for time, schedule in stages:
                _refuse_other_units(time, schedule)
        self.__attrs_init__(as_schedule(first), tuple(stages), restart)

    def __call__(self, timestamp: Timestamp) -> float:
        schedule, start = self.first, None
        for time, following in self.rest:
            amount, unit = amount_of(time, timestamp)
            if finished(unit, timestamp) < amount:
                break
            schedule, start = following, time
        if self.restart and start is not None:
            timestamp = _shifted(timestamp, start)
        return schedule(timestamp)

    def endless_warmup(self, end: End) -> Time | None:
        if self.rest and not end.comes_before(self.rest[0][0]):
            return None  # a later one is reached
        return warmup_in(self.first, end)

    def __repr__(self) -> str:
        stages = "".join(f", ({str(time)!r}, {schedule!r})" for time, schedule in self.rest)
        return f"chain({self.first!r}{stages}{', restart=True' if self.restart else ''})"


def _times_in(schedule: object) -> Iterator[Time]:
    """The times of a schedule, and of those that it is made of."""
    if isinstance(schedule, Time):
        yield schedule
    elif isinstance(schedule, tuple):
        for part in schedule:
            yield from _times_in(part)
    elif isinstance(schedule, Schedule):
        for name in field_names(schedule):
            yield from _times_in(getattr(schedule, name))


def _refuse_other_units(time: Time, schedule: object) -> None:
    if time.unit not in _SHIFTED:
        raise ArgumentError(
            f"chain: restart=True at {str(time)!r}: write the time in batches, epochs, samples or tokens."
        )
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"chain: restart=True, and {schedule!r} is a function of yours, which counts from the start of training: "
            "subtract the start in it, or leave restart out."
        )
    for following in _times_in(schedule):
        if following.unit is not time.unit:
            raise ArgumentError(
                f"chain: restart=True, and {schedule!r} counts in {str(following)!r} where it starts at {str(time)!r}: "
                "write both in one unit."
            )


def _shifted(timestamp: Timestamp, start: Time) -> Timestamp:
    """The timestamp as it would be if training had begun at ``start``."""
    name = _SHIFTED[start.unit]
    return timestamp.replace(**{name: max(0, getattr(timestamp, name) - math.ceil(start.value))})
