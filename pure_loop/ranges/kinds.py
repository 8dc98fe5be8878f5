"""Ranges: what a setting may be, how it is read, and which values have to be refused."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from typing import Any, TypedDict, Unpack

import attrs

from pure_loop._internal.arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_text,
    is_integer,
    is_scheduler,
    refusal,
    refuse_no_schedule,
)
from pure_loop.errors import ArgumentError
from pure_loop.lens import BatchKey, Lens
from pure_loop.ranges.strengths import Scheduled
from pure_loop.time import Time, TimeUnit, read_time

__all__ = [
    "Above",
    "AtLeast",
    "Between",
    "Duration",
    "Flag",
    "Index",
    "Name",
    "Number",
    "OneOf",
    "Range",
    "Setting",
    "Within",
]

_NO_NUMBERS = ("1", True, [1])


class Range(ABC):
    """What a setting may be.

    Attributes:
        typical: what strategies draw: of numbers ``(least, most)``, of others the values. None: now and then anything
            in the range; (): nothing, the default is kept; else it is drawn always.
        example: a call for errors; "": one with the default.
        reads_schedules: whether it reads a schedule itself, where the annotation allows one.
        one_of: settings with the same word here are ways to say one thing: exactly one of them has to be given.
    """

    typical: tuple[Any, ...] | None = None
    example: str = ""
    one_of: str = ""
    reads_schedules: bool = False

    @abstractmethod
    def read(self, setting: Setting, value: object) -> Any:
        """The value as the function gets it.

        Raises:
            ArgumentError, ArgumentTypeError: it is outside the range.
        """

    @abstractmethod
    def in_words(self, setting: Setting) -> str:
        """The range, for docs."""

    @abstractmethod
    def outside(self, setting: Setting) -> tuple[object, ...]:
        """Values that have to be refused, for tests."""


class Options(TypedDict, total=False):
    """What a range of numbers says besides its bounds; see :class:`Number`."""

    typical: tuple[float, float] | tuple[()] | None
    example: str
    one_of: str
    wanted: str


class Number(Range):
    """Any finite number, whole where the annotation is ``int``; ``wanted`` are an error's words for it."""

    def __init__(
        self,
        *,
        least: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
        typical: tuple[float, float] | tuple[()] | None = None,
        example: str = "",
        one_of: str = "",
        wanted: str = "",
    ) -> None:
        self.least, self.above, self.below = least, above, below
        self.typical, self.example, self.one_of, self.wanted = typical, example, one_of, wanted

    def read(self, setting: Setting, value: object) -> int | float:
        where, example = setting.where, self.example or setting.example
        wanted = self.wanted
        if setting.whole:
            least = None if self.least == -math.inf else int(self.least)
            if setting.optional and not wanted:
                wanted = f"a whole number{'' if least is None else f' of at least {least}'}, or None"
            return check_integer(setting.name, value, where=where, least=least, wanted=wanted, example=example)
        bounds = {"least": self.least, "above": self.above, "below": self.below}
        return check_number(setting.name, value, where=where, **bounds, wanted=wanted, example=example)

    def in_words(self, setting: Setting) -> str:
        kind = "whole number" if setting.whole else "number"
        low = f"at least {self.least:g}" if self.least > -math.inf else f"above {self.above:g}"
        high = f"less than {self.below:g}"
        bounds = [low] * (max(self.least, self.above) > -math.inf) + [high] * (self.below < math.inf)
        return " ".join([kind, " and ".join(bounds)]).rstrip()

    def outside(self, setting: Setting) -> tuple[object, ...]:
        numbers: list[object] = [1.5, math.nan] if setting.whole else [math.nan, math.inf, -math.inf]
        if self.least > -math.inf:
            numbers.append(int(self.least) - 1 if setting.whole else math.nextafter(self.least, -math.inf))
        if self.above > -math.inf:
            numbers += [self.above, self.above - 1]
        if self.below < math.inf:
            numbers.append(self.below)
        return (*numbers, *_NO_NUMBERS)


class Above(Number):
    """A finite number above ``limit``; ``options`` are those of :class:`Number`."""

    def __init__(self, limit: float, *, below: float = math.inf, **options: Unpack[Options]) -> None:
        super().__init__(least=-math.inf, above=limit, below=below, **options)


class AtLeast(Number):
    """A finite number of at least ``limit``; ``options`` are those of :class:`Number`."""

    def __init__(self, limit: float, **options: Unpack[Options]) -> None:
        super().__init__(least=limit, above=-math.inf, below=math.inf, **options)


class Between(Number):
    """A number in ``[least, below)``; ``options`` are those of :class:`Number`."""

    def __init__(self, least: float, below: float, **options: Unpack[Options]) -> None:
        super().__init__(least=least, above=-math.inf, below=below, **options)


class Within(Number):
    """A number in ``[least, most]``; ``options`` are those of :class:`Number`."""

    def __init__(self, least: float, most: float, **options: Unpack[Options]) -> None:
        options = {"wanted": f"a number from {least:g} to {most:g}", **options}
        super().__init__(least=least, above=-math.inf, below=math.nextafter(most, math.inf), **options)

    def in_words(self, setting: Setting) -> str:
        return self.wanted.removeprefix("a ")


