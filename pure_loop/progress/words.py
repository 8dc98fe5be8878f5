"""Numbers, durations and cadences as people read them: what loggers, the progress bar and ``explain`` print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from torch import Tensor

from pure_loop._internal.recordable import is_scalar
from pure_loop.cadence import Cadence
from pure_loop.state import MetricValue
from pure_loop.time import Time, Timestamp, TimeUnit

# At the end of the name of the best of several members.
BEST = " best"
_UNITS = {
    TimeUnit.EPOCH: ("epoch", "epochs"),
    TimeUnit.BATCH: ("batch", "batches"),
    TimeUnit.SAMPLE: ("sample", "samples"),
    TimeUnit.TOKEN: ("token", "tokens"),
    TimeUnit.ITERATION: ("iteration", "iterations"),
    TimeUnit.SECOND: ("second", "seconds"),
}


def number(value: float) -> str:
    """Four significant digits, trailing zeros kept, so that a value that changes keeps its width.

    >>> number(0.5), number(12.3456), number(123456.0), number(float("nan"))
    ('0.5000', '12.35', '1.235e+05', 'nan')
    """
    return f"{value:#.4g}".removesuffix(".")


def rate(value: float) -> str:
    """A rate or a count in three digits.

    >>> rate(8.1234), rate(512.4), rate(12345.0), rate(2.5e6)
    ('8.12', '512', '12.3k', '2.50M')
    """
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_three_digits(value / size)}{suffix}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def clock(seconds: float) -> str:
    """Wall-clock time, as a clock shows it.

    >>> clock(82.4), clock(3723), clock(200_000)
    ('1:22', '1:02:03', '2d 7:33:20')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def cut(text: str, longest: int) -> str:
    """A text of at most so many letters: the beginning and the end of a longer one.

    >>> cut("accuracy", 8), cut("multiclass_f1_macro", 11), cut("multiclass_f1_macro", 1)
    ('accuracy', 'multi…macro', 'm')
    """
    if len(text) <= longest:
        return text
    if longest < 3:
        return text[: max(longest, 0)]
    tail = (longest - 1) // 2
    return f"{text[: longest - 1 - tail]}…{text[-tail:]}"


def duration(time: Time) -> str:
    """An amount of training.

    >>> duration(Time("3ep")), duration(Time("1ba")), duration(Time("90m")), duration(Time("0.1dur"))
    ('3 epochs', '1 batch', '1:30:00 of wall-clock time', '10% of the duration')
    """
    if time.unit is TimeUnit.DURATION:
        return f"{100 * time.value:g}% of the duration"
    if time.unit is TimeUnit.SECOND and time.value >= 60:
        return f"{clock(time.value)} of wall-clock time"
    singular, plural = _UNITS[time.unit]
    return f"{time.value:,} {singular if time.value == 1 else plural}"


def how_often(when: object) -> str:
    """A cadence: an interval in words, or the name of a predicate; nothing for None, which is always.

    >>> from pure_loop.cadence import every
    >>> how_often(every("1ep")), how_often(every("10ba")), how_often(every(0))
    ('every epoch', 'every 10 batches', 'never')
    """
    if when is None:
        return ""
    if not isinstance(when, Cadence):
        name = getattr(when, "__qualname__", type(when).__qualname__)
        code = getattr(when, "__code__", None)
        if name.endswith("<lambda>") and code is not None:
            return f"when the lambda in line {code.co_firstlineno} says so"
        return f"when {name.rpartition('<locals>.')[2]}(state)"
    interval = when.interval
    if not interval:
        return "never"
    if interval.value == 1 and interval.unit in _UNITS:
        return f"every {_UNITS[interval.unit][0]}"
    return f"every {duration(interval)}"


def epoch(t: Timestamp) -> int:
    """The epoch under way, from 1; right after its end, the one that has just ended."""
    return t.epoch + (t.batch_in_epoch > 0 or t.epoch == 0)


def is_number(value: object, members: int = 0) -> TypeGuard[Tensor | float]:
    """Whether a value is shown: a number, or one of each member of an ensemble."""
    return is_scalar(value) or (isinstance(value, Tensor) and members > 0 and value.shape == (members,))


def in_numbers(values: Mapping[str, object], members: int) -> dict[str, MetricValue]:
    """Those values that are shown: of members the median, and behind it, as ``<name> best``, the best if it is known.

    >>> import torch
    >>> in_numbers({"val/loss": torch.tensor([0.5, 0.25, 1.0])}, members=3)
    {'val/loss': tensor(0.5000), 'val/loss best': tensor(0.2500)}
    """
    numbers: dict[str, MetricValue] = {}
    for name, value in values.items():
        if is_scalar(value):
            numbers[name] = value
        elif is_number(value, members):
            assert isinstance(value, Tensor)
            from pure_loop._internal.members import best_of, median_of  # of an ensemble alone
            from pure_loop.algorithms._monitored import known_mode

            numbers[name] = median_of(value)
            mode = known_mode(name.partition("/")[2] or name)
            if mode is not None:
                numbers[f"{name}{BEST}"] = best_of(value, mode)
    return numbers
