"""Learning rates, and other numbers, as pure functions of the timestamp.

A schedule is a callable ``Timestamp -> float``. There is no scheduler to step and nothing to save: the
batch that starts at timestamp ``t`` uses ``schedule(t)``, so ``linear(1, 0, "4ba")`` gives four batches
1, 0.75, 0.5 and 0.25. A function of one's own is a schedule too; the ones here also print, compare and multiply.

The words: ``now`` is how much is finished in the unit of a time, and ``tau = clip(now / time, 0, 1)``.
Times may be in any unit. A fraction of the duration (``"0.5dur"``) is that many of the units of ``max_duration``.
Epochs pass batch by batch where the timestamp knows how many batches an epoch has, and else all at once at their end.
"""

# These classes are called as functions and named like them.
# ruff: noqa: N801

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, TypeAlias

import attrs

from pure_loop._signature import name_of, refuse_no_schedule
from pure_loop._values import as_float, read_count
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.time import Time, Timestamp, TimeUnit, in_batches, read_time

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "linear",
    "multistep",
    "polynomial",
    "product",
    "step",
    "warmup",
]


class Schedule(ABC):
    """A callable ``Timestamp -> float`` that multiplies with numbers and other schedules.

    >>> halved = 0.5 * linear(1.0, 0.0, "4ba")
    >>> [halved(Timestamp(batch=i)) for i in range(4)]
    [0.5, 0.375, 0.25, 0.125]
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, timestamp: Timestamp) -> float:
        """The value for what starts at ``timestamp``."""

    def __mul__(self, other: Callable[[Timestamp], float] | float) -> product:
        return product((self, _as_schedule(other)))

    def __rmul__(self, other: Callable[[Timestamp], float] | float) -> product:
        return product((_as_schedule(other), self))


# Converters leave what can't be used as it is: validators know the name of the argument.


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return as_float(value)


def _length(value: Any) -> Time:
    try:
        return Time.parse(value)
    except (ArgumentError, ArgumentTypeError):
        return value  # type: ignore[no-any-return]


def _finite(_: Any, field: Any, value: float) -> None:
    if not isinstance(value, float):
        raise ArgumentTypeError(f"{field.name}={value!r} of type {type(value).__name__}: give a number")
    if not math.isfinite(value):
        raise ArgumentError(f"{field.name}={value!r}: give a finite number")


def _positive(_: Any, field: Any, value: float) -> None:
    _finite(_, field, value)
    if value <= 0:
        raise ArgumentError(f"{field.name}={value!r}: give a number above 0")


def _growth(_: Any, field: Any, value: int) -> None:
    read_count(field.name, value, least=1)


def _lasting(_: Any, field: Any, value: Any) -> None:
    if not read_time(value, field.name):
        raise ArgumentError(
            f"{field.name}={str(value)!r}: a schedule can't change over a time of {str(value)!r}; write "
            "constant(value) instead"
        )


def _as_schedule(value: Callable[[Timestamp], float] | float) -> Callable[[Timestamp], float]:
    if not callable(value):
        return constant(value)
    refuse_no_schedule("a schedule", value)
    return value


def _refuse_no_numbers(schedules: Iterable[Callable[[Timestamp], Any]], timestamp: Timestamp) -> None:
    """
    Raises:
        ArgumentTypeError: one of them gives no number; names it.
    """
    for schedule in schedules:
        value = schedule(timestamp)
        if not hasattr(value, "__float__"):
            raise ArgumentTypeError(
                f"the schedule {name_of(schedule)} gave {value!r} of type {type(value).__name__}: a schedule is a "
                "function of the timestamp that returns a number"
            )


def _warmup(value: str | int | Time | None) -> Time | None:
    return None if value is None else read_time(value, "warmup")


def _leaves_room(instance: Any, attribute: Any, warmup: Time | None) -> None:
    t_max: Time = instance.t_max
    if warmup is not None and warmup.unit is t_max.unit and warmup.value >= t_max.value:
        raise ArgumentError(
            f"a warmup of {str(warmup)!r} leaves nothing of {str(t_max)!r}; t_max counts the warmup too"
        )


# Time.


# Counts stay ints, which is fast; fractions are exact, because 0.7 * 10 is not 7 in floating point.
_Exact: TypeAlias = int | float | Fraction


@functools.lru_cache
def _part(of: Time, duration: Time) -> int | Fraction:
    amount = of.exact * duration.exact
    return int(amount) if amount.denominator == 1 else amount


def _amount(time: Time, timestamp: Timestamp) -> tuple[_Exact, TimeUnit]:
    """A time, with epochs in batches and a fraction of the duration in the unit of ``max_duration``."""
    amount: _Exact = time.value
    unit = time.unit
    if unit is TimeUnit.DURATION:
        if timestamp.max_duration is None:
            raise ArgumentError(
                f"a schedule over {str(time)!r} needs timestamp.max_duration, which is None outside fit: write the "
                'time in another unit, such as "10ba", or give it one: timestamp.replace(max_duration=Time("2ep"))'
            )
        amount, unit = _part(time, timestamp.max_duration), timestamp.max_duration.unit
    return (amount * (timestamp.batches_per_epoch or 1) if unit is TimeUnit.EPOCH else amount), unit


def _now(unit: TimeUnit, timestamp: Timestamp) -> int | float:
    """How much is finished, in what :func:`_amount` counts."""
    length = timestamp.batches_per_epoch
    return in_batches(timestamp, length) if unit is TimeUnit.EPOCH and length else timestamp.get(unit)


def _whole(now: float, length: _Exact) -> int:
    """How many whole lengths fit into ``now``."""
    return int((Fraction(now) if isinstance(length, Fraction) else now) // length)


def _tau(time: Time, timestamp: Timestamp, since: _Exact = 0) -> float:
    """The part of the stretch from ``since`` to ``time`` that is finished, in [0, 1]."""
    amount, unit = _amount(time, timestamp)
    if amount <= since:
        return 1.0
    return min(1.0, max(0.0, float((_now(unit, timestamp) - since) / (amount - since))))


def _warmed_up(t_max: Time, warmup: Time | None, timestamp: Timestamp) -> tuple[float, float]:
    """How far the warmup is, and ``tau`` of the rest."""
    if warmup is None:
        return 1.0, _tau(t_max, timestamp)
    (amount, unit), (_, other) = _amount(warmup, timestamp), _amount(t_max, timestamp)
    convertible = unit is other or (
        {unit, other} == {TimeUnit.EPOCH, TimeUnit.BATCH} and bool(timestamp.batches_per_epoch)
    )
    return _tau(warmup, timestamp), _tau(t_max, timestamp, amount if convertible else 0)


def _between(start: float, end: float, tau: float) -> float:
    # Exactly start at 0 and end at 1.
    return start * (1.0 - tau) + end * tau


# Schedules.


@attrs.frozen
class constant(Schedule):
    """Always ``value``.

    >>> constant(0.1)(Timestamp(batch=7))
    0.1
    """

    value: float = attrs.field(converter=_number, validator=_finite)

    def __call__(self, timestamp: Timestamp) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"constant({self.value!r})"


@attrs.frozen
class linear(Schedule):
    """From ``start`` to ``end`` over the time ``t``, and ``end`` from there on.

    >>> schedule = linear(1.0, 0.0, "4ba")
    >>> [schedule(Timestamp(batch=i)) for i in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    start: float = attrs.field(converter=_number, validator=_finite)
    end: float = attrs.field(converter=_number, validator=_finite)
    t: Time = attrs.field(converter=_length, validator=_lasting)

    def __call__(self, timestamp: Timestamp) -> float:
        return _between(self.start, self.end, _tau(self.t, timestamp))


@attrs.frozen
class warmup(Schedule):
    """``schedule``, multiplied by a factor that rises from 0 to 1 over the time ``t``.

    >>> schedule = warmup("4ba", step("6ba", gamma=0.5))
    >>> [schedule(Timestamp(batch=i)) for i in range(8)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.5]
    """

    t: Time = attrs.field(converter=_length, validator=_lasting)
    schedule: Callable[[Timestamp], float] = attrs.field(default=constant(1.0), converter=_as_schedule)

    def __call__(self, timestamp: Timestamp) -> float:
        try:
            return _tau(self.t, timestamp) * self.schedule(timestamp)
        except TypeError:
            _refuse_no_numbers((self.schedule,), timestamp)
            raise


@attrs.frozen
class cosine(Schedule):
    """A warmup from 0 to ``peak``, then half a cosine from ``peak`` to ``final``, which ``t_max`` reaches.

    With ``tau`` the part of the time from the end of the warmup to ``t_max`` that is over, the value is
    ``final + (peak - final) (1 + cos(pi tau)) / 2`` (https://arxiv.org/abs/1608.03983, without restarts).
    Where the two times have units that can't be converted, ``tau`` begins at 0 and the warmup is a factor.

    >>> schedule = cosine("6ba", peak=1.0, warmup="2ba", final=0.5)
    >>> [round(schedule(Timestamp(batch=i)), 3) for i in range(8)]
    [0.0, 0.5, 1.0, 0.927, 0.75, 0.573, 0.5, 0.5]
    """

    t_max: Time = attrs.field(converter=_length, validator=_lasting)
    peak: float = attrs.field(default=1.0, converter=_number, validator=_finite)
    warmup: Time | None = attrs.field(default=None, converter=_warmup, validator=_leaves_room)
    final: float = attrs.field(default=0.0, converter=_number, validator=_finite)

    def __call__(self, timestamp: Timestamp) -> float:
        factor, tau = _warmed_up(self.t_max, self.warmup, timestamp)
        return factor * _between(self.peak, self.final, (1.0 - math.cos(math.pi * tau)) / 2.0)


@attrs.frozen
class polynomial(Schedule):
    """A warmup from 0 to ``peak``, then ``final + (peak - final) (1 - tau)^power``, with the times of :class:`cosine`.

    >>> schedule = polynomial("4ba", power=2)
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """

    t_max: Time = attrs.field(converter=_length, validator=_lasting)
    power: float = attrs.field(default=1.0, converter=_number, validator=_positive)
    peak: float = attrs.field(default=1.0, converter=_number, validator=_finite)
    warmup: Time | None = attrs.field(default=None, converter=_warmup, validator=_leaves_room)
    final: float = attrs.field(default=0.0, converter=_number, validator=_finite)

    def __call__(self, timestamp: Timestamp) -> float:
        factor, tau = _warmed_up(self.t_max, self.warmup, timestamp)
        return factor * _between(self.final, self.peak, (1.0 - tau) ** self.power)


@attrs.frozen
class cosine_restarts(Schedule):
    """Half cosines from ``peak`` to ``final``, the first over the time ``t``, each ``growth`` times as long as before.

    Warm restarts: https://arxiv.org/abs/1608.03983.

    >>> schedule = cosine_restarts("2ba", growth=2)
    >>> [round(schedule(Timestamp(batch=i)), 3) for i in range(7)]
    [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 1.0]
    """

    t: Time = attrs.field(converter=_length, validator=_lasting)
    peak: float = attrs.field(default=1.0, converter=_number, validator=_finite)
    final: float = attrs.field(default=0.0, converter=_number, validator=_finite)
    growth: int = attrs.field(default=1, validator=_growth)

    def __call__(self, timestamp: Timestamp) -> float:
        length, unit = _amount(self.t, timestamp)
        rest: _Exact = _now(unit, timestamp)
        if not length:
            return self.final
        if self.growth == 1:
            rest -= _whole(_now(unit, timestamp), length) * length
        while rest >= length:
            rest, length = rest - length, length * self.growth
        return _between(self.peak, self.final, (1.0 - math.cos(math.pi * float(rest / length))) / 2.0)


@attrs.frozen
class step(Schedule):
    """``start``, multiplied by ``gamma`` at the end of each stretch of the time ``every``.

    >>> schedule = step("2ba", gamma=0.5)
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: Time = attrs.field(converter=_length, validator=_lasting)
    gamma: float = attrs.field(default=0.1, converter=_number, validator=_finite)
    start: float = attrs.field(default=1.0, converter=_number, validator=_finite)

    def __call__(self, timestamp: Timestamp) -> float:
        length, unit = _amount(self.every, timestamp)
        return self.start * self.gamma ** _whole(_now(unit, timestamp), length) if length else self.start


def _milestones(times: Iterable[str | int | Time]) -> tuple[Time, ...]:
    if isinstance(times, str) or not isinstance(times, Iterable):
        raise ArgumentTypeError(f"milestones must be several times, such as [{times!r}, ...], got {times!r}")
    return tuple(map(Time.parse, times))


@attrs.frozen
class multistep(Schedule):
    """``start``, multiplied by ``gamma`` at each of the ``milestones``, which may be in different units.

    >>> schedule = multistep(["1ba", "3ba"], gamma=0.5)
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [1.0, 0.5, 0.5, 0.25, 0.25]
    """

    milestones: tuple[Time, ...] = attrs.field(converter=_milestones)
    gamma: float = attrs.field(default=0.1, converter=_number, validator=_finite)
    start: float = attrs.field(default=1.0, converter=_number, validator=_finite)

    def __call__(self, timestamp: Timestamp) -> float:
        amounts = (_amount(milestone, timestamp) for milestone in self.milestones)
        return self.start * self.gamma ** sum(_now(unit, timestamp) >= amount for amount, unit in amounts)


@attrs.frozen
class exponential(Schedule):
    """``start gamma^(now / every)``: multiplied by ``gamma`` over each stretch of the time ``every``, smoothly.

    >>> schedule = exponential("2ba", gamma=0.25)
    >>> [schedule(Timestamp(batch=i)) for i in range(4)]
    [1.0, 0.5, 0.25, 0.125]
    """

    every: Time = attrs.field(converter=_length, validator=_lasting)
    gamma: float = attrs.field(converter=_number, validator=_positive)
    start: float = attrs.field(default=1.0, converter=_number, validator=_finite)

    def __call__(self, timestamp: Timestamp) -> float:
        length, unit = _amount(self.every, timestamp)
        return self.start * self.gamma ** float(_now(unit, timestamp) / length) if length else self.start


def _factors(factors: Iterable[Callable[[Timestamp], float]]) -> tuple[Callable[[Timestamp], float], ...]:
    return tuple(factors)


@attrs.frozen
class product(Schedule):
    """The product of its factors; ``a * b`` writes it."""

    factors: tuple[Callable[[Timestamp], float], ...] = attrs.field(converter=_factors)

    def __call__(self, timestamp: Timestamp) -> float:
        try:
            return math.prod(factor(timestamp) for factor in self.factors)
        except TypeError:
            _refuse_no_numbers(self.factors, timestamp)
            raise

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.factors))
