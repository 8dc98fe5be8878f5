"""Durations, and where a run is: ``Time`` and ``Timestamp``.

The words, as this library uses them:

* a *batch* is what the dataloader gives and one step of the optimizer uses, whatever the number of microbatches;
* an *epoch* is one pass over the dataloader; a *sample* is one row of a batch; a *token* is counted by the batch;
* an *iteration* is a stretch of training of a length that the user chose (``iteration_length``);
* a :class:`Timestamp` counts what is *finished*: the batch that starts at timestamp ``t`` is batch number ``t.batch``;
* an *interval* of ``k`` units comes round where ``floor(previous / k) != floor(now / k)``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypedDict, Unpack

import attrs

from pure_loop._internal import pytree as _pytree
from pure_loop._internal.arguments import check_integer, check_number, is_integer
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.records import Record, copier
from pure_loop._internal.reprs import brief
from pure_loop._internal.suggestions import Elsewhere
from pure_loop.errors import ArgumentError, ArgumentTypeError, TimeFormatError
from pure_loop.event import Event

if TYPE_CHECKING:
    from fractions import Fraction  # with decimal behind it, which importing pure_loop needn't wait for

__all__ = ["Time", "TimeLike", "TimeUnit", "Timestamp", "TimestampFields", "due", "passed", "read_interval"]
__all__ += ["read_time"]


class TimeUnit(StrEnum):
    """What a duration counts; the value is the suffix in its text."""

    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    ITERATION = "iter"
    DURATION = "dur"
    SECOND = "s"


_REAL = frozenset({TimeUnit.DURATION, TimeUnit.SECOND})
_NUMBER = r"(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
# As text: compiled by their first use, which importing pure_loop is not.
_COUNT = rf"({_NUMBER})(ep|ba|sp|tok|iter|dur)"
_CLOCK = rf"(?:({_NUMBER})d)?(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?"
_CLOCK_SECONDS = (86400, 3600, 60, 1)
_EXAMPLES = {
    TimeUnit.EPOCH: '"2ep" (epochs)',
    TimeUnit.BATCH: '"10ba" (batches)',
    TimeUnit.SAMPLE: '"5000sp" (samples)',
    TimeUnit.TOKEN: '"1e6tok" (tokens)',
    TimeUnit.ITERATION: '"3iter" (iterations)',
    TimeUnit.DURATION: '"0.5dur" (half of max_duration)',
    TimeUnit.SECOND: 'wall-clock time: "90s", "1.5s", "30m", "1h30m", "1d2h"',
}


def _forms(units: Iterable[TimeUnit]) -> str:
    *units_before, last = (_EXAMPLES[unit] for unit in units)
    return f"write {', '.join(units_before)}, or {last}" if units_before else f"write {last}"


_FORMS = _forms(TimeUnit)

# Words for units, as other programs and people write them; a plural's "s" is left out.
_WORDS = {
    **dict.fromkeys(("e", "epoch", "epoche"), "ep"),
    **dict.fromkeys(("b", "batch", "batche", "step"), "ba"),
    **dict.fromkeys(("sample", "example"), "sp"),
    **dict.fromkeys(("t", "token"), "tok"),
    "duration": "dur",
    **dict.fromkeys(("d", "day"), "d"),
    **dict.fromkeys(("h", "hour", "hr"), "h"),
    **dict.fromkeys(("m", "minute", "min"), "m"),
    **dict.fromkeys(("s", "second", "sec"), "s"),
}


@attrs.frozen(init=False, repr=False, order=False)
class Time:
    """An amount of training: ``Time("2ep")``, ``Time(2, "ep")`` and ``Time(2, TimeUnit.EPOCH)`` are equal.

    Attributes:
        value: how many; an int, and a float for fractions of the duration and for seconds. Never negative.
        unit: of what.

    Times of one unit add, subtract, compare, and divide to a float; ``time * number`` rounds counts down.
    A time of 0 is false, as a ``timedelta`` is, and the only number that needs no unit: ``Time(0)``.

    Raises:
        TimeFormatError: (a ValueError) for a text or a number that is no time; a number other than 0 needs its unit.
        ArgumentTypeError: (a TypeError) for anything that is neither a text, a whole number nor a Time.
        ArgumentError: (a ValueError) where two units meet.

    >>> Time("1e6tok"), Time("1h30m"), Time("0.5dur")
    (Time('1000000tok'), Time('5400s'), Time('0.5dur'))
    >>> Time("10ba") - "4ba", Time("3ep") / "12ep"
    (Time('6ba'), 0.25)
    """

    value: int | float
    unit: TimeUnit

    def __init__(self, value: str | float | Time, unit: TimeUnit | str | None = None) -> None:
        if unit is not None:
            self.__attrs_init__(*_from_number(value, unit))
        elif isinstance(value, Time):
            self.__attrs_init__(value.value, value.unit)
        elif isinstance(value, str):
            self.__attrs_init__(*_from_text(value))
        else:
            number, of_unit = _from_number(_whole(value), TimeUnit.EPOCH)
            if number:
                raise TimeFormatError(f"Time({value!r}): {_unitless(number, TimeUnit)}.")
            self.__attrs_init__(number, of_unit)

    @classmethod
    def parse(cls, value: TimeLike) -> Time:
        """The time that an argument means; a Time comes back as it is."""
        return value if isinstance(value, Time) else cls(value)

    @property
    def exact(self) -> Fraction:
        """The value as the number that its decimal text means: ``0.1dur`` is one tenth and not the nearest float."""
        return _decimal(self.value)

    def __add__(self, other: Time | str) -> Time:
        other = self._like(other, "add")
        return Time(_number(self.exact + other.exact, self.unit), self.unit)

    def __sub__(self, other: Time | str) -> Time:
        other = self._like(other, "subtract")
        if other.value > self.value:
            raise ArgumentError(f"{self} - {other} would be negative; a time counts from 0")
        return Time(_number(self.exact - other.exact, self.unit), self.unit)

    def __mul__(self, factor: float) -> Time:
        if not isinstance(factor, (int, float)):
            return NotImplemented
        return Time(_number(self.exact * _decimal(factor), self.unit), self.unit)

    __rmul__ = __mul__

    def __truediv__(self, other: Time | str) -> float:
        other = self._like(other, "divide")
        return self.value / other.value

    def __lt__(self, other: Time | str) -> bool:
        return NotImplemented if isinstance(other, Timestamp) else self.value < self._like(other, "compare").value

    def __le__(self, other: Time | str) -> bool:
        return NotImplemented if isinstance(other, Timestamp) else self.value <= self._like(other, "compare").value

    def __gt__(self, other: Time | str) -> bool:
        return NotImplemented if isinstance(other, Timestamp) else self.value > self._like(other, "compare").value

    def __ge__(self, other: Time | str) -> bool:
        return NotImplemented if isinstance(other, Timestamp) else self.value >= self._like(other, "compare").value

    def __bool__(self) -> bool:
        return self.value != 0

    def __str__(self) -> str:
        return f"{_text(self.value)}{self.unit.value}"

    def __repr__(self) -> str:
        return f"Time({str(self)!r})"

    def in_a_call(self) -> str:
        return repr(str(self))

    def _like(self, value: object, verb: str) -> Time:
        if not isinstance(value, (Time, str)):
            raise ArgumentTypeError(f"can't {verb} {self} and {value!r}; write a Time or a text such as {str(self)!r}")
        value = Time.parse(value)
        if value.unit is not self.unit:
            raise ArgumentError(
                f"can't {verb} {self} and {value}: only a Timestamp has both {_plural(self.unit)} and "
                f"{_plural(value.unit)}: timestamp.get({self.unit.value!r}), timestamp >= {str(value)!r}"
            )
        return value


TimeLike: TypeAlias = str | Time | Literal[0]
"""What is read as a time: 0 is the only number that is one without a unit."""

# Of which an error offers the first two, for a number without a unit.
_LIKELY = (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.TOKEN, TimeUnit.SECOND)


def _unitless(value: float, units: Iterable[TimeUnit]) -> str:
    texts = [f'"{value}{unit.value}" ({_plural(unit)})' for unit in _LIKELY if unit in units][:2]
    return f"{value} of what? Write {' or '.join(texts)}"


def _whole(value: object) -> int:
    if isinstance(value, bool):
        raise ArgumentTypeError(f"a time can't be {value!r}; {_FORMS}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"a time can't be {brief(value)} of type {type(value).__name__}; {_FORMS}") from None


def _from_number(value: object, unit: TimeUnit | str) -> tuple[int | float, TimeUnit]:
    unit = _unit(unit)
    number: int | float = value if isinstance(value, float) else _whole(value)
    if not math.isfinite(number) or number < 0:
        raise TimeFormatError(f"Time({value!r}, {unit.value!r}): a time is finite and not negative; {_FORMS}")
    if unit in _REAL:
        return float(number), unit
    if number != int(number):
        raise TimeFormatError(f"Time({value!r}, {unit.value!r}): {_whole_only(unit)}; {_FORMS}")
    return int(number), unit


def _from_text(text: str) -> tuple[int | float, TimeUnit]:
    from fractions import Fraction

    stripped = text.strip()
    count = re.fullmatch(_COUNT, stripped)
    try:
        if count is not None:
            number, unit = Fraction(count[1].replace("_", "")), TimeUnit(count[2])
            if unit not in _REAL and number.denominator != 1:
                raise TimeFormatError(f"can't read {text!r} as a time: {_whole_only(unit)}; {_FORMS}")
            return _number(number, unit), unit
        clock = re.fullmatch(_CLOCK, stripped)
        if clock is not None and stripped:
            parts = zip(clock.groups(), _CLOCK_SECONDS, strict=True)
            seconds = sum(Fraction(part.replace("_", "")) * scale for part, scale in parts if part)
            return _number(Fraction(seconds), TimeUnit.SECOND), TimeUnit.SECOND
    except OverflowError:
        pass
    reason = " a time is not negative;" if stripped.startswith("-") else ""
    raise TimeFormatError(f"can't read {text!r} as a time{_guess(text, TimeUnit)}:{reason} {_FORMS}")


def _guess(text: str, units: Iterable[TimeUnit]) -> str:
    meant = _meant(text.strip())
    return "" if meant is None or Time(meant).unit not in units else f' (did you mean "{meant}"?)'


def _meant(text: str) -> str | None:
    """The time that was probably meant, such as "3ep" by "3 epochs"."""
    close = re.sub(r"\s+", "", text.lower())
    if re.fullmatch(_NUMBER, close):
        close += "ep"
    close = re.sub(rf"({_NUMBER})([a-z]+)", _in_our_units, close)
    if re.fullmatch(_COUNT, close) is None and re.fullmatch(_CLOCK, close) is None:
        return None
    if not close or close == text:
        return None
    try:
        Time(close)
    except TimeFormatError:
        return None
    return close


def _in_our_units(result: re.Match[str]) -> str:
    number, word = result.groups()
    singular = word.removesuffix("s") if len(word) > 2 else word
    return number + _WORDS.get(singular, singular)


def read_time(value: Any, name: str, units: Iterable[TimeUnit] = TimeUnit) -> Time:
    """The time that the argument ``name`` means: what every function does that takes one.

    Raises:
        TimeFormatError, ArgumentTypeError: it is none; names the argument, and offers these units alone.
    """
    if is_integer(value) and value > 0:
        raise TimeFormatError(f"{name}={value!r}: {_unitless(int(value), units)}.")
    try:
        return Time.parse(value)
    except (ArgumentError, ArgumentTypeError) as error:
        message = str(error).replace(_FORMS, _forms(units))
        if isinstance(value, str):
            message = message.replace(_guess(value, TimeUnit), _guess(value, units))
        raise type(error)(f"{name}={brief(value)}: {message}") from None


def read_interval(value: object, name: str, units: Iterable[TimeUnit] = TimeUnit) -> Time:
    """The interval that the argument ``name`` means; the number 0 means never.

    Raises:
        TimeFormatError, ArgumentTypeError: as :func:`read_time`.
        ArgumentError: it is 0 of a unit, which comes round never or all the time.
    """
    interval = read_time(value, name, units)
    if not interval and isinstance(value, str | Time):
        text = str(value)
        raise ArgumentError(f"{name}={text!r}: an interval is longer than 0; to say never, write {name}=0.")
    return interval


def _whole_only(unit: TimeUnit) -> str:
    return f"{_plural(unit)} are counted in whole numbers"


def _plural(unit: TimeUnit) -> str:
    return "batches" if unit is TimeUnit.BATCH else f"{unit.name.lower()}s"


def _unit(unit: TimeUnit | str) -> TimeUnit:
    try:
        return TimeUnit(unit)
    except ValueError:
        names = ", ".join(f"{member.value!r}" for member in TimeUnit)
        raise TimeFormatError(f"{unit!r} is not a unit of time; the units are {names}") from None


def _number(value: Fraction, unit: TimeUnit) -> int | float:
    return float(value) if unit in _REAL else math.floor(value)


def _decimal(value: float) -> Fraction:
    from fractions import Fraction

    # repr gives the shortest text that reads back equal, which is the text the user wrote.
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) and value < 1e15 else repr(value)


class TimestampFields(TypedDict, total=False):
    """The fields of a :class:`Timestamp`: the arguments of its ``replace`` for type checkers."""

    epoch: int
    batch: int
    sample: int
    token: int
    batch_in_epoch: int
    sample_in_epoch: int
    token_in_epoch: int
    iteration: int
    epoch_in_iteration: int
    batch_in_iteration: int
    token_in_iteration: int
    total_seconds: float
    epoch_seconds: float
    batch_seconds: float
    max_duration: Time | None
    batches_per_epoch: int | None


@attrs.frozen(kw_only=True, order=False, weakref_slot=False, repr=False)
class Timestamp(Record):
    """What is finished so far. Counts are ints; seconds are floats of wall-clock time.

    It compares with a :class:`Time` or its text in that unit, and never with another timestamp. As text it is the epoch
    and the batch, ``str(timestamp)``; its repr has every count.

    Attributes:
        epoch, batch, sample, token: since the start of training.
        batch_in_epoch, sample_in_epoch, token_in_epoch: since the start of this epoch.
        iteration: finished iterations; 0 where ``iteration_length`` is not set.
        epoch_in_iteration, batch_in_iteration, token_in_iteration: since the start of this iteration.
        total_seconds: wall-clock time of training, summed up at each BATCH_END: everything since FIT_START, evaluations
            and the body of the loop included, which is what a budget of ``"90m"`` is about. The time between two calls
            of ``fit`` is not in it, nor is what came after the last BATCH_END.
        epoch_seconds, batch_seconds: the same, since the start of this epoch; from the BATCH_END before to the last.
        max_duration: where training ends; None outside ``fit``.
        batches_per_epoch: how many batches an epoch has, as far as the data can tell; None where that isn't known, and
            outside ``fit``. Where it is known, epochs of a duration pass batch by batch, and else all at once at their
            ends. An epoch that has fewer batches after all passes what it lacks at its end; what it has more than
            these doesn't count.

    Raises:
        ArgumentTypeError, ArgumentError: a count that is no int of at least 0, or seconds that are no finite number of
            at least 0.

    >>> now = Timestamp(max_duration=Time("4ba")).next_batch(samples=16, tokens=0, seconds=0.5)
    >>> now.batch, now.sample, now.elapsed
    (1, 16, 0.25)
    >>> now >= "16sp", now < "2ep"
    (True, True)
    >>> now
    Timestamp(epoch=0, batch=1, sample=16, batch_in_epoch=1, ..., max_duration=Time('4ba'))
    """

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    iteration: int = 0
    epoch_in_iteration: int = 0
    batch_in_iteration: int = 0
    token_in_iteration: int = 0
    total_seconds: float = 0.0
    epoch_seconds: float = 0.0
    batch_seconds: float = 0.0
    max_duration: Time | None = None
    batches_per_epoch: int | None = None

    def __attrs_post_init__(self) -> None:
        for name, value in zip(_NAMES[:-2], _values(self), strict=False):
            if hasattr(type(value), "decide"):  # a number of a step that is compiled
                continue
            if name.endswith("_seconds"):
                check_number(name, value, where="Timestamp", least=0)
            else:
                check_integer(name, value, where="Timestamp", least=0)
        if self.max_duration is not None and not isinstance(self.max_duration, Time):
            raise ArgumentTypeError(f'Timestamp: max_duration={self.max_duration!r}: write Time("3ep"), or None.')
        if self.batches_per_epoch is not None:
            check_integer("batches_per_epoch", self.batches_per_epoch, where="Timestamp", least=0)

    def next_batch(self, samples: int, tokens: int = 0, seconds: float = 0.0) -> Timestamp:
        """The timestamp once a batch of so many samples and tokens is finished, which took so many seconds."""
        counted: Timestamp = _count(  # it runs once a batch, and attrs.evolve takes ten times as long
            self,
            self.batch + 1,
            self.sample + samples,
            self.token + tokens,
            self.batch_in_epoch + 1,
            self.sample_in_epoch + samples,
            self.token_in_epoch + tokens,
            self.batch_in_iteration + 1,
            self.token_in_iteration + tokens,
            self.total_seconds + seconds,
            self.epoch_seconds + seconds,
            seconds,
        )
        return counted

    def next_epoch(self) -> Timestamp:
        """The timestamp once this epoch is finished."""
        return attrs.evolve(
            self,
            epoch=self.epoch + 1,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            epoch_in_iteration=self.epoch_in_iteration + 1,
            epoch_seconds=0.0,
        )

    def next_iteration(self) -> Timestamp:
        """The timestamp once this iteration is finished."""
        return attrs.evolve(
            self, iteration=self.iteration + 1, epoch_in_iteration=0, batch_in_iteration=0, token_in_iteration=0
        )

    def replace(self, **changes: Unpack[TimestampFields]) -> Timestamp:
        """This timestamp with other values in some fields."""
        return attrs.evolve(self, **changes)

    @property
    def elapsed(self) -> float | None:
        """The fraction of ``max_duration`` that is over, in [0, 1]; None where there is no ``max_duration``.

        >>> Timestamp(epoch=1, batch_in_epoch=2, batches_per_epoch=4, max_duration=Time("2ep")).elapsed
        0.75
        """
        end, length = self.max_duration, self.batches_per_epoch
        if end is None:
            return None
        if end.value == 0:
            return 1.0
        if end.unit is TimeUnit.EPOCH and length:
            return min(1.0, in_batches(self, length) / (end.value * length))
        return min(1.0, self.get(end.unit) / end.value)

    def get(self, unit: TimeUnit | str) -> int | float:
        """How much is finished, in one unit: an int, or a float for ``"s"`` and ``"dur"``.

        Raises:
            ArgumentError: for a fraction of the duration where no ``max_duration`` is known.
        """
        if type(unit) is not TimeUnit:
            unit = _unit(unit)
        if unit is TimeUnit.DURATION:
            elapsed = self.elapsed
            if elapsed is None:
                raise ArgumentError(
                    "a fraction of the duration needs a Timestamp with max_duration; write the time in another unit, "
                    'such as "10ba", or set it: timestamp.replace(max_duration=...)'
                )
            return elapsed
        value: int | float = getattr(self, _FIELD[unit])
        return value

    def has_ended(self) -> bool:
        """Whether ``max_duration`` is over; False where it is not known.

        >>> Timestamp(batch=3, max_duration=Time.parse("3ba")).has_ended()
        True
        """
        end = self.max_duration
        if end is None:
            return False
        field = _FIELD.get(end.unit)
        count: int | float = self.get(end.unit) if field is None else getattr(self, field)
        return count >= end.value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timestamp):
            if isinstance(other, Time) or (isinstance(other, str) and re.fullmatch(_COUNT, other)):
                raise ArgumentTypeError(
                    f"a timestamp counts in several units, and is equal to none, as {str(other)!r}: compare with "
                    f'timestamp >= "{other}", or one of its counts, timestamp.batch == 3.'
                )
            return NotImplemented
        return bool(_values(self) == _values(other))

    def __hash__(self) -> int:
        return hash(_values(self))

    def __lt__(self, other: Time | str) -> bool:
        time = self._time(other)
        return NotImplemented if time is None else self.get(time.unit) < time.value

    def __le__(self, other: Time | str) -> bool:
        time = self._time(other)
        return NotImplemented if time is None else self.get(time.unit) <= time.value

    def __gt__(self, other: Time | str) -> bool:
        time = self._time(other)
        return NotImplemented if time is None else self.get(time.unit) > time.value

    def __repr__(self) -> str:
        fields = ((field.name, getattr(self, field.name)) for field in attrs.fields(type(self)))
        parts = [f"{name}={value!r}" for name, value in fields if value or name in ("epoch", "batch")]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"

    def __ge__(self, other: Time | str) -> bool:
        time = self._time(other)
        return NotImplemented if time is None else self.get(time.unit) >= time.value

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if name not in _ELSEWHERE]

    @staticmethod
    def _time(value: object) -> Time | None:
        if isinstance(value, Timestamp):
            raise ArgumentTypeError("two timestamps are compared by one of their counts: write a.batch < b.batch.")
        if isinstance(value, int | float):
            raise ArgumentTypeError(
                f'a timestamp counts in several units, and {value!r} names none: compare it with "{value}ep" or '
                f'"{value}ba", or its count timestamp.batch with {value}.'
            )
        return Time.parse(value) if isinstance(value, (Time, str)) else None


def in_batches(timestamp: Timestamp, length: int) -> int:
    """How many batches the epochs so far come to, ``length`` each: the same number before and after EPOCH_END."""
    return timestamp.epoch * length + min(timestamp.batch_in_epoch, length)


_FIELD = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.ITERATION: "iteration",
    TimeUnit.SECOND: "total_seconds",
}
# Those of which there is a whole number, always.
_COUNTED = {unit: operator.attrgetter(name) for unit, name in _FIELD.items() if unit not in _REAL}
_ASKED_AT = dict.fromkeys(TimeUnit, Event.BATCH_END) | {
    TimeUnit.EPOCH: Event.EPOCH_END,
    TimeUnit.ITERATION: Event.ITERATION_END,
}


def due(interval: TimeLike, previous: Timestamp, now: Timestamp, event: Event) -> bool:
    """Whether an interval comes round at this event, between the last such event's timestamp and this one's.

    It is asked where its unit is counted: at EPOCH_END for epochs, at ITERATION_END for iterations, at BATCH_END for
    everything else. A fraction of the duration is that many of the units of ``now.max_duration``: where that is in
    epochs, of their batches, so that ``"0.25dur"`` of ``"1ep"`` with ``now.batches_per_epoch=8`` comes round at the
    BATCH_END of batches 2, 4, 6 and 8; where ``batches_per_epoch`` is None it comes round at EPOCH_END at the earliest.
    Interval 0 never comes.

    Raises:
        ArgumentError: for a fraction of the duration where ``now.max_duration`` is None.

    >>> before = Timestamp(batch=9, max_duration=Time("100ba"))
    >>> due("0.1dur", before, before.replace(batch=10), Event.BATCH_END)
    True
    """
    interval = Time.parse(interval)
    if type(now) is not Timestamp and hasattr(now, "ask"):  # while a step is compiled, it depends on the answer alone
        return bool(now.ask(due, interval, previous, now, event))
    if interval.unit in _COUNTED:
        return event is _ASKED_AT[interval.unit] and bool(passed(interval, previous, now))
    unit, size = interval.unit, interval.exact
    if size == 0:
        return False
    if unit is TimeUnit.DURATION:
        if now.max_duration is None:
            raise ArgumentError(f'the interval "{interval}" needs a max_duration; write it as "10ba" or "1ep" instead')
        unit, size = now.max_duration.unit, size * now.max_duration.exact
        if size == 0:
            return False
        if unit is TimeUnit.EPOCH and now.batches_per_epoch:
            return _due_in_batches(size * now.batches_per_epoch, now.batches_per_epoch, previous, now, event)
    if event is not _ASKED_AT[unit]:
        return False
    # Exactly, because 0.1 * 3 / 0.1 is not 3 in floating point.
    return _exactly(previous.get(unit)) // size != _exactly(now.get(unit)) // size


def passed(interval: Time, previous: Timestamp, now: Timestamp) -> bool | None:
    """Whether a multiple of an interval lies between two timestamps; None where whole numbers don't say so.

    It is what an algorithm that is attached and not due costs, at every batch.
    """
    count = _COUNTED.get(interval.unit)
    if count is None or type(now) is not Timestamp:  # as while a step is compiled
        return None
    size = interval.value
    return size != 0 and count(previous) // size != count(now) // size


def _exactly(count: float) -> int | Fraction:
    from fractions import Fraction

    return count if isinstance(count, int) else Fraction(count)


def _due_in_batches(size: Fraction, length: int, previous: Timestamp, now: Timestamp, event: Event) -> bool:
    end = in_batches(now, length)
    if event is Event.BATCH_END:
        return in_batches(previous, length) // size != end // size
    if event is not Event.EPOCH_END:
        return False
    # What an epoch lacks of its length passes here, for what didn't come round at its last batch already.
    done = previous.epoch * length + min(previous.batch_in_epoch + now.batch - previous.batch, length)
    return (done - 1) // size == done // size != end // size


_count = copier(
    Timestamp,
    *("batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
    *("batch_in_iteration", "token_in_iteration", "total_seconds", "epoch_seconds", "batch_seconds"),
)
_NAMES = tuple(field.name for field in attrs.fields(Timestamp))
# Its counts, as they are called elsewhere. A __getattr__ would answer any name, and cost time where one is only tried.
_ELSEWHERE = {"batches": "batch", "step": "batch", "steps": "batch", "epochs": "epoch", "samples": "sample"}
_ELSEWHERE |= {"tokens": "token", "iterations": "iteration", "seconds": "total_seconds"}
for _name, _field in _ELSEWHERE.items():
    setattr(Timestamp, _name, Elsewhere(_name, f"it is timestamp.{_field}"))
_values = operator.attrgetter(*_NAMES)


def _refuse_arithmetic(*_: object) -> NoReturn:
    raise ArgumentTypeError(
        "a timestamp counts in several units, and is no number: write timestamp.epoch, timestamp.batch or another."
    )


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        setattr(Timestamp, f"__{_side}{_name}__", _refuse_arithmetic)


def _flatten(timestamp: Timestamp) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
    return _values(timestamp), None, _NAMES


def _unflatten(_: Any, children: Iterable[PyTree]) -> Timestamp:
    timestamp = object.__new__(Timestamp)
    for name, child in zip(_NAMES, children, strict=True):
        object.__setattr__(timestamp, name, child)
    return timestamp


_pytree.register(Timestamp, _flatten, _unflatten, attributes=True)
