"""How schedules measure time: ``now`` and ``tau``, in the unit of a time."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

import attrs

from pure_loop.errors import ArgumentError
from pure_loop.time import Time, Timestamp, TimeUnit, in_batches

# Counts stay ints, which is fast; fractions are exact, because 0.7 * 10 is not 7 in floating point.
Exact: TypeAlias = int | float | Fraction


@functools.lru_cache
def _part(of: Time, duration: Time) -> int | Fraction:
    amount = of.exact * duration.exact
    return int(amount) if amount.denominator == 1 else amount


def amount_of(time: Time, timestamp: Timestamp) -> tuple[Exact, TimeUnit]:
    """A time, with epochs in batches and a fraction of the duration in the unit of ``max_duration``."""
    amount: Exact = time.value
    unit = time.unit
    if unit is TimeUnit.DURATION:
        if timestamp.max_duration is None:
            raise ArgumentError(
                f"a schedule over {str(time)!r} needs timestamp.max_duration, which is None outside fit: write the "
                'time in another unit, such as "10ba", or give it one: timestamp.replace(max_duration=Time("2ep"))'
            )
        amount, unit = _part(time, timestamp.max_duration), timestamp.max_duration.unit
    return (amount * (timestamp.batches_per_epoch or 1) if unit is TimeUnit.EPOCH else amount), unit


def finished(unit: TimeUnit, timestamp: Timestamp) -> int | float:
    """How much is finished, in what :func:`amount_of` counts."""
    length = timestamp.batches_per_epoch
    return in_batches(timestamp, length) if unit is TimeUnit.EPOCH and length else timestamp.get(unit)


def whole_lengths(progress: float, length: Exact) -> int:
    """How many whole lengths fit into ``progress``."""
    return int((Fraction(progress) if isinstance(length, Fraction) else progress) // length)


@attrs.frozen
class End:
    """The end of a run: how much is finished there at most.

    Attributes:
        timestamp: with the duration of the run, and the length of its epochs.
        counts: by unit, as :func:`finished` counts; those that are not known before the run are left out.
    """

    timestamp: Timestamp
    counts: Mapping[TimeUnit, Exact]

    def comes_before(self, time: Time, part: float = 1.0, *, or_with: bool = True) -> bool:
        """Whether a run ends before this part of a time is over, or with it, as far as that is known.

        Where it ends with it, its last batch starts before it.
        """
        amount, unit = amount_of(time, self.timestamp)
        count, amount = self.counts.get(unit), amount * (1 if part == 1.0 else part)
        return count is not None and (count < amount or (or_with and count == amount))


def part_over(time: Time, timestamp: Timestamp, since: Exact = 0) -> float:
    """The part of the stretch from ``since`` to ``time`` that is finished, in [0, 1]."""
    amount, unit = amount_of(time, timestamp)
    if amount <= since:
        return 1.0
    return min(1.0, max(0.0, float((finished(unit, timestamp) - since) / (amount - since))))


def warmed_up(time: Time, warmup: Time | None, timestamp: Timestamp) -> tuple[float, float]:
    """How far the warmup is, and ``tau`` of the rest."""
    if warmup is None:
        return 1.0, part_over(time, timestamp)
    (amount, unit), (_, duration_unit) = amount_of(warmup, timestamp), amount_of(time, timestamp)
    convertible = unit is duration_unit or (
        {unit, duration_unit} == {TimeUnit.EPOCH, TimeUnit.BATCH} and bool(timestamp.batches_per_epoch)
    )
    return part_over(warmup, timestamp), part_over(time, timestamp, amount if convertible else 0)


def between(start: float, end: float, tau: float) -> float:
    # Exactly start at 0 and end at 1.
    return start * (1.0 - tau) + end * tau
