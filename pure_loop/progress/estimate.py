"""What is known of a run: the facts of its call, numbers of a device, the mean loss of an epoch, and the time left.

Numbers are read without waiting for the device. The time left is that of training at its pace so far, and of the
evaluations to come at theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from inspect import GEN_CREATED, getgeneratorstate
from types import GeneratorType
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop._internal.frames import generator_arguments
from pure_loop._internal.recordable import is_scalar
from pure_loop.cadence import Cadence
from pure_loop.evaluator import BoundEvaluator
from pure_loop.frozendict import FrozenDict
from pure_loop.loop.call import Fit
from pure_loop.loop.stream import Stream
from pure_loop.optim import Optimizer
from pure_loop.progress.words import is_number
from pure_loop.state import MetricValue, State
from pure_loop.time import Time, Timestamp, TimeUnit


@attrs.frozen
class EvaluatorFacts:
    """One evaluator.

    Attributes:
        batches: how many an evaluation has; None: not known.
        interval: how often it runs; None: a predicate decides.
    """

    batches: int | None = None
    interval: Time | None = None


@attrs.frozen
class Facts:
    """What is known of a run; nothing of a stream that is no stream of ``fit``, ``evaluate`` or ``predict``.

    Attributes:
        optimizer: that of training.
        evaluators: by label, in their order.
        batches: those of a prediction.
        skips: whether batches that are not finite are left out of training.
        resumed_from: the checkpoint from which it resumes.
    """

    optimizer: Optimizer | None = None
    evaluators: Mapping[str, EvaluatorFacts] = attrs.field(factory=FrozenDict)
    batches: int | None = None
    skips: bool = False
    resumed_from: str | None = None

    @classmethod
    def of(cls, stream: Iterable[object]) -> Facts:
        """Read the arguments of a stream that has not begun; of one that has, nothing is read."""
        pairs: Any = iter(stream) if isinstance(stream, Stream) else None
        while isinstance(pairs, GeneratorType) and getgeneratorstate(pairs) == GEN_CREATED:
            arguments = generator_arguments(pairs)
            fit, evaluators, source = (arguments.get(name) for name in ("fit", "evaluators", "source"))
            if isinstance(fit, Fit):
                return cls(
                    fit.stages.optimizer,
                    _by_label(fit.evaluators),
                    skips=fit.stages.nonfinite == "skip",
                    resumed_from=fit.resumed_from,
                )
            if evaluators is not None:
                return cls(evaluators=_by_label(evaluators))
            if source is not None:
                return cls(batches=source.length)
            pairs = arguments.get("script") or arguments.get("pairs")
        return cls()

    @property
    def evaluation_batches(self) -> int | None:
        """Those of one evaluation by every evaluator."""
        counts = [facts.batches for facts in self.evaluators.values()]
        numbers = [count for count in counts if count is not None]
        return sum(numbers) if numbers and len(numbers) == len(counts) else None


def _by_label(evaluators: Iterable[BoundEvaluator]) -> Mapping[str, EvaluatorFacts]:
    return {
        evaluator.label: EvaluatorFacts(
            evaluator.source.length,
            evaluator.interval.interval if isinstance(evaluator.interval, Cadence) else None,
        )
        for evaluator in evaluators
    }


def rates(optimizer: Optimizer | None, state: State, name: str = "lr") -> dict[str, MetricValue]:
    """The learning rates of the last batch by name, that of a part as ``lr:<label>``; nothing is read from a device."""
    if optimizer is None:
        return {}
    if optimizer.parts:
        values: dict[str, MetricValue] = {}
        for label, part in optimizer.parts.items():
            values |= rates(part, state, f"{name}:{label}")
        return values
    rate = optimizer.lr(state.previous_timestamp)
    if is_scalar(rate) and rate != rate:  # an optimizer without a learning rate has NaN
        return {}
    return {name: rate if state.lr_scale is None else rate * state.lr_scale}


def on_cpu(value: object) -> bool:
    """Whether a value can be read at once."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


