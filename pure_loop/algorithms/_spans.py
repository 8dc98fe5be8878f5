"""Stretches of training: when a method begins, and how far it is."""

from __future__ import annotations

import attrs

from pure_loop.errors import ArgumentError
from pure_loop.ranges import Duration, Setting
from pure_loop.schedules import linear
from pure_loop.time import Time, TimeLike, Timestamp, TimeUnit, read_time


@attrs.frozen
class Counted(Duration):
    """An amount of training in whole units."""

    def read(self, setting: Setting, value: object) -> Time:
        time = super().read(setting, value)
        if time.unit is TimeUnit.DURATION:
            raise ArgumentError(
                f"{setting.where}: {setting.name}={value!r} is a part of the duration, and another amount where a "
                'resumed run has another one: write epochs, batches, samples or tokens, "1ep".'
            )
        return time

    def outside(self, setting: Setting) -> tuple[object, ...]:
        return (*super().outside(setting), "0.1dur")


def as_span(value: TimeLike, name: str, where: str) -> Time:
    """An amount of training that a setting says; 0 is the beginning.

    Raises:
        ArgumentError, ArgumentTypeError: it is none, or one of the clock.
    """
    time = read_time(value, f"{where}: {name}")
    if time.unit is TimeUnit.SECOND:
        raise ArgumentError(
            f"{where}: {name}={value!r} goes by the clock, so every run would be another one; count batches, samples, "
            f'tokens or epochs, or write a part of the duration: {name}="0.5dur".'
        )
    return time


def part_of_span(time: Time, timestamp: Timestamp) -> float:
    """The part of the first ``time`` of training that is over, in [0, 1]; 1 where that is no time at all."""
    return linear(0.0, 1.0, time)(timestamp) if time else 1.0


def is_past(time: Time, timestamp: Timestamp) -> bool:
    """Whether more than ``time`` of training is over.

    >>> is_past(Time("2ba"), Timestamp(batch=2)), is_past(Time("2ba"), Timestamp(batch=3))
    (False, True)
    """
    return linear(0.0, 1.0, time * 2)(timestamp) > 0.5 if time else True


def part_of_training(time: Time, timestamp: Timestamp, where: str) -> float:
    """A time as a part of all of training.

    Raises:
        ArgumentError: it is in another unit than ``max_duration``.

    >>> part_of_training(Time("5ba"), Timestamp(max_duration=Time("20ba")), "f")
    0.25
    """
    if not time or time.unit is TimeUnit.DURATION:
        return float(time.value)
    duration = timestamp.max_duration
    if duration is None or duration.unit is not time.unit:
        raise ArgumentError(
            f"{where}: {str(time)!r} is no part of max_duration={str(duration)!r}, which counts otherwise: write a "
            'part of the duration, such as "0.2dur".'
        )
    return float(time.exact / duration.exact)