@attrs.frozen(init=False)
class OneOf(Range):
    """One of some values; a ``Literal`` is one by itself."""

    choices: tuple[object, ...]
    typical: tuple[object, ...] | None
    example: str

    def __init__(self, *choices: object, typical: tuple[object, ...] | None = None, example: str = "") -> None:
        self.__attrs_init__(choices, typical, example)

    def read(self, setting: Setting, value: object) -> object:
        return check_choice(setting.name, value, self.choices, where=setting.where)

    def in_words(self, setting: Setting) -> str:
        return ", ".join(f'`"{choice}"`' if isinstance(choice, str) else f"`{choice}`" for choice in self.choices)

    def outside(self, setting: Setting) -> tuple[object, ...]:
        return "none of them", 17, ()


@attrs.frozen
class Flag(Range):
    """True or False; a ``bool`` is one by itself."""

    typical: tuple[object, ...] | None = None

    def read(self, setting: Setting, value: object) -> bool:
        return check_flag(setting.name, value, where=setting.where)

    def in_words(self, setting: Setting) -> str:
        return "`True`, `False`"

    def outside(self, setting: Setting) -> tuple[object, ...]:
        return 1, "yes", 0.0


@attrs.frozen
class Name(Range):
    """A text that is not empty."""

    typical: tuple[object, ...] | None = ()

    def read(self, setting: Setting, value: object) -> str:
        return check_text(setting.name, value)

    def in_words(self, setting: Setting) -> str:
        return "text"

    def outside(self, setting: Setting) -> tuple[object, ...]:
        return "", 3, b"name"


@attrs.frozen
class Index(Range):
    """A part of a batch: an index, a key or a Lens."""

    typical: tuple[object, ...] | None = ()

    def read(self, setting: Setting, value: object) -> BatchKey:
        if is_integer(value) or isinstance(value, str | Lens):
            return value
        raise refusal(setting.name, value, "an index or a key, such as 1 or 'labels', or a pl.Lens", setting.where)

    def in_words(self, setting: Setting) -> str:
        return "index, key or Lens"

    def outside(self, setting: Setting) -> tuple[object, ...]:
        return True, 1.0, None


@attrs.frozen
class Duration(Range):
    """An amount of training above 0: a Time, or what is read as one.

    Args:
        typical, example, one_of: as in :class:`Range`.
        clock: whether it may be of seconds, which pass differently in every run.
        units: those that an error offers.
        zero: what an error says of no time at all; ``{time!r}`` stands for it.
    """

    typical: tuple[str, ...] | None = None
    example: str = ""
    one_of: str = ""
    clock: bool = False
    units: tuple[TimeUnit, ...] = tuple(TimeUnit)
    zero: str = "that is no time at all; leave it out instead"

    def read(self, setting: Setting, value: Any) -> Time:
        call = f"{setting.where}: {setting.name}={value!r}"
        time = read_time(value, f"{setting.where}: {setting.name}", self.units)
        if not time:
            raise ArgumentError(f"{call}: {self.zero.format(time=str(time))}.")
        if time.unit is TimeUnit.SECOND and not self.clock:
            raise ArgumentError(
                f"{call} goes by the clock, so every run would be another one; count batches, samples, tokens or "
                'epochs: "100ba".'
            )
        return time

    def in_words(self, setting: Setting) -> str:
        return 'time above 0, such as `"100ba"`'

    def outside(self, setting: Setting) -> tuple[object, ...]:
        return "0ba", "soon", 0.5, 3, "-1ba", True, *(() if self.clock else ("10s",))


@attrs.frozen(kw_only=True)
class Setting:
    """An argument that has a range.

    Attributes:
        where: what is called, ``sam``.
        name: the argument's.
        range: what it may be.
        whole: whether it is an ``int``.
        optional: whether it may be None.
        scheduled: whether it may be a schedule.
        default: what it is where it isn't given; ``inspect.Parameter.empty``: it has to be.
    """

    where: str
    name: str
    range: Range
    whole: bool
    optional: bool
    scheduled: bool
    default: object

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def example(self) -> str:
        """A call with the default, where there is one that shows something."""
        return "" if self.required or self.default is None else f"{self.where}({self.name}={self.default!r})"

    @property
    def in_words(self) -> str:
        alternatives = [", or a schedule"] * self.scheduled + [", or None"] * self.optional
        return "".join([self.range.in_words(self), *alternatives])

    @property
    def outside(self) -> tuple[object, ...]:
        """Values that have to be refused."""
        return self.range.outside(self) + (() if self.optional else (None,))

    def read(self, value: Any) -> Any:
        """
        Raises:
            ArgumentError, ArgumentTypeError: it is outside the range.
        """
        if value is None and self.optional:
            return None
        if self.scheduled and (callable(value) or is_scheduler(value)):
            refuse_no_schedule(f"{self.where}: {self.name}", value)
            return Scheduled(value, functools.partial(self.range.read, self))
        return self.range.read(self, value)