class Reading:
    """Some values, on their way from the device.

    What is on the CPU is read at once. The rest is copied behind what the device was given so far
    (to pinned memory, where torch has it for the device), and an event on the device says when that is done.
    """

    __slots__ = ("_copies", "_marks", "_read")

    def __init__(self, values: Mapping[str, MetricValue]) -> None:
        away = {name: value for name, value in values.items() if isinstance(value, Tensor) and not on_cpu(value)}
        self._read = {name: None if name in away else float(value) for name, value in values.items()}
        self._copies = {name: value.detach().to("cpu", non_blocking=True) for name, value in away.items()}
        self._marks = []
        for device in {value.device for value in away.values()}:
            mark = torch.Event(device)
            mark.record(torch.accelerator.current_stream(device))
            self._marks.append(mark)

    @property
    def ready(self) -> bool:
        """Whether the values are here; asks, and doesn't wait."""
        return all(mark.query() for mark in self._marks)

    def values(self) -> dict[str, float]:
        """The values; waits for the device unless they are ``ready``."""
        for mark in self._marks:
            mark.synchronize()
        read = self._read | {name: float(copy) for name, copy in self._copies.items()}
        return {name: value for name, value in read.items() if value is not None}


# One sum of so many losses costs as much as two operations on the device.
_TOGETHER = 64


class MeanLoss:
    """The mean of losses, each weighed by the samples of its batch.

    Losses are collected, and summed up on their device a number at a time.

    Args:
        skips: leave out losses that are not finite, as training does.

    >>> mean = MeanLoss()
    >>> mean.add(torch.tensor(1.0), 4)
    >>> mean.add(torch.tensor(4.0), 2)
    >>> mean.take(), mean.take()
    (tensor(2., dtype=torch.float64), None)
    """

    __slots__ = ("_left_out", "_losses", "_samples", "_skips", "_sum", "_weight")

    def __init__(self, *, skips: bool = False) -> None:
        self._skips = skips
        self._losses: list[MetricValue] = []
        self._samples = 0
        self._sum: MetricValue = 0.0
        self._weight = 0
        # The samples of losses that are left out; on the device.
        self._left_out: MetricValue = 0

    @property
    def count(self) -> int:
        """The samples since the last mean."""
        return self._weight + self._samples * len(self._losses)

    def add(self, loss: object, samples: int, members: int = 0) -> None:
        """Count the loss of a batch of so many samples; nothing, if it is no number, nor one of each of the members."""
        if (type(loss) is not Tensor or loss.ndim) and not is_number(loss, members):
            return
        if samples != self._samples or len(self._losses) >= _TOGETHER:
            self._fold()
            self._samples = samples
        self._losses.append(loss)

    def take(self) -> MetricValue | None:
        """The mean of those that were added, on their device; None if there are none. It begins anew."""
        self._fold()
        mean = self._sum / (self._weight - self._left_out) if self._weight else None
        self._sum, self._weight, self._left_out = 0.0, 0, 0
        return mean

    def _fold(self) -> None:
        losses = [
            torch.as_tensor(loss).reshape(()) if type(loss) is not Tensor or loss.numel() == 1 else loss
            for loss in self._losses
        ]
        self._losses.clear()
        if losses:
            with torch.no_grad():
                values = torch.stack(losses)
                if self._skips:
                    finite = torch.isfinite(values)
                    self._left_out = self._left_out + self._samples * (~finite).sum(0)
                    values = torch.where(finite, values, 0.0)
                self._sum = self._sum + self._samples * _summed(values)
            self._weight += self._samples * len(losses)


def _summed(values: Tensor) -> Tensor:
    # Not every device has float64.
    return values.sum(0, dtype=torch.float64 if values.device.type == "cpu" else torch.float32)


@attrs.frozen
class Inside:
    """An evaluation under way.

    Attributes:
        label: its evaluator.
        batch: how many batches are evaluated.
        batches: how many there are; None: not known.
        left: seconds until its end; None: not known.
    """

    label: str
    batch: int
    batches: int | None = None
    left: float | None = None

    @property
    def fraction(self) -> float | None:
        """How much of it is done, in [0, 1]."""
        return min(self.batch / self.batches, 1.0) if self.batches else None


@attrs.define
class _Evaluations:
    """Those of one evaluator.

    Attributes:
        last: the fraction of training at the last one; at first that at which the stream began.
        batches: of one; None: not known.
        seconds, count: of all of them together, and how many there were.
        spacing: the fraction of training from one to the next, as far as it is seen.
    """

    last: float
    batches: int | None = None
    seconds: float = 0.0
    count: int = 0
    spacing: float | None = None

    def to_come(self, spacing: float | None) -> int:
        """How many are left, the one under way among them; the last batch has one in any case."""
        if not spacing or self.last >= 1.0:
            return 0
        return max(math.ceil(1.0 / spacing - 1e-6) - math.floor(self.last / spacing + 1e-6), 0)


