"""A value for each piece of the time."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Mapping

import attrs

from pure_loop._internal.arguments import check_number
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.ranges import checked
from pure_loop.schedules._base import Schedule, amount_of, finished
from pure_loop.time import Time, TimeLike, Timestamp, read_time

__all__ = ["piecewise"]


def _pieces(
    values: Mapping[TimeLike, float] | tuple[tuple[Time, float], ...],
) -> tuple[tuple[Time, float], ...]:
    if isinstance(values, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in values):
        values = dict(values)  # those of another one
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(
            f'piecewise: values={values!r}: give a mapping of times to values, {{"0ba": 0.1, ...}}.'
        )
    pieces = tuple(
        (read_time(time, "piecewise: a time"), check_number(f"values[{str(time)!r}]", value, where="piecewise"))
        for time, value in values.items()
    )
    if not pieces or pieces[0][0]:
        raise ArgumentError('piecewise: values starts at time 0: piecewise({"0ba": 0.1, "100ba": 0.01}).')
    return pieces


@checked
@attrs.frozen
class piecewise(Schedule):
    """The value of the last of these times that has passed; the times may be in different units.

    Args:
        values: times to values, in the order of the times; the first time is 0.

    >>> schedule = piecewise({"0ba": 1.0, "2ba": 0.5, "3ba": 0.25})
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """

    values: tuple[tuple[Time, float], ...] = attrs.field(converter=_pieces)

    def __call__(self, timestamp: Timestamp) -> float:
        value = self.values[0][1]
        for time, following in self.values[1:]:
            amount, unit = amount_of(time, timestamp)
            if finished(unit, timestamp) < amount:
                break
            value = following
        return value

    def __repr__(self) -> str:
        return f"piecewise({{{', '.join(f'{str(time)!r}: {value!r}' for time, value in self.values)}}})"
