"""The time left: training at its pace so far, and the evaluations to come at theirs."""

from __future__ import annotations

import math

import attrs

from pure_loop.progress.facts import EvaluatorFacts, Facts
from pure_loop.time import Time, Timestamp, TimeUnit

__all__ = ["Estimate", "Inside"]


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

    def trained(self, now: float) -> float:
        """The time now, on a clock that stands still in evaluations."""
        return now - self._evaluated - (0.0 if self._label is None else now - self._since)

    def batch_done(self, now: float, fraction: float | None) -> None:
        """The first batch of training is done: those after it tell the pace."""
        if self._first is None and fraction is not None:
            self._first = (self.trained(now), fraction)

    def evaluation_begins(self, label: str | None, now: float) -> None:
        self._label, self._since, self._batch = label or "", now, 0

    def evaluation_batch_done(self) -> None:
        self._batch += 1

    def evaluation_ends(self, now: float, fraction: float | None) -> None:
        """It is over, at this fraction of training."""
        if self._label is None:
            return
        seconds, evaluations = now - self._since, self._of(self._label)
        self._evaluated += seconds
        evaluations.seconds += seconds
        evaluations.count += 1
        evaluations.batches = self._batch
        if fraction is not None:
            if fraction > evaluations.last:
                evaluations.spacing = fraction - evaluations.last
            evaluations.last = fraction
        self._label = None

    def inside(self, now: float) -> Inside | None:
        """The evaluation under way."""
        if self._label is None:
            return None
        batches = self._of(self._label).batches
        left = None
        if batches is not None and self._batch:
            left = max(batches - self._batch, 0) * (now - self._since) / self._batch
        return Inside(self._label, self._batch, batches, left)

    def left(self, now: float, t: Timestamp, fraction: float | None) -> float | None:
        """Seconds until the end; None before the second batch, and where no end is known."""
        end = t.max_duration
        if fraction is None or end is None or self._first is None:
            return None
        if end.unit is TimeUnit.SECOND:  # evaluations included
            return max(end.value - t.total_seconds, 0.0) if fraction < 1 else None
        done = fraction - self._first[1]
        if done <= 0:
            return None
        left = (self.trained(now) - self._first[0]) * (1.0 - fraction) / done
        left += sum(self._left_of(label, t, now) for label in {**self._facts.evaluators, **self._evaluations})
        return left if left > 0 or fraction < 1 else None

    def _of(self, label: str) -> _Evaluations:
        if label not in self._evaluations:
            batches = self._facts.evaluators.get(label, EvaluatorFacts()).batches
            self._evaluations[label] = _Evaluations(self._start, batches)
        return self._evaluations[label]

    def _left_of(self, label: str, t: Timestamp, now: float) -> float:
        """The seconds of the evaluations to come; 0 until one of them shows how long it takes."""
        evaluations = self._of(label)
        inside = self.inside(now) if label == self._label else None
        mean = evaluations.seconds / evaluations.count if evaluations.count else None
        rest = 0.0
        if inside is not None:
            spent = now - self._since
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
        mine, whole = (_in_batches(time, t.batches_per_epoch) for time in (interval, end))
        return mine.value / whole.value if mine.unit is whole.unit else None


def _in_batches(time: Time, batches_per_epoch: int | None) -> Time:
    if time.unit is TimeUnit.EPOCH and batches_per_epoch:
        return Time(int(time.value) * batches_per_epoch, TimeUnit.BATCH)
    return time