class Estimate:
    """Follows a stream by a clock.

    Args:
        facts: what is known of the run.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._evaluations: dict[str, _Evaluations] = {}
        self._start = 0.0
        self._evaluated = 0.0
        # Seconds of training, and the fraction, at the first batch of this stream.
        self._first: tuple[float, float] | None = None
        self._label: str | None = None
        self._since = 0.0
        self._batch = 0

    def begin(self, fraction: float | None) -> None:
        """The stream begins with this fraction of training done."""
        self._start = fraction or 0.0

    @property
    def begun(self) -> bool:
        """Whether the first batch is done."""
        return self._first is not None

    def trained(self, time: float) -> float:
        """The time now, on a clock that stands still in evaluations."""
        return time - self._evaluated - (0.0 if self._label is None else time - self._since)

    def batch_done(self, time: float, fraction: float | None) -> None:
        """The first batch of training is done: those after it tell the pace."""
        if self._first is None and fraction is not None:
            self._first = (self.trained(time), fraction)

    def evaluation_begins(self, label: str | None, time: float) -> None:
        self._label, self._since, self._batch = label or "", time, 0

    def evaluation_batch_done(self) -> None:
        self._batch += 1

    def evaluation_ends(self, time: float, fraction: float | None) -> None:
        """It is over, at this fraction of training."""
        if self._label is None:
            return
        seconds, evaluations = time - self._since, self._of(self._label)
        self._evaluated += seconds
        evaluations.seconds += seconds
        evaluations.count += 1
        evaluations.batches = self._batch
        if fraction is not None:
            if fraction > evaluations.last:
                evaluations.spacing = fraction - evaluations.last
            evaluations.last = fraction
        self._label = None

    def inside(self, time: float) -> Inside | None:
        """The evaluation under way."""
        if self._label is None:
            return None
        batches = self._of(self._label).batches
        left = None
        if batches is not None and self._batch:
            left = max(batches - self._batch, 0) * (time - self._since) / self._batch
        return Inside(self._label, self._batch, batches, left)

    def left(self, time: float, t: Timestamp, fraction: float | None) -> float | None:
        """Seconds until the end; None before the second batch, and where no end is known."""
        end = t.max_duration
        if fraction is None or end is None or self._first is None:
            return None
        if end.unit is TimeUnit.SECOND:  # evaluations included
            return max(end.value - t.total_seconds, 0.0) if fraction < 1 else None
        done = fraction - self._first[1]
        if done <= 0:
            return None
        left = (self.trained(time) - self._first[0]) * (1.0 - fraction) / done
        left += sum(self._left_of(label, t, time) for label in {**self._facts.evaluators, **self._evaluations})
        return left if left > 0 or fraction < 1 else None

    def _of(self, label: str) -> _Evaluations:
        if label not in self._evaluations:
            batches = self._facts.evaluators.get(label, EvaluatorFacts()).batches
            self._evaluations[label] = _Evaluations(self._start, batches)
        return self._evaluations[label]

    def _left_of(self, label: str, t: Timestamp, time: float) -> float:
        """The seconds of the evaluations to come; 0 until one of them shows how long it takes."""
        evaluations = self._of(label)
        inside = self.inside(time) if label == self._label else None
        mean = evaluations.seconds / evaluations.count if evaluations.count else None
        rest = 0.0
        if inside is not None:
            spent = time - self._since
            if inside.left is not None:
                rest = inside.left
                mean = spent + rest if mean is None else mean
            elif mean is not None:
                rest = max(mean - spent, 0.0)
        if mean is None:
            return rest
        count = evaluations.to_come(self._spacing(label, t) or evaluations.spacing)
        return max(count - (inside is not None), 0) * mean + rest

    def _spacing(self, label: str, t: Timestamp) -> float | None:
        """From one evaluation to the next as a fraction of training, by the evaluator's interval."""
        interval, end = self._facts.evaluators.get(label, EvaluatorFacts()).interval, t.max_duration
        if not interval or end is None or not end:
            return None
        if interval.unit is TimeUnit.DURATION:
            return float(interval.value)
        mine, total = (_in_batches(time, t.batches_per_epoch) for time in (interval, end))
        return mine.value / total.value if mine.unit is total.unit else None


def _in_batches(time: Time, batches_per_epoch: int | None) -> Time:
    if time.unit is TimeUnit.EPOCH and batches_per_epoch:
        return Time(int(time.value) * batches_per_epoch, TimeUnit.BATCH)
    return time
