"""Records the learning rate, as ``fit`` with loggers does by itself; in a script of your own it needs the optimizer."""

from __future__ import annotations

from typing import Annotated

from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.loop.recorder import learning_rates
from pure_loop.optim import Optimizer
from pure_loop.ranges import Name, checked
from pure_loop.state import State

__all__ = ["LRMonitor"]


@checked
class LRMonitor(Callback):
    """Records at BATCH_START the learning rate with which that batch will be learned.

    Args:
        optimizer: whose rate; of a partition, that of each part as ``<name>/<label>``. None: that of the call of
            ``fit``; a script of your own has none, and needs it here.
        name: under which it is recorded.

    Raises:
        ArgumentTypeError: ``optimizer`` is none of ``pl.optim``.
        ArgumentError: ``pl.drive`` was called with one that has no optimizer.

    >>> import pure_loop as pl
    >>> monitor = LRMonitor(pl.optim.sgd(lr=0.1), name="generator/learning_rate")
    """

    def __init__(
        self, optimizer: Optimizer | None = None, name: Annotated[str, Name()] = "train/learning_rate"
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"LRMonitor({optimizer!r}): give the optimizer of the run, the value that fit(optimizer=...) is given."
            )
        self._optimizer = optimizer
        self._of_run: Optimizer | None = None
        self._name = name

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: a script of the user's own, and no optimizer.
        """
        if run.function == "drive" and self._optimizer is None:
            raise ArgumentError(
                "LRMonitor() in pl.drive: a script of your own has no optimizer that could be seen; write "
                "LRMonitor(optimizer)."
            )
        self._of_run = run.optimizer

    def batch_start(self, state: State, logger: LoggerGroup) -> None:
        optimizer = self._of_run if self._optimizer is None else self._optimizer
        if optimizer is not None:
            logger.log_metrics(learning_rates(optimizer, state, state.timestamp, self._name), state)
