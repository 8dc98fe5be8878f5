"""The strategies of batches and of times: amounts of training, how far it can be, and the events on the way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import torch
from hypothesis import strategies as st
from torch import Tensor

from pure_loop._internal.arguments import check_number
from pure_loop._internal.pytree import Batch
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, Order, Plan, expected
from pure_loop.order import going_on as rest_of
from pure_loop.ranges import AtLeast, checked
from pure_loop.testing._plans import ORDERS, UNITS, check_choices, check_range, check_strategy
from pure_loop.testing._plans import plans as all_plans
from pure_loop.time import Time, Timestamp, TimeUnit

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16)
"""Of the tensors in batches, the commonest first."""

_ALL_DTYPES = (*DTYPES, torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8)

_LEAVES = ("tensor", "texts", "whole")
_CONTAINERS: dict[str, Callable[[Sequence[object]], Batch]] = {
    "tuple": tuple,
    "dict": lambda items: dict(zip(("inputs", "targets", "mask"), items, strict=False)),
    "list": list,
}
_WHOLE: tuple[Callable[[], object], ...] = (lambda: None, lambda: 0.5, lambda: "text", lambda: torch.tensor(1.0))


@checked
def batches(
    *,
    min_samples: Annotated[int, AtLeast(1)] = 1,
    max_samples: Annotated[int, AtLeast(1)] = 6,
    dtypes: Sequence[torch.dtype] = DTYPES,
    nested: bool = True,
) -> st.SearchStrategy[Batch]:
    """Batches of the shapes that a task counts and splits.

    Pairs of tensors, ``(inputs, targets)``; tensors alone; tuples, lists and dicts, nested too, of tensors and of what
    may stand beside them: a text for each sample, and numbers, strings, None and 0-d tensors, which belong to a batch
    as a whole. They shrink to ``(tensor([0.]), tensor([0.]))``.

    Args:
        min_samples, max_samples: how many samples a batch holds.
        dtypes: of the tensors.
        nested: whether there are others than pairs of tensors.

    Raises:
        ArgumentError: a number out of range, a range without a number in it, or no dtype.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> from pure_loop.data.samples import num_samples
    >>> find(batches(), lambda batch: num_samples(batch) == 2)
    (tensor([0., 0.]), tensor([0., 0.]))
    """
    check_range("batches", "min_samples", min_samples, "max_samples", max_samples)
    return _batches(min_samples, max_samples, check_choices("batches", "dtypes", dtypes, _ALL_DTYPES), nested)


@st.composite
def _batches(draw: st.DrawFn, least: int, most: int, dtypes: Sequence[torch.dtype], nested: bool) -> Batch:
    samples = draw(st.integers(least, most))

    def tensor() -> Tensor:
        shape = (samples, *draw(st.lists(st.integers(1, 3), max_size=2)))
        return _filled(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)))

    def container(kind: str, depth: int, first: Callable[[], object]) -> Batch:
        more = draw(st.sampled_from((1, 2, 0)))
        return _CONTAINERS[kind]([first(), *(node(depth) for _ in range(more))])

    def node(depth: int) -> object:
        kind = draw(st.sampled_from((*_LEAVES, *_CONTAINERS) if depth else _LEAVES))
        if kind == "tensor":
            return tensor()
        if kind == "texts":
            return [f"text {number}" for number in range(samples)]
        if kind == "whole":
            return draw(st.sampled_from(_WHOLE))()
        return container(kind, depth - 1, lambda: node(depth - 1))

    kind = draw(st.sampled_from(("pair", *_CONTAINERS, "tensor"))) if nested else "pair"
    # Drawn in any case: what takes fewer draws is simpler, and nothing is to be simpler than a pair.
    pair = tensor(), tensor()
    if kind == "pair":
        return pair
    # A tensor at the head, so that there are samples to count.
    return pair[0] if kind == "tensor" else container(kind, 2, lambda: pair[0])


def _filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Zeros for seed 0; else numbers of this seed, none of them negative where they may be indices."""
    if not seed:
        return torch.zeros(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(2 if dtype is torch.bool else 5, shape, generator=generator).to(dtype)


def times(
    *, units: Sequence[TimeUnit | str] = UNITS, min_value: float = 0, max_value: float | None = None
) -> st.SearchStrategy[Time]:
    """Times in every unit.

    They shrink to the least number of the first unit: ``Time("0ba")``.

    Args:
        units: in which units.
        min_value, max_value: how many, at least and at most; None: no bound, and the whole for fractions of the
            duration. Counts are the whole numbers between them.

    Raises:
        ArgumentError: a bound that is negative or not finite, no time between them, or a unit that is not known.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> find(times(), lambda time: True), find(times(units=["s"]), lambda time: time > "1s")
    (Time('0ba'), Time('2s'))
    """
    chosen = check_choices("times", "units", units, UNITS)
    low = _bound("min_value", min_value)
    high = None if max_value is None else _bound("max_value", max_value)
    check_range("times", "min_value", low, "max_value", high)
    return st.one_of([_times(unit, low, high) for unit in chosen])


def _bound(name: str, value: float) -> float:
    check_number(name, value, where="times", least=0)
    return value  # an int stays one: it may be more than a float holds


def _times(unit: TimeUnit, low: float, high: float | None) -> st.SearchStrategy[Time]:
    numbers: st.SearchStrategy[object]
    if unit is TimeUnit.DURATION and high is None:
        high = max(1.0, low)
    if unit in (TimeUnit.DURATION, TimeUnit.SECOND):
        numbers = st.floats(low, high, allow_nan=False, allow_infinity=False)
    else:
        least, most = math.ceil(low), None if high is None else math.floor(high)
        if most is not None and least > most:
            raise ArgumentError(
                f"times: no whole number lies between min_value={low!r} and max_value={high!r}, and {str(unit)!r} "
                "counts in whole numbers; leave the unit out, or write other bounds."
            )
        numbers = st.integers(least, most)
    return st.builds(Time, numbers, st.just(unit.value))


def timestamps(*, plans: st.SearchStrategy[Plan] | None = None) -> st.SearchStrategy[Timestamp]:
    """Timestamps that a run can have, so that their counts fit together.

    Some know ``max_duration`` and ``batches_per_epoch``, as inside ``fit``, and some don't. They shrink to
    ``Timestamp()``.

    Args:
        plans: of the runs; None: :func:`plans`.

    Raises:
        ArgumentTypeError: plans that are no strategy.

    >>> from hypothesis import find
    >>> now = find(timestamps(), lambda now: now.batch == 2)
    >>> now.sample, now.token, now.max_duration
    (2, 0, None)
    """
    if plans is None:
        plans = all_plans()
    return _timestamps(check_strategy("timestamps", "plans", plans, "timestamps(plans=plans(max_batches=100))"))


@st.composite
def _timestamps(draw: st.DrawFn, plans: st.SearchStrategy[Plan]) -> Timestamp:
    timestamp = draw(st.sampled_from(list(timestamps_of(draw(plans)))))
    return timestamp if draw(st.booleans()) else timestamp.replace(max_duration=None, batches_per_epoch=None)


def timestamps_of(plan: Plan) -> Iterator[Timestamp]:
    """The timestamps that a run of a plan has, from the first to the last."""
    lengths = [len(plan.batches)] if plan.sized else []
    lengths += [] if plan.batches_per_epoch is None else [plan.batches_per_epoch]
    timestamp = Timestamp(max_duration=plan.max_duration, batches_per_epoch=min(lengths, default=None))
    yield timestamp
    goes_on = not plan.sized and plan.batches_per_epoch is not None
    sizes = itertools.cycle(plan.batches)
    for event in expected(plan):
        if event is Event.EPOCH_START and not goes_on:
            sizes = itertools.cycle(plan.batches)
        elif event is Event.BATCH_END:
            samples = next(sizes)
            timestamp = timestamp.next_batch(samples, samples * plan.tokens_per_sample, plan.seconds_per_batch)
            yield timestamp
        elif event is Event.EPOCH_END:
            timestamp = timestamp.next_epoch()
            yield timestamp
        elif event is Event.ITERATION_END:
            timestamp = timestamp.next_iteration()
            yield timestamp


@checked
def event_streams(
    *, order: Order | None = None, plans: st.SearchStrategy[Plan] | None = None, going_on: bool = True
) -> st.SearchStrategy[list[Event]]:
    """The events of whole runs of ``fit``, in order.

    They shrink to the events of ``Plan(batches=(1,), max_duration="1ba")``.

    Args:
        order: ``"current"``, which is the default, or ``"2021"``.
        plans: of the runs, in place of an order; None: :func:`plans` of that order.
        going_on: some of the runs resume from a State kept at a boundary: their streams begin with FIT_START.

    Raises:
        ArgumentError: an order that is not known, or an order and plans.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> from pure_loop.order import check
    >>> stream = find(event_streams(), lambda stream: True)
    >>> check(stream, complete=True)
    >>> len(stream), stream[0], stream[-1]
    (21, Event.INIT, Event.FIT_END)
    """
    where = "event_streams"
    if plans is None:
        plans = all_plans(orders=check_choices(where, "order", ["current" if order is None else order], ORDERS))
    elif order is not None:
        raise ArgumentError(
            f"{where}: order={order!r} and plans, which have an order of their own; give one of the two."
        )
    return _event_streams(check_strategy(where, "plans", plans, f"{where}(plans=plans(max_batches=3))"), going_on)


@st.composite
def _event_streams(draw: st.DrawFn, plans: st.SearchStrategy[Plan], going_on: bool) -> list[Event]:
    events = expected(draw(plans))
    if not (going_on and draw(st.booleans())):
        return events
    return rest_of(events, draw(st.sampled_from([at for at, event in enumerate(events) if event in BOUNDARIES])))
