"""A schedule with all of its times longer or shorter, for a run that is longer or shorter."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pure_loop.errors import ArgumentTypeError
from pure_loop.ranges import Above, checked
from pure_loop.schedules._base import Schedule, field_names
from pure_loop.time import Time, TimeUnit

__all__ = ["scaled"]

S = TypeVar("S", bound=Schedule)


@checked
def scaled(schedule: S, ratio: Annotated[float, Above(0)], *, warmup: bool = False) -> S:
    """The schedule with each time multiplied by ``ratio``; counts are rounded down, and are at least 1.

    Fractions of the duration stay as they are, because the duration is scaled, too: ``max_duration=ratio * duration``.

    Args:
        schedule: one of ``pl.schedules``, or made of such.
        ratio: what times are multiplied by.
        warmup: whether warmups are scaled, too.

    Raises:
        ArgumentError: a ratio that is not above 0.
        ArgumentTypeError: a function of the user's own, with times that are not known.

    >>> from pure_loop.schedules import cosine
    >>> scaled(cosine("100ba", peak=0.1, warmup="10ba"), 0.5)
    cosine(time='50ba', peak=0.1, warmup='10ba')
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentTypeError(
            f"scaled: {schedule!r} is none of pl.schedules: the times of a function of your own are not known; scale "
            "them in it."
        )
    result = _scaled(schedule, ratio, warmup)
    assert isinstance(result, type(schedule))
    return result


def _scaled(value: object, ratio: float, warmup: bool) -> object:
    if isinstance(value, Time):
        if value.unit is TimeUnit.DURATION or not value:
            return value
        number = value.value * ratio
        return Time(number if isinstance(value.value, float) else max(1, int(number)), value.unit)
    if isinstance(value, tuple):
        return tuple(_scaled(part, ratio, warmup) for part in value)
    if not isinstance(value, Schedule):
        return value
    rises = "time" if type(value).__name__ == "warmup" else "warmup"
    result = object.__new__(type(value))
    for name in field_names(value):
        field = getattr(value, name)
        object.__setattr__(result, name, _scaled(field, ratio, warmup) if warmup or name != rises else field)
    return result
