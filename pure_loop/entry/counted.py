"""What counts in a unit that may never move: schedules and intervals in tokens, or in iterations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import attrs

from pure_loop.algorithm import Algorithm
from pure_loop.cadence import Cadence
from pure_loop.errors import ArgumentError
from pure_loop.optim import Optimizer
from pure_loop.time import Time, TimeUnit

__all__ = ["counted_in", "of_fit", "refuse_no_iterations"]

# (what it is, a schedule, an interval or a callback)
Counted = Iterable[tuple[str, Any]]


def counted_in(unit: TimeUnit, argument: Counted) -> str | None:
    """The first that counts in this unit: what it is, and the time; None: none does.

    >>> from pure_loop.schedules import linear, warmup
    >>> counted_in(TimeUnit.TOKEN, [("lr", warmup("10tok", linear(1.0, 0.0, "100ba")))])
    "lr ('10tok')"
    """
    for what, value in argument:
        for time in _times(value):
            if time.unit is unit and time:
                return f"{what} ({str(time)!r})"
    return None


def of_fit(
    optimizer: Optimizer, algorithms: Iterable[Algorithm], evaluators: Iterable[Any], callbacks: Iterable[Any]
) -> Iterator[tuple[str, Any]]:
    """What a call of ``fit`` is given that counts, as far as it can be seen: functions of the user's own can't."""
    parts = optimizer.parts or {"": optimizer}
    for label, part in parts.items():
        yield f"the learning rate of {part.name}{f' ({label!r})' if label else ''}", part.lr
    for evaluator in evaluators:
        yield f"the interval of evaluator {evaluator.label!r}", evaluator.interval
    for algorithm in algorithms:
        functions = [function for listed in algorithm.handlers.values() for function in listed]
        yield f"algorithm {algorithm.name!r}", [algorithm.when, *functions]
    for callback in callbacks:
        attributes = getattr(callback, "__dict__", {}).values()
        yield type(callback).__name__, [value for value in attributes if isinstance(value, Cadence)]


def _times(value: Any) -> Iterator[Time]:
    """The times in a schedule or an interval."""
    if isinstance(value, Time):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _times(part)
    elif isinstance(value, partial):
        yield from _times((value.func, *value.args, *value.keywords.values()))
    elif attrs.has(type(value)) and type(value).__module__.startswith("pure_loop."):
        for field in attrs.fields(type(value)):
            yield from _times(getattr(value, field.name))
    elif callable(value) and (getattr(value, "__module__", None) or "").startswith("pure_loop.algorithms"):
        held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        yield from _times([item for item in held if isinstance(item, Time | Cadence)])


def refuse_no_iterations(value: Counted) -> None:
    """
    Raises:
        ArgumentError: something counts iterations, and there are none.
    """
    result = counted_in(TimeUnit.ITERATION, value)
    if result is not None:
        raise ArgumentError(
            f"{result} counts iterations, and iteration_length is not given, so it would never move: "
            'fit(..., iteration_length="2ep"), or write it in another unit, such as "100ba".'
        )
