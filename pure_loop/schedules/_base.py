"""What all schedules have: they are multiplied with numbers and other schedules, and read how far a time is over.

They measure progress and ``tau`` in the unit of the time. ``constant`` and ``product`` stand beside it: they are what
numbers and products are turned into.
"""

# These classes are called as functions and named like them.
# ruff: noqa: N801

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache, partial, reduce, wraps
from typing import Annotated, Protocol, TypeAlias, TypeVar, cast

import attrs
from torch import Tensor

from pure_loop._internal.arguments import name_of, refuse_no_schedule
from pure_loop._internal.reprs import call, changed_fields
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.ranges import Duration, Number, checked
from pure_loop.time import Time, TimeLike, Timestamp, TimeUnit, in_batches, read_time

__all__ = ["Schedule", "constant", "product"]

LASTING = Duration(clock=True, zero="a schedule can't change over a time of {time!r}; write constant(value) instead")
"""The range of a time over which a schedule changes."""

S = TypeVar("S")


def _as_one_number(call: Callable[[S, Timestamp], float]) -> Callable[[S, Timestamp], float]:
    """In a step that is traced a schedule is one number, whatever its code asks of the timestamp on the way."""

    @wraps(call)
    def called(self: S, timestamp: Timestamp) -> float:
        traced: Callable[[Callable[[Timestamp], float]], float] | None = getattr(timestamp, "number_of", None)
        return call(self, timestamp) if traced is None else traced(partial(call, self))

    return called


class Schedule(ABC):
    """A callable ``Timestamp -> float`` that multiplies with numbers and other schedules.

    Attributes:
        fixed_value: the value, where it is the same at every timestamp; None: it may change. An optimizer of a
            fixed rate needs not ask for it in each step.

    >>> from pure_loop.schedules import linear
    >>> halved = 0.5 * linear(1.0, 0.0, "4ba")
    >>> [halved(Timestamp(batch=i)) for i in range(4)]
    [0.5, 0.375, 0.25, 0.125]
    """

    __slots__ = ()

    @property
    def fixed_value(self) -> float | None:
        return None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Not by the attribute, which is no function of the class where it is a static method or one of the class.
        method: Callable[[Schedule, Timestamp], float] | None = vars(cls).get("__call__")
        if method is not None and not hasattr(method, "__wrapped__"):
            type.__setattr__(cls, "__call__", _as_one_number(method))

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        if "__repr__" in vars(cls) and vars(cls)["__repr__"].__code__.co_filename.startswith("<attrs generated"):
            type.__setattr__(cls, "__repr__", Schedule.__repr__)

    def __repr__(self) -> str:
        return call(type(self).__name__, changed_fields(self))

    @abstractmethod
    def __call__(self, timestamp: Timestamp) -> float:
        """The value for what starts at ``timestamp``."""

    def endless_warmup(self, end: End) -> Time | None:
        """The time over which it rises at first, where a run ends before that is over; None: there is none."""
        return None

    def __mul__(self, factor: Callable[[Timestamp], float] | float) -> product:
        return product((self, as_schedule(factor)))

    def __rmul__(self, factor: Callable[[Timestamp], float] | float) -> product:
        return product((as_schedule(factor), self))


class HasTime(Protocol):
    """What changes over a time."""

    @property
    def time(self) -> Time: ...


class WarmupSchedule(Schedule):
    """A schedule that rises from 0 over its field ``warmup``, if it has one."""

    __slots__ = ()

    warmup: Time | None

    def endless_warmup(self, end: End) -> Time | None:
        return self.warmup if self.warmup is not None and end.comes_before(self.warmup) else None


@checked
@attrs.frozen
class constant(Schedule):
    """Always ``value``.

    >>> constant(0.1)(Timestamp(batch=7))
    0.1
    """

    value: Annotated[float, Number()]

    @property
    def fixed_value(self) -> float | None:
        return self.value if type(self) is constant else None  # a subclass may give another one

    def __call__(self, timestamp: Timestamp) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"constant({self.value!r})"


def _factors(factors: Iterable[Callable[[Timestamp], float]]) -> tuple[Callable[[Timestamp], float], ...]:
    return tuple(factors)


@checked
@attrs.frozen
class product(Schedule):
    """The product of its factors; ``a * b`` writes it.

    >>> product((constant(2.0), constant(3.0)))(Timestamp())
    6.0
    """

    factors: tuple[Callable[[Timestamp], float], ...] = attrs.field(converter=_factors)

    def __call__(self, timestamp: Timestamp) -> float:
        try:
            return reduce(operator.mul, (factor(timestamp) for factor in self.factors), 1)
        except TypeError:
            refuse_no_numbers(self.factors, timestamp)
            raise

    def endless_warmup(self, end: End) -> Time | None:
        return next(filter(None, (warmup_in(factor, end) for factor in self.factors)), None)

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.factors))


def as_schedule(value: Callable[[Timestamp], float] | float) -> Callable[[Timestamp], float]:
    if isinstance(value, Tensor):
        advice = "write schedule(state.timestamp) * tensor for the product with its number"  # type: ignore[unreachable]
        raise ArgumentTypeError(f"a schedule is made of numbers, not of a tensor of {tuple(value.shape)}: {advice}")
    if not callable(value):
        return constant(value)
    refuse_no_schedule("a schedule", value)
    return value


def refuse_no_numbers(schedules: Iterable[Callable[[Timestamp], object]], timestamp: Timestamp) -> None:
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


def warmup_in(schedule: object, end: End) -> Time | None:
    """That of a schedule; None of a function of the user's own, too, of which it isn't known."""
    return schedule.endless_warmup(end) if isinstance(schedule, Schedule) else None


def field_names(schedule: Schedule) -> list[str]:
    """The fields of a schedule, each of which is one of its settings."""
    return [field.name for field in attrs.fields(cast("type[attrs.AttrsInstance]", type(schedule)))]


def as_time(value: TimeLike) -> Time:
    """A time, as the annotation of a field has it."""
    return read_time(value, "time")


def as_warmup(value: TimeLike | None) -> Time | None:
    return None if value is None else read_time(value, "warmup")


def leaves_room(schedule: HasTime, attribute: attrs.Attribute[Time | None], warmup: Time | None) -> None:
    """
    Raises:
        ArgumentError: nothing is left of the time after the warmup.
    """
    if warmup is not None and warmup.unit is schedule.time.unit and warmup.value >= schedule.time.value:
        raise ArgumentError(
            f"a warmup of {str(warmup)!r} leaves nothing of {str(schedule.time)!r}; time counts the warmup too"
        )


# Counts stay ints, which is fast; fractions are exact, because 0.7 * 10 is not 7 in floating point.
Exact: TypeAlias = int | float | Fraction


@lru_cache
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
