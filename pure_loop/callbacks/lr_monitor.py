"""The learning rate, for scripts of your own; ``fit`` with loggers records it by itself."""

from __future__ import annotations

from pure_loop._values import read_name
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.errors import ArgumentTypeError
from pure_loop.optim import Optimizer
from pure_loop.recorder import learning_rates
from pure_loop.state import State

__all__ = ["LRMonitor"]


class LRMonitor(Callback):
    """Records at BATCH_START the learning rate with which that batch will be learned.

    Args:
        optimizer: whose rate; of a partition, that of each part as ``<name>/<label>``.
        name: under which it is recorded.

    Raises:
        ArgumentTypeError: ``optimizer`` is none of ``pl.optim``.

    >>> import pure_loop as pl
    >>> monitor = LRMonitor(pl.optim.sgd(lr=0.1), name="generator/learning_rate")
    """

    def __init__(self, optimizer: Optimizer, name: str = "train/learning_rate") -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"LRMonitor({optimizer!r}): give the optimizer of the run, the value that fit(optimizer=...) is given."
            )
        self._optimizer = optimizer
        self._name = read_name("name", name)

    def batch_start(self, state: State, logger: LoggerGroup) -> None:
        logger.log_metrics(learning_rates(self._optimizer, state.timestamp, self._name), state)
