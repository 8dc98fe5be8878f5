"""The strategy of plans. Drawn values fit together, so that no example is discarded."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import attrs
from hypothesis import strategies as st

from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, Order, Plan, expected
from pure_loop.ranges import AtLeast, checked
from pure_loop.time import Time, TimeUnit

T = TypeVar("T")


def check_range(where: str, low: str, least: float | None, high: str, most: float | None) -> None:
    """Refuse a range without a number in it; None is no bound."""
    if least is not None and most is not None and least > most:
        raise ArgumentError(f"{where}: {low}={least!r} is more than {high}={most!r}; nothing lies between them.")


def check_choices(where: str, name: str, value: object, choices: Collection[T]) -> tuple[T, ...]:
    """What was chosen, as it stands in ``choices``, in the order given; what comes twice is drawn twice as often."""
    listed = ", ".join(map(_shown, choices))
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{where}: {name}={value!r}: give a list of some of {listed}.")
    members = {item: item for item in choices}
    chosen = []
    for item in value:
        try:
            chosen.append(members[item])
        except (KeyError, TypeError):
            raise ArgumentError(f"{where}: {name} holds {item!r}, which is none of {listed}.") from None
    if not chosen:
        raise ArgumentError(f"{where}: {name}={value!r} leaves nothing to draw from; give some of {listed}.")
    return tuple(chosen)


def check_strategy(where: str, name: str, value: object, example: str) -> st.SearchStrategy[Any]:
    """``value``, if it is a strategy."""
    if isinstance(value, st.SearchStrategy):
        return value
    hint = " (a function that makes one: call it)" if callable(value) else ""
    raise ArgumentTypeError(
        f"{where}: {name} is a strategy, and {value!r} of type {type(value).__name__} is none{hint}; write {example}."
    )


def _shown(value: object) -> str:
    # An enum's text is what one writes; its repr isn't.
    return repr(str(value)) if isinstance(value, str) else repr(value)


def count(epoch: Sequence[int], tokens: int, batches: int) -> dict[TimeUnit, list[int]]:
    """What is finished after 0, 1, ... batches.

    >>> count((4, 2), tokens=3, batches=3)[TimeUnit.SAMPLE]
    [0, 4, 6, 10]
    """
    samples = list(itertools.accumulate(itertools.islice(itertools.cycle(epoch), batches), initial=0))
    return {
        TimeUnit.BATCH: list(range(batches + 1)),
        TimeUnit.EPOCH: [number // len(epoch) for number in range(batches + 1)],
        TimeUnit.SAMPLE: samples,
        TimeUnit.TOKEN: [tokens * number for number in samples],
    }


def count_iterations(length: Time, counts: Mapping[TimeUnit, Sequence[int]]) -> list[int]:
    """How many iterations of this length are finished after 0, 1, ... batches.

    >>> count_iterations(Time("5tok"), count((4, 2), tokens=1, batches=4))
    [0, 0, 1, 1, 2]
    """
    began = done = 0
    numbers = []
    for number in counts[length.unit]:
        if number - began >= length.value:
            began, done = number, done + 1
        numbers.append(done)
    return numbers


def ends_between(counts: Sequence[int], batches: tuple[int, int]) -> tuple[int, int] | None:
    """The least and the greatest duration that ends after so many batches, at least and at most; None: there is none.

    >>> samples = count((4, 2), tokens=0, batches=5)[TimeUnit.SAMPLE]
    >>> ends_between(samples, (2, 3))
    (5, 10)
    """
    least, most = batches
    low = counts[least - 1] + 1 if least else 0
    return (low, counts[most]) if low <= counts[most] else None


def shortened(epoch: tuple[int, ...], batches: tuple[int, int]) -> tuple[int, ...]:
    """The batches of an epoch, fewer where no number of whole epochs has so many, at least and at most.

    >>> shortened((4, 2, 3), (4, 5))
    (4, 2)
    """
    least, most = batches
    length = len(epoch)
    while math.ceil(least / length) * length > most:
        length -= 1
    return epoch[:length]


BATCH, EPOCH, SAMPLE, TOKEN = TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.SAMPLE, TimeUnit.TOKEN
SECOND, ITERATION, DURATION = TimeUnit.SECOND, TimeUnit.ITERATION, TimeUnit.DURATION

UNITS = (BATCH, EPOCH, SAMPLE, TOKEN, SECOND, ITERATION, DURATION)
"""All units of time, the simplest first."""

ORDERS: tuple[Order, ...] = ("current", "2021")

_DURATIONS = UNITS[:-1]
_INTERVALS = (EPOCH, BATCH, SAMPLE, TOKEN, SECOND, DURATION)
_FRACTIONS = (1, 0.5, 0.25, 0.1, 0.3, 0.7)


@checked
def plans(
    *,
    units: Sequence[TimeUnit | str] | None = None,
    interval_units: Sequence[TimeUnit | str] = _INTERVALS,
    orders: Sequence[Order] = ("current",),
    min_batches: Annotated[int, AtLeast(0)] = 1,
    max_batches: Annotated[int, AtLeast(0)] = 9,
    max_batches_per_epoch: Annotated[int, AtLeast(1)] = 4,
    max_samples: Annotated[int, AtLeast(1)] = 6,
    min_evaluators: Annotated[int, AtLeast(0)] = 0,
    max_evaluators: Annotated[int, AtLeast(0)] = 2,
    iterations: bool = True,
    stops: bool = False,
) -> st.SearchStrategy[Plan]:
    """Plans of short runs of all kinds.

    Durations in every unit; batches of unequal sizes; whole batches and microbatches; loaders with and without a
    length; epochs that ``batches_per_epoch`` cuts, or that have fewer batches; iterations; evaluators with intervals in
    every unit. They shrink to ``Plan(batches=(1,), max_duration="1ba")``; with ``min_batches=0`` to a duration of
    ``"0ba"``.

    Args:
        units: of ``max_duration``; None: all that are possible with the other options.
        interval_units: of the evaluators' intervals: all but iterations.
        orders: of the events; ``["current", "current", "2021"]`` draws ``"current"`` twice as often as ``"2021"``.
        min_batches, max_batches: how many batches the whole run trains on; 0 for runs without a batch.
        max_batches_per_epoch: how many batches the loader has, at most; never more than ``max_batches``.
        max_samples: how many samples a batch has, at most; microbatches too.
        min_evaluators, max_evaluators: how many evaluators.
        iterations: whether some plans have an ``iteration_length``, in epochs or in tokens.
        stops: whether an algorithm stops some of the runs (``stop_at``), before ``max_duration`` or at it.

    Raises:
        ArgumentError: a number out of range, an unknown unit or order, or options that no plan can meet.
        ArgumentTypeError: an option of another type.

    >>> from hypothesis import find
    >>> find(plans(), lambda plan: True) == Plan(batches=(1,), max_duration="1ba")
    True
    >>> find(plans(units=["ep"], min_batches=3), lambda plan: True).max_duration
    Time('3ep')
    """
    where = "plans"
    check_range(where, "min_batches", min_batches, "max_batches", max_batches)
    check_range(where, "min_evaluators", min_evaluators, "max_evaluators", max_evaluators)
    intervals = check_choices(where, "interval_units", interval_units, _INTERVALS)
    chosen = check_choices(where, "orders", orders, ORDERS)
    # fit refuses an interval that is a fraction of a duration in iterations.
    only_fractions = max_evaluators > 0 and set(intervals) == {DURATION}
    if units is None:
        durations = tuple(unit for unit in _DURATIONS if unit is not ITERATION or (iterations and not only_fractions))
    else:
        durations = check_choices(where, "units", units, _DURATIONS)
        if ITERATION in durations:
            _check_iterations(durations, chosen, iterations, only_fractions)
    return _plans(
        units=durations,
        interval_units=intervals,
        orders=chosen,
        batches=(min_batches, max_batches),
        per_epoch=min(max_batches_per_epoch, max(max_batches, 1)),
        samples=max_samples,
        evaluators=(min_evaluators, max_evaluators),
        iterations=iterations,
        stops=stops,
    )


def _check_iterations(
    durations: Sequence[TimeUnit], orders: Sequence[Order], iterations: bool, only_fractions: bool
) -> None:
    if not iterations:
        raise ArgumentError("plans: units holds 'iter', and iterations=False; leave one of the two out.")
    if only_fractions:
        raise ArgumentError(
            "plans: interval_units=['dur'], and units holds 'iter', of which fit takes no fractions; leave 'iter' out, "
            "or write more interval_units."
        )
    if set(durations) == {ITERATION} and "2021" in orders:
        raise ArgumentError(
            "plans: units=['iter'], and orders holds '2021', which has no iterations; write orders=['current'], or "
            "another unit."
        )


# Strategies are kept: making one takes ten times as long as drawing from it.
_whole = functools.cache(st.integers)
_one_of = functools.cache(st.sampled_from)
_SELDOM = st.sampled_from((False, False, True))


@functools.cache
def _none_or(least: int, most: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(least, most)


@functools.cache
def _sizes(samples: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, samples), min_size=1, max_size=most).map(tuple)


@functools.cache
def _lengths(samples: int) -> st.SearchStrategy[Time | None]:
    """Of iterations."""
    return st.one_of(
        st.none(),
        st.builds(Time, st.integers(1, 2), st.just(EPOCH)),
        st.builds(Time, st.integers(1, 4 * samples), st.just(TOKEN)),
    )


@functools.cache
def _stop(samples: int, tokens: bool, seconds: bool) -> st.SearchStrategy[Time | None]:
    """Where an algorithm stops training; ``tokens`` and ``seconds`` say whether any go by."""
    numbers = {EPOCH: 2, BATCH: 4, SAMPLE: 4 * samples, **({TOKEN: 4 * samples} if tokens else {})}
    counts = [st.builds(Time, st.integers(1, most), st.just(unit)) for unit, most in numbers.items()]
    return st.one_of(st.none(), *counts, *([st.builds(Time, st.sampled_from((1, 0.5, 3)), st.just(SECOND))] * seconds))


@functools.cache
def _intervals(units: tuple[TimeUnit, ...], samples: int) -> st.SearchStrategy[Time]:
    numbers: dict[TimeUnit, st.SearchStrategy[object]] = {
        EPOCH: st.sampled_from((1, 2, 0)),
        BATCH: st.integers(1, 4),
        SAMPLE: st.integers(1, 2 * samples),
        TOKEN: st.integers(1, 4 * samples),
        SECOND: st.sampled_from((1, 0.5, 1.5, 2, 3)),
        DURATION: st.sampled_from(_FRACTIONS),
    }
    return st.one_of([st.builds(Time, numbers[unit], st.just(unit)) for unit in units])


@functools.cache
def _evaluators(
    numbers: tuple[int, int], units: tuple[TimeUnit, ...], samples: int
) -> st.SearchStrategy[dict[str, EvaluatorPlan]]:
    # Not in the order of the alphabet, which a loop could take for that of the mapping.
    labels = ["val", "test", "train", *(f"val{number}" for number in range(2, numbers[1]))]
    evaluator = st.builds(
        EvaluatorPlan,
        batches=_sizes(samples, 2),
        interval=st.none() | _intervals(units, samples),
        microbatch_size=_none_or(1, samples),
    )
    evaluators = st.lists(evaluator, min_size=numbers[0], max_size=numbers[1])
    return evaluators.map(lambda drawn: dict(zip(labels, drawn, strict=False)))


@st.composite
def _plans(
    draw: st.DrawFn,
    *,
    units: tuple[TimeUnit, ...],
    interval_units: tuple[TimeUnit, ...],
    orders: tuple[Order, ...],
    batches: tuple[int, int],
    per_epoch: int,
    samples: int,
    evaluators: tuple[int, int],
    iterations: bool,
    stops: bool,
) -> Plan:
    # Units are drawn before the numbers, which are then such that something passes in each of them. The other way
    # round, the choice of units would depend on numbers, and a failure could not shrink the one without the other.
    order = draw(_one_of(orders))
    iterating = order != "2021"
    unit = draw(_one_of(tuple(item for item in units if item is not ITERATION or iterating)))
    length = draw(_lengths(samples)) if iterations and iterating and unit is not ITERATION else None
    length_unit = draw(_one_of((EPOCH, TOKEN))) if unit is ITERATION else None if length is None else length.unit
    counted = tuple(
        interval_unit for interval_unit in interval_units if interval_unit is not DURATION or unit is not ITERATION
    )
    drawn: dict[str, EvaluatorPlan] = {}
    eval_interval = Time(1, EPOCH)
    if evaluators[1]:
        drawn = draw(_evaluators(evaluators, counted, samples))
        # Drawn whether it is asked for or not: else an interval of an evaluator's own would be simpler than none.
        common = draw(_intervals(counted, samples))
        if any(evaluator.interval is None for evaluator in drawn.values()):
            eval_interval = common
    own = (evaluator.interval for evaluator in drawn.values())
    used = {unit, length_unit, eval_interval.unit, *(item.unit for item in own if item is not None)}
    tokens = draw(_whole(int(TOKEN in used), 3))
    seconds = draw(_one_of((1.0, 0.5, 2.0) if SECOND in used else (0.0, 1.0, 0.5, 2.0)))

    sizes = draw(_sizes(samples, per_epoch))
    # More than there are, too: a loader without a length is then shorter than it is known to be.
    cut = draw(_none_or(1, len(sizes) + 2))
    sized = not draw(_SELDOM)
    if unit in (EPOCH, ITERATION):
        if not sized:
            sizes = sizes[:cut]  # so that all epochs are alike: each would start where the one before was cut
        if len(fewer := shortened(sizes[:cut], batches)) < len(sizes[:cut]):
            sizes = fewer
    if sized and cut is not None:
        cut = min(cut, len(sizes))
    counts = count(sizes[:cut] if sized else sizes, tokens, batches[1])
    if unit is ITERATION:
        numbers = range(1, 3 if length_unit is EPOCH else 4 * samples + 1)
        lengths = (Time(number, length_unit) for number in numbers)
        fitting = [item for item in lengths if ends_between(count_iterations(item, counts), batches)]
        length = fitting[draw(_whole(0, len(fitting) - 1))]
        counts[ITERATION] = count_iterations(length, counts)
    return Plan(
        batches=sizes,
        max_duration=_duration(draw, unit, counts, batches, seconds),
        microbatch_size=draw(_none_or(1, samples)),
        evaluators=drawn,
        eval_interval=eval_interval,
        tokens_per_sample=tokens,
        seconds_per_batch=seconds,
        batches_per_epoch=cut,
        sized=sized,
        iteration_length=length,
        order=order,
        stop_at=draw(_stop(samples, bool(tokens), bool(seconds))) if stops else None,
    )


def _duration(
    draw: st.DrawFn,
    unit: TimeUnit,
    counts: Mapping[TimeUnit, Sequence[int]],
    batches: tuple[int, int],
    seconds: float,
) -> Time:
    if unit is SECOND:
        number = draw(_whole(*batches))
        # In the middle of a batch as well, since a duration overshoots to whole ones.
        return Time((number - 0.5 if number and draw(_SELDOM) else number) * seconds, unit)
    range_ = ends_between(counts[unit], batches)
    assert range_ is not None
    return Time(draw(_whole(*range_)), unit)


@st.composite
def plans_with(draw: st.DrawFn, events: frozenset[Event]) -> Plan:
    """Plans of runs with at least one of these events; each is one that some run of ``fit`` has."""
    plan = draw(plans())
    if not events.isdisjoint(expected(plan)):
        return plan
    # What the run lacks is added to it, so that no plan is drawn in vain.
    if any(event.is_eval for event in events):
        return attrs.evolve(plan, evaluators={"val": EvaluatorPlan((1,), "1ba")})
    if not events.isdisjoint({Event.EPOCH_END, Event.EPOCH_CHECKPOINT}):
        return attrs.evolve(plan, max_duration="1ep")
    return attrs.evolve(plan, iteration_length="1tok", tokens_per_sample=plan.tokens_per_sample or 1)
