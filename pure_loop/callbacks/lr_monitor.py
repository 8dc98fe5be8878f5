"""Records the learning rate under a name of your own; in a script of your own it needs the optimizer."""

from __future__ import annotations

from typing import Annotated

from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.optim import Optimizer
from pure_loop.ranges import Name, checked
from pure_loop.recorder import LEARNING_RATE, Recorder, learning_rates
from pure_loop.state import State

__all__ = ["LRMonitor"]


@checked
class LRMonitor(Callback):
    """Records at BATCH_END the learning rate with which that batch was learned.

    ``fit`` with loggers records that of its optimizer as ``train/learning_rate`` by itself: this callback then adds
    nothing under that name.

    Args:
        optimizer: the one with the rate; of a partition, that of each part as ``<name>/<label>``. None: that of the
            call of ``fit``; a script of your own has none, and needs it here.
        name: under which it is recorded.

    Raises:
        ArgumentTypeError: ``optimizer`` is none of ``pl.optim``.
        ArgumentError: ``pl.drive`` was called with one that has no optimizer; ``fit`` with one of another optimizer
            than its own, under the name that ``fit`` records.

    >>> import pure_loop as pl
    >>> monitor = LRMonitor(pl.optim.sgd(lr=0.1), name="generator/learning_rate")
    """

    records = True
    each_member = True

    def __init__(self, optimizer: Optimizer | None = None, name: Annotated[str, Name()] = LEARNING_RATE) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"LRMonitor({optimizer!r}): give the optimizer of the run, the value that fit(optimizer=...) is given."
            )
        self._optimizer = optimizer
        self._of_run: Optimizer | None = None
        self._name = name
        # Of the batch in progress.
        self._rates: dict[str, float] = {}

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: a script of the user's own, and no optimizer; or the name is that of another rate.
        """
        if run.function == "drive" and self._optimizer is None:
            raise ArgumentError(
                "LRMonitor() in pl.drive: a script of your own has no optimizer that could be seen; write "
                "LRMonitor(optimizer)."
            )
        self._rates = {}
        self._of_run = run.optimizer if self._optimizer is None else self._optimizer
        recorders = [callback for callback in run.callbacks if isinstance(callback, Recorder)]
        if self._name != LEARNING_RATE or all(recorder.optimizer is None for recorder in recorders):
            return
        if any(recorder.optimizer is self._of_run for recorder in recorders):
            self._of_run = None  # which is recorded under this name
        elif self._of_run is not None:
            raise ArgumentError(
                f"LRMonitor({self._of_run!r}): fit records {LEARNING_RATE!r} of its own optimizer. Give that of this "
                'one another name: LRMonitor(optimizer, name="other/learning_rate").'
            )

    def batch_start(self, state: State, logger: LoggerGroup) -> None:
        if self._of_run is not None:
            self._rates = learning_rates(self._of_run, state, state.timestamp, self._name)

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        rates, self._rates = self._rates, {}
        if rates:
            logger.log_metrics(rates, state)
