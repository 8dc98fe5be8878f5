"""How fast training goes, from the wall-clock times that the timestamps count."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from pure_loop.callback import Callback, LoggerGroup
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.state import State

__all__ = ["SpeedMonitor"]


class SpeedMonitor(Callback):
    """Records at BATCH_END ``speed/samples_per_second``, ``speed/batches_per_second`` and, where batches hold
    tokens, ``speed/tokens_per_second``: means over the last batches.

    Time spent in evaluations is left out. The window is the callback's own: going on from a kept State starts
    a new one. On a device that computes behind the loop's back, a mean over a few batches is the speed at which they
    were handed over; over a window of many it is the speed of training.

    Args:
        window: over how many batches.
        clock: what evaluations are timed with; give it what ``fit`` is given, if it is given one.

    Raises:
        ArgumentTypeError, ArgumentError: ``window`` is no whole number of at least 1.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger, ticks = InMemoryLogger(), iter(range(100))
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, max_duration="1ep",
    ...                       optimizer=pl.optim.sgd(lr=0.1), callbacks=[SpeedMonitor()], loggers=[logger],
    ...                       clock=lambda: next(ticks)))
    >>> logger.series("speed/samples_per_second")
    ([1, 2, 3], [4.0, 4.0, 4.0])
    """

    def __init__(self, window: int = 100, clock: Callable[[], float] = time.monotonic) -> None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise ArgumentTypeError(f"SpeedMonitor(window={window!r}): give a number of batches.")
        if window < 1:
            raise ArgumentError(f"SpeedMonitor(window={window!r}): give a number of batches, 1 or more.")
        self._clock = clock
        self._batches: deque[tuple[int, int, float]] = deque(maxlen=window)
        self._evaluation_started = 0.0
        self._evaluated = 0.0

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        self._batches.clear()
        self._evaluated = 0.0

    def eval_start(self, state: State, logger: LoggerGroup) -> None:
        self._evaluation_started = self._clock()

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        # The loop counts these seconds into the next batch's, from where they are taken out again.
        self._evaluated += self._clock() - self._evaluation_started

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        before, now = state.previous_timestamp, state.timestamp
        seconds = max(now.batch_seconds - self._evaluated, 0.0)
        self._evaluated = 0.0
        self._batches.append((now.sample - before.sample, now.token - before.token, seconds))
        samples, tokens, spent = map(sum, zip(*self._batches, strict=True))
        if spent > 0:
            speeds = {"samples": samples / spent, "batches": len(self._batches) / spent}
            if tokens:
                speeds["tokens"] = tokens / spent
            logger.log_metrics({f"speed/{what}_per_second": value for what, value in speeds.items()}, state)
