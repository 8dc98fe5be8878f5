"""Records how many seconds of training are left, evaluations included."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import attrs

from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.callbacks._intervals import is_due, read_interval
from pure_loop.event import Event
from pure_loop.ranges import checked
from pure_loop.state import State
from pure_loop.time import Timestamp, TimeUnit

__all__ = ["TimeLeft"]


@attrs.define
class _Evaluations:
    """Those of one evaluator that this stream ran.

    Attributes:
        seconds: how long they took together.
        count: how many there were.
        last: which fraction of training was over at the last one.
        spacing: the fraction of training from one to the next.
    """

    last: float
    seconds: float = 0.0
    count: int = 0
    spacing: float = 0.0

    def add(self, seconds: float, fraction: float) -> None:
        self.seconds += seconds
        self.count += 1
        self.spacing, self.last = fraction - self.last, fraction

    def before(self, fraction: float) -> float:
        """The seconds of those up to a fraction of training."""
        return self._seconds_of(math.floor(fraction / self.spacing + 1e-6)) if self.spacing > 0 else 0.0

    def left(self) -> float:
        """The seconds of those after the last one; the last batch has one in any case."""
        return self._seconds_of(math.ceil((1.0 - self.last) / self.spacing - 1e-6)) if self.spacing > 0 else 0.0

    def _seconds_of(self, count: int) -> float:
        return count * self.seconds / self.count


@checked
class TimeLeft(Callback):
    """Records ``time/left``, the seconds until the end of training, at an interval.

    With the fraction ``t`` of training that is over, it is ``seconds of training (1 - t) / t``, and for each evaluator
    the evaluations that are left times their mean duration. The seconds are those of the State's timestamp, so a run
    that resumes has an estimate at its first record. Evaluations are measured as they come; before the first one they
    are not in the estimate, but for those of a resumed run, which count as training then.

    Nothing is recorded where no fraction is known: without ``max_duration``, and in the first epoch of a duration in
    epochs if the data doesn't tell its number of batches. That training may stop earlier isn't considered.

    Args:
        interval: how often: ``"10ba"``, ``"1ep"``, ``"10m"``, ``"0.1dur"``, a predicate of the State.
        clock: what evaluations are timed with; give it what ``fit`` is given, if it is given one.

    Raises:
        ArgumentTypeError, ArgumentError: an interval that can't be read.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger, ticks = InMemoryLogger(), iter(range(100))
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 4
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, max_duration="1ep",
    ...                       optimizer=pl.optim.sgd(lr=0.1), callbacks=[TimeLeft("1ba")], loggers=[logger],
    ...                       clock=lambda: next(ticks)))
    >>> logger.series("time/left")
    ([1, 2, 3, 4], [3.0, 2.0, 1.0, 0.0])
    """

    records = True

    def __init__(self, interval: CadenceLike = "10ba", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = read_interval(interval, "TimeLeft")
        self._clock = clock
        self._begin(0.0)

    def _begin(self, fraction: float) -> None:
        self._start = fraction
        self._batches_per_epoch: int | None = None
        self._evaluations: dict[str, _Evaluations] = {}
        self._evaluation_started = 0.0
        # Seconds of evaluations that the timestamp counts, and those that it will count at the next BATCH_END.
        self._counted = self._uncounted = 0.0

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        self._begin(self._fraction(state.timestamp) or 0.0)

    def eval_start(self, state: State, logger: LoggerGroup) -> None:
        self._evaluation_started = self._clock()

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        seconds = self._clock() - self._evaluation_started
        self._uncounted += seconds
        fraction = self._fraction(state.timestamp)
        if state.evaluator is not None and fraction is not None:
            self._evaluations.setdefault(state.evaluator, _Evaluations(self._start)).add(seconds, fraction)

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        self._counted += self._uncounted
        self._uncounted = 0.0
        self._record_if_due(state, Event.BATCH_END, logger)

    def epoch_end(self, state: State, logger: LoggerGroup) -> None:
        self._batches_per_epoch = state.previous_timestamp.batch_in_epoch + 1
        self._record_if_due(state, Event.EPOCH_END, logger)

    def _record_if_due(self, state: State, event: Event, logger: LoggerGroup) -> None:
        if is_due(self._interval, state, event):
            left = self._left(state.timestamp)
            if left is not None:
                logger.log_metrics({"time/left": left}, state)

    def _fraction(self, t: Timestamp) -> float | None:
        end = t.max_duration
        if end is not None and end.unit is TimeUnit.EPOCH and t.batch_in_epoch and not t.batches_per_epoch:
            length = self._batches_per_epoch
            return None if length is None else t.replace(batches_per_epoch=length).elapsed
        return t.elapsed

    def _left(self, t: Timestamp) -> float | None:
        fraction, end = self._fraction(t), t.max_duration
        if not fraction or end is None:
            return None
        if end.unit is TimeUnit.SECOND:
            return max(end.value - t.total_seconds, 0.0)
        seconds, left = t.total_seconds - self._counted, 0.0
        for evaluations in self._evaluations.values():
            seconds -= evaluations.before(self._start)
            left += evaluations.left()
        return left + max(seconds, 0.0) * (1.0 - fraction) / fraction
