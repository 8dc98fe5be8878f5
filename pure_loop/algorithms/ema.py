"""Exponential moving average: evaluates with the average of the weights, trains with the weights.

With the weights ``w`` after an update interval and the average ``a``, which starts as the first weights::

    a' = d a + (1 - d) w

``d`` is ``smoothing``; or ``2^(-t / half_life)``, where t is how much training passed since the last update, so that
weights count half as much after a half life whatever the interval. With ``warmup``, ``d`` is at most
``(1 + n) / (10 + n)`` at update n, counted from 0.

https://doi.org/10.1137/0330046 (averaging in stochastic approximation), https://arxiv.org/abs/1703.01780 (in training).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import attrs
import torch
from torch import Tensor

from pure_loop._internal.pytree import PyTree
from pure_loop._internal.tree_ops import are_sharded, map_local
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._averages import (
    AveragedBuffers,
    averageable,
    averaged,
    begun,
    finite_or,
    resuming,
    updated_at,
    widened,
    with_average,
)
from pure_loop.algorithms._spans import as_span, part_of_span
from pure_loop.cadence import every
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.ranges import Between, Duration, checked
from pure_loop.state import State
from pure_loop.time import Time, TimeLike, Timestamp, TimeUnit, in_batches

__all__ = ["averaged", "ema", "moving_average"]

# All counts are kept, so that a half life may change its unit when training resumes.
_COUNTED = (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN, TimeUnit.ITERATION)
_SLOW = (TimeUnit.EPOCH, TimeUnit.ITERATION)
_TYPICAL_HALF_LIVES = (*(f"{count}{unit}" for count in (1, 2, 4, 8) for unit in ("ba", "sp", "tok")), "1ep", "2ep")


@torch.no_grad()
def moving_average(
    average: Mapping[str, Tensor], tensors: Mapping[str, Tensor], smoothing: float | Tensor
) -> FrozenDict[str, Tensor]:
    """``smoothing * average + (1 - smoothing) * tensors``, name by name.

    Args:
        average: names to floating point or complex tensors. Those in half precision or less are averaged in float32
            (complex64), in which the result is: in their own precision small changes would be rounded away.
        tensors: what joins the average; names that the average lacks are left out.
        smoothing: how much of the average stays; in a compiled step, which has another number each time, of shape ().

    >>> moving_average({"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])}, 0.75)["w"]
    tensor([0.2500])
    """
    # Frozen parameters, and those of a step that was left out, are the very tensors they were.
    names = [name for name, old in average.items() if old is not tensors[name]]
    if not names:
        return FrozenDict(average)

    def lerp(before: list[Tensor], latest: list[Tensor]) -> list[Tensor]:
        before, latest = list(map(widened, before)), list(map(widened, latest))
        if isinstance(smoothing, Tensor):
            return [old.lerp(new, (1.0 - smoothing).to(old)) for old, new in zip(before, latest, strict=True)]
        return list(torch._foreach_lerp(before, latest, 1.0 - smoothing))

    results = map_local(lerp, [average[name] for name in names], [tensors[name] for name in names])
    changed = dict(zip(names, results, strict=True))
    return FrozenDict((name, changed.get(name, old)) for name, old in average.items())


@checked
def ema(
    half_life: Annotated[
        str | Time | None,
        Duration(typical=_TYPICAL_HALF_LIVES, one_of="decay", example='ema(half_life="100ba")'),
    ] = None,
    smoothing: Annotated[
        float | None, Between(0, 1, typical=(0.0, 0.99), one_of="decay", example="ema(smoothing=0.99)")
    ] = None,
    interval: Annotated[str | Time | None, Duration()] = None,
    *,
    start: TimeLike | None = None,
    warmup: bool = False,
    offload: bool = False,
    buffers: str | Iterable[str] = (),
    name: str = "ema",
) -> Algorithm:
    """Exponential moving average: evaluation and prediction use the average, training the weights.

    The average starts as the weights at the start of training and is updated at BATCH_END or EPOCH_END. Parameters are
    averaged, complex ones too, and of the buffers running means and variances (a module's ``running_mean`` and
    ``running_var``, as BatchNorm has them) and those that ``buffers`` names; evaluation uses the latest values of all
    others. Where an average would not be finite it is the latest value. A buffer that appears later, or takes another
    shape or dtype, begins its average there. Nothing in training reads the average, so training is what it would be
    without. :func:`averaged` gives a State with the average in place of the weights, to export or resume from.
    ``evaluate`` and ``predict`` use the average that their State holds: give them ``algorithms=[ema(...)]`` too.

    Args:
        half_life: how much training it takes until weights count half: ``"100ba"``, ``"5000sp"``, ``"2ep"``,
            ``"0.1dur"``. Not wall-clock time.
        smoothing: instead of ``half_life``: how much of the average stays at an update, in [0, 1).
        interval: how often the average is updated. Default ``"1ba"``; ``"1ep"`` for a half life in epochs.
        start: when weights begin to be averaged: ``"0.1dur"``, ``"1000ba"``; until then the average is the weights
            themselves, which leaves the first, bad ones out. None: at once.
        warmup: at the n-th update no more than ``(1 + n) / (10 + n)`` of the average stays, so that it follows the
            weights at first, as TensorFlow does it; updates before ``start`` do not count.
        offload: keep the average in RAM, and not in the memory of the device. Each update copies all weights there and
            waits for them, so write an ``interval`` of many batches; not with ``parallel="shard"``.
        buffers: globs of names of further buffers that are averaged, ``"*.center"``; ``"*"``: all of floating point.
            When a run resumes with others than before, averages begin or end there.
        name: another one, if there are several; with several, evaluation uses the last one in the list.

    Raises:
        ArgumentError: both of half_life and smoothing or neither, a time of 0 or by the clock, a half life in epochs
            that is updated within them; by ``fit``: a glob that matches no floating point buffer; by evaluation: a
            State that has no average.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> average = ema(half_life="4ba")
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...     optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", evaluators=data, algorithms=[average]))
    >>> again = pl.run(pl.evaluate(state, data, loss=torch.nn.functional.mse_loss, algorithms=[average]))
    >>> bool(again.metrics["eval"]["loss"] == state.metrics["eval"]["loss"])
    True
    """
    life = None if half_life is None else Time.parse(half_life)
    decay = _Decay(smoothing, life, None if start is None else as_span(start, "start", "ema"), warmup)
    # Epochs and iterations are counted at their ends, so nothing passes between batches.
    slow = life is not None and life.unit in _SLOW
    period = Time.parse(interval or (f"1{life.unit.value}" if life is not None and slow else "1ba"))
    if life is not None:
        _refuse_inside(life, life.unit, period, period.unit)
    cadence = every(period)
    chosen = AveragedBuffers.read("ema", buffers)

    def buffers_of(state: State) -> FrozenDict[str, Tensor]:
        return _copies(chosen.of(state.buffers), offload)

    def begin(state: State) -> FrozenDict[str, PyTree]:
        _refuse_inside_duration(life, period, state.timestamp)
        params = _copies(state.params, offload)
        memory = FrozenDict(params=params, buffers=buffers_of(state), updated=_counts(state.timestamp))
        before = state.algorithm_state.get(name)
        # Where training goes on with warm-up that began without, its updates were not counted.
        counts = warmup and not (isinstance(before, Mapping) and "updates" not in before)
        return memory | {"updates": 0} if counts else memory

    def update(state: State) -> State:
        assert state.event is not None
        if not cadence.at(state, state.event):
            return state
        memory, timestamp = state.algorithm_state[name], state.timestamp
        part, updates = decay.at(memory, timestamp)
        params = moving_average(memory["params"], _copies(state.params, offload) if offload else state.params, part)
        # Buffers may come, go and change their shapes.
        latest = buffers_of(state)
        average = moving_average(begun(memory["buffers"], latest), latest, part)
        if chosen.globs:  # a running maximum begins at -inf
            average = finite_or(average, latest)
        after = FrozenDict(params=params, buffers=average, updated=_counts(timestamp))
        return state.remember(name, after | {"updates": updates} if warmup else after)

    def show(state: State) -> State:
        return with_average(state, name, chosen)

    shows = (Event.EVAL_START, Event.PREDICT_START)
    handlers = {Event.FIT_START: resuming(name, buffers_of), updated_at(period): update, shows: show}
    return Algorithm(name, handlers, init=begin)


def _copies(tensors: Mapping[str, Tensor], offload: bool) -> FrozenDict[str, Tensor]:
    """Those tensors that can be averaged, in RAM if they are offloaded.

    Raises:
        ArgumentError: shards are offloaded.
    """
    chosen = averageable(tensors)
    if not offload:
        return chosen
    if are_sharded(chosen):
        raise ArgumentError("ema: offload=True with parallel='shard': each rank has a shard of the average already.")
    # Tensors without numbers, of which only shapes are asked, can't be copied.
    return FrozenDict((key, tensor if tensor.is_meta else tensor.detach().to("cpu")) for key, tensor in chosen.items())


@attrs.frozen
class _Decay:
    """How much of an average stays at an update; the settings are those of :func:`ema`."""

    smoothing: float | None
    half_life: Time | None
    start: Time | None
    warmup: bool

    def at(self, memory: Mapping[str, PyTree], timestamp: Timestamp) -> tuple[float, int]:
        """The part that stays, and the number of updates that warm up, with this one."""
        updates: int = memory.get("updates", 0) if self.warmup else 0
        if self.start is not None and part_of_span(self.start, timestamp) < 1:
            return 0.0, updates
        part = self.smoothing if self.half_life is None else _decay(self.half_life, memory["updated"], timestamp)
        assert part is not None
        return (min(part, (updates + 1) / (10 + updates)), updates + 1) if self.warmup else (part, updates)


def _decay(half_life: Time, updated: Mapping[str, float], timestamp: Timestamp) -> float:
    """How much of the average stays, after what has passed since the last update."""
    length, unit = _in_counts(half_life, timestamp.max_duration)
    # Never negative, which other data with longer epochs could make it.
    return float(0.5 ** (max(0.0, _count(timestamp, unit) - updated[unit.value]) / length))


def _in_counts(time: Time, duration: Time | None) -> tuple[float, TimeUnit]:
    """An amount and its unit; a fraction of the duration in the unit of the duration."""
    if time.unit is not TimeUnit.DURATION:
        return time.value, time.unit
    if duration is None:
        raise ArgumentError(f'ema: {str(time)!r} needs a max_duration, and there is none; write "100ba" instead.')
    _counted(duration, f"{str(time)!r} of max_duration")
    return float(time.exact * duration.exact), duration.unit


def _refuse_inside(half_life: Time, unit: TimeUnit, interval: Time, interval_unit: TimeUnit) -> None:
    """Refuse a half life in epochs (or iterations) where updates come more often than these are counted."""
    if unit in _SLOW and interval_unit in (TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN):
        raise ArgumentError(
            f"ema: half_life={str(half_life)!r} counts {unit.name.lower()}s, which are counted at their ends, and "
            f"interval={str(interval)!r} updates inside them. Write half_life in batches or samples, or "
            f'interval="1{unit.value}".'
        )


def _refuse_inside_duration(half_life: Time | None, interval: Time, timestamp: Timestamp) -> None:
    """:func:`_refuse_inside`, of times that may be parts of the duration. Parts of epochs of known length count."""
    interval_unit = _in_counts(interval, timestamp.max_duration)[1]
    unit = None if half_life is None else _in_counts(half_life, timestamp.max_duration)[1]
    if half_life is not None and unit is not None and not (unit is TimeUnit.EPOCH and timestamp.batches_per_epoch):
        _refuse_inside(half_life, unit, interval, interval_unit)


def _counts(timestamp: Timestamp) -> FrozenDict[str, float]:
    return FrozenDict((unit.value, _count(timestamp, unit)) for unit in _COUNTED)


def _count(timestamp: Timestamp, unit: TimeUnit) -> float:
    """How much is finished; of epochs also a part, where their length is known."""
    length = timestamp.batches_per_epoch
    return in_batches(timestamp, length) / length if unit is TimeUnit.EPOCH and length else timestamp.get(unit)


def _counted(time: Time, name: str) -> Time:
    if time.unit is TimeUnit.SECOND:
        raise ArgumentError(
            f"ema: {name}={str(time)!r} is measured by the clock, so the average would differ in every run; count "
            'batches, samples, tokens or epochs: "100ba".'
        )
    return time
