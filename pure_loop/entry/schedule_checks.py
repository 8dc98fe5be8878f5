"""Times that a run never comes to, found before it runs.

A schedule or an interval in a unit that doesn't move, such as tokens or iterations; a warmup that is not over when the
run ends; a learning rate that is 0 at every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import attrs

from pure_loop._internal.arguments import is_integer
from pure_loop.algorithm import Algorithm
from pure_loop.cadence import Cadence
from pure_loop.data.samples import num_samples, num_tokens
from pure_loop.errors import ArgumentError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.optim import Optimizer
from pure_loop.optim.optimizer import RateFunction
from pure_loop.ranges import Scheduled
from pure_loop.recorder import numbers_of, strengths_of
from pure_loop.schedules import Schedule
from pure_loop.schedules._base import End, Exact, warmup_in
from pure_loop.task import Task
from pure_loop.time import Time, Timestamp, TimeUnit

# (what it is, a schedule, an interval or a callback)
Counted = Iterable[tuple[str, object]]


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
    optimizer: Optimizer,
    algorithms: Iterable[Algorithm],
    evaluators: Iterable[BoundEvaluator],
    callbacks: Iterable[object],
) -> Iterator[tuple[str, object]]:
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
        contents = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        # A record of the algorithm's may have times, too.
        records = (Time, Cadence, *{type(item) for item in contents if _is_of_an_algorithm(type(item))})
        yield from _times([item for item in contents if isinstance(item, records)])


def _is_of_an_algorithm(cls: type) -> bool:
    return attrs.has(cls) and cls.__module__.startswith("pure_loop.algorithms")


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


# The least and the most.
Bounds: TypeAlias = tuple[int, int]

# At how many batches of a run a rate is looked at before it counts as 0 everywhere; of how many samples are counted.
_MOST, _MOST_COUNTED = 100_000, 10_000


def refuse_endless_warmups(
    optimizer: Optimizer,
    algorithms: Iterable[Algorithm],
    timestamp: Timestamp,
    iteration_length: Time | None,
    loader: object,
    task: Task,
    *,
    batches_per_step: int = 1,
    ranks: int = 1,
) -> None:
    """Refuse what a run is too short for: a warmup that lasts as long, an algorithm that begins after the end, and a
    learning rate that is 0 at each batch.

    What is not known before the run passes: functions of the user's own, seconds in a run that is counted in batches,
    epochs of an unknown length, samples of a loader that doesn't say how many a batch has.

    Args:
        optimizer, algorithms: those of the call.
        timestamp: at which the run begins, with its duration and the length of its epochs.
        iteration_length: of the call.
        loader: of training.
        task: which counts the samples and tokens of a batch.
        batches_per_step: how many batches of the loader a step takes.
        ranks: how many processes count together.

    Raises:
        ArgumentError: names the schedule and the time.
    """
    duration = timestamp.max_duration
    if duration is None or timestamp >= duration:
        return  # which has ended already
    rates = dict(_rates(optimizer))
    algorithms = tuple(algorithms)
    scheduled = {**rates, **numbers_of(optimizer), **strengths_of(algorithms)}
    items = [*scheduled.items(), *_times_of(algorithms), ("", duration)]
    units = [unit for unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN) if counted_in(unit, items)]
    length, bounds = timestamp.batches_per_epoch, dict[TimeUnit, Bounds]()
    if units and length and ranks == batches_per_step == 1:
        bounds = _of_an_epoch(loader, length, task, units)
    end = _end(timestamp, duration, iteration_length, bounds)
    of_run = f"the end of the run, max_duration={str(duration)!r}{_length(timestamp)}"
    for name, schedule in scheduled.items():
        schedule = schedule.schedule if isinstance(schedule, Scheduled) else schedule
        time = warmup_in(schedule, end)
        if time is not None:
            raise ArgumentError(
                f"{name} is {schedule!r}: it rises over {str(time)!r}, which is not over before {of_run}. Write a "
                'warmup that is a part of the run, such as warmup="0.1dur", or train longer; pl.rehearse tries a long '
                "run without training it."
            )
    for name, time in _times_of(algorithms):
        if end.comes_before(time, or_with=False):
            raise ArgumentError(
                f'{name}={str(time)!r} comes after {of_run}. Write a part of the run, such as start="0.5dur", or train '
                "longer."
            )
    if rates and all(_is_always_0(rate, timestamp, end) for rate in rates.values()):
        name, rate = next(iter(rates.items()))
        raise ArgumentError(
            f"{name} is {rate!r}: it is 0 at every batch up to {of_run}, so that nothing would be trained. Write times "
            'that are a part of the run, such as "0.1dur", or train longer.'
        )


def _rates(optimizer: Optimizer, label: str = "") -> Iterator[tuple[str, RateFunction]]:
    if not optimizer.parts:
        yield f"the learning rate of {optimizer.name}{f' ({label!r})' if label else ''}", optimizer.lr
    for name, part in optimizer.parts.items():
        yield from _rates(part, f"{label}/{name}".strip("/"))


def _times_of(algorithms: Iterable[Algorithm]) -> Iterator[tuple[str, Time]]:
    """When algorithms of the library begin."""
    for algorithm in algorithms:
        value = algorithm.settings.get("start") if algorithm.factory else None
        if isinstance(value, Time | str) and (time := Time.parse(value)):
            yield f"algorithm {algorithm.name!r}: start", time


def _length(timestamp: Timestamp) -> str:
    length = timestamp.batches_per_epoch
    return "" if length is None else f", of epochs of {length} batch{'' if length == 1 else 'es'}"


def _of_an_epoch(loader: object, batches: int, task: Task, units: Iterable[TimeUnit]) -> dict[TimeUnit, Bounds]:
    """The least and the most samples and tokens in so many batches of a loader, as far as they are known."""
    bounds: dict[TimeUnit, Bounds] = {}
    size = getattr(loader, "batch_size", None)
    for unit in units:
        count: Callable[[object], int] = task.samples if unit is TimeUnit.SAMPLE else task.tokens
        if count not in (num_samples, num_tokens):
            continue  # a function of the user's own is called once for each batch, in training
        if (type(loader) is list or type(loader) is tuple) and len(loader) <= _MOST_COUNTED:
            total = sum(count(batch) for batch in loader[:batches])
            if total:  # or else a unit that never moves, which is another error
                bounds[unit] = total, total
        elif unit is TimeUnit.SAMPLE and is_integer(size):
            bounds[unit] = (batches - 1) * size + 1, batches * size  # the last one may be smaller
    return bounds


def _end(timestamp: Timestamp, duration: Time, iteration: Time | None, of_an_epoch: dict[TimeUnit, Bounds]) -> End:
    """How much is finished at the end of a run at most."""
    value, unit, length = duration.value, duration.unit, timestamp.batches_per_epoch
    counts: dict[TimeUnit, Exact] = {unit: value}
    if unit is TimeUnit.ITERATION and iteration is not None:
        value, unit = value * iteration.value, iteration.unit
        counts[unit] = value
    epochs: Exact | None = None
    if unit is TimeUnit.EPOCH:
        epochs = value
    elif unit is TimeUnit.BATCH and length:
        epochs = value / length
    elif unit in of_an_epoch and of_an_epoch[unit][0]:
        epochs = math.ceil(value / of_an_epoch[unit][0])
    elif unit is TimeUnit.SAMPLE:
        counts[TimeUnit.BATCH] = value  # a batch has a sample at least
    if epochs is not None:
        if length:
            batches = value if unit is TimeUnit.BATCH else epochs * length
            counts |= {TimeUnit.BATCH: batches, TimeUnit.EPOCH: batches}  # epochs are counted in their batches
        for counted, (_, most) in of_an_epoch.items():
            counts.setdefault(counted, math.ceil(epochs) * most)
    return End(timestamp, counts)


def _is_always_0(rate: RateFunction, timestamp: Timestamp, end: End) -> bool:
    """Whether a schedule of the library is 0 at each batch of a run, and not always."""
    batches = end.counts.get(TimeUnit.BATCH)
    units = {TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION}
    duration: Any = timestamp.max_duration
    if (
        not isinstance(rate, Schedule)
        or not _is_of_the_library(rate)
        or rate.fixed_value is not None
        or batches is None
        or duration.unit not in units
        or any(counted_in(unit, [("", rate)]) for unit in TimeUnit if unit not in units)
    ):
        return False
    first, length = timestamp.batch, timestamp.batches_per_epoch or 0
    count = math.ceil(batches) - first

    def value(batch: int) -> float:
        epoch = batch // length if length else timestamp.epoch
        inside = batch - epoch * length if length else batch
        return float(rate(timestamp.replace(epoch=epoch, batch=batch, batch_in_epoch=inside)))

    ends = (first + count - 1, first + count // 2)
    places = range(first, first + count, max(1, count // _MOST))
    if any(value(batch) for batch in (*ends, *places)):
        return False
    return any(value(first + count * factor) for factor in (1, 2, 4, 8, 16, 64, 256, 1024))


def _is_of_the_library(schedule: object) -> bool:
    """Whether no function of the user's own is in it."""
    if isinstance(schedule, tuple):
        return all(map(_is_of_the_library, schedule))
    if not isinstance(schedule, Schedule):
        return not callable(schedule)
    record: Any = type(schedule)
    return type(schedule).__module__.startswith("pure_loop.") and all(
        _is_of_the_library(getattr(schedule, field.name)) for field in attrs.fields(record)
    )
