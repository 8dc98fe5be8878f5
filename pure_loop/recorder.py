"""The recorder: what ``fit`` and ``drive`` record by themselves where loggers are given.

Callbacks say what is recorded and loggers say where, so this is a callback like any other; it
comes before the loggers, which therefore find its values at the event at which they print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pure_loop._internal.recordable import losses, recordable
from pure_loop.algorithm import Algorithm
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.optim import Optimizer
from pure_loop.ranges.strengths import Scheduled
from pure_loop.stages.settings import found_size
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["LEARNING_RATE", "Recorder", "learning_rates", "numbers_of", "strengths_of"]

LEARNING_RATE = "train/learning_rate"


class Recorder(Callback):
    """Records the settings, the training loss, the learning rate and the results of evaluations.

    ``train/loss`` (and ``train/loss/<part>`` for the other parts of a dict) and ``train/learning_rate`` at
    BATCH_END, for the batch that has just ended; ``<label>/<metric>`` at EVAL_END (``eval/train/<metric>`` for the
    label ``train``). A metric that is a mapping, a list or a vector has several names, ``<label>/<metric>/<key>``; a
    matrix, a long vector or what is no number is a table. Only tables are read from the device.

    With ``microbatch_size="auto"`` the size that was found is recorded as ``train/microbatch_size``, at the BATCH_END
    of the batch at which it was.

    Settings that are schedules are recorded at BATCH_END, too: those of an algorithm as ``<algorithm>/<setting>``,
    those of the optimizer as ``train/<option>``.

    ``fit``, ``evaluate`` and :func:`pure_loop.entry.drive` with loggers have one. That of a script has no optimizer.

    Args:
        optimizer: the optimizer of the run; None records no learning rate.
        hyperparameters: further settings to record, by name.
        algorithms: those of the run; settings of theirs that are schedules are recorded.
        train_metrics: whether ``state.metrics["train"]`` is that of ``fit(train_metrics=)``, and recorded at BATCH_END
            as ``train/<metric>``; ``train/epoch/<metric>`` where that is the name of another value.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger, optimizer = InMemoryLogger(), pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "4ba"))
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=optimizer,
    ...                       max_duration="1ep", loggers=[logger]))
    >>> logger.series("train/learning_rate")
    ([1, 2, 3], [1.0, 0.75, 0.5])
    """

    records = True

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        algorithms: Sequence[Algorithm] = (),
        *,
        train_metrics: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._train_metrics = train_metrics
        self._hyperparameters = dict(hyperparameters or {})
        self._strengths = strengths_of(algorithms) | ({} if optimizer is None else numbers_of(optimizer))
        self._batch_size_recorded = False
        self._microbatch_size: int | None = None

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        settings: dict[str, Any] = {
            "model": type(state.model.skeleton).__name__,
            "parameters": sum(tensor.numel() for tensor in state.params.values()),
            "seed": state.seed,
        }
        if self.optimizer is not None:
            settings["optimizer"] = repr(self.optimizer)
        if state.timestamp.max_duration is not None:
            settings["max_duration"] = str(state.timestamp.max_duration)
        logger.log_hyperparameters(settings | self._hyperparameters)
        self._batch_size_recorded = "batch_size" in self._hyperparameters

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        samples = state.timestamp.sample - state.previous_timestamp.sample
        if samples and not self._batch_size_recorded:  # a script may count none
            self._batch_size_recorded = True
            logger.log_hyperparameters({"batch_size": samples})
        values = losses(state.loss)
        size = found_size(state)
        if size != self._microbatch_size:
            values["train/microbatch_size"] = self._microbatch_size = size
        if self.optimizer is not None:
            # Its batch was the one that started at the timestamp before.
            values |= learning_rates(self.optimizer, state, state.previous_timestamp, LEARNING_RATE)
        values |= {name: strength(state.previous_timestamp) for name, strength in self._strengths.items()}
        tables: dict[str, Any] = {}
        for name, value in state.metrics.get("train", {}).items() if self._train_metrics else ():
            place = f"train/epoch/{name}" if f"train/{name}" in values else f"train/{name}"
            numbers, more = recordable(place, value)
            values |= numbers
            tables |= more
        if values:  # a script may have no loss
            logger.log_metrics(values, state)
        _log_tables(tables, state, logger)

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        label = state.evaluator
        if label is not None:
            measured: Mapping[str, Any] = state.metrics.get(label, {})
            place = "eval/train" if label == "train" else label  # "train/loss" is that of training
            values, tables = recordable(place, measured)
            logger.log_metrics(values, state)
            _log_tables(tables, state, logger)


def _log_tables(tables: Mapping[str, Any], state: State, logger: LoggerGroup) -> None:
    for name, (columns, rows) in tables.items():
        logger.log_table(name, columns, rows, state)


def strengths_of(algorithms: Iterable[Algorithm]) -> dict[str, Scheduled]:
    """The settings of algorithms that are schedules."""
    return {
        f"{algorithm.name}/{name}": value
        for algorithm in algorithms
        for name, value in algorithm.settings.items()
        if isinstance(value, Scheduled)
    }


def numbers_of(optimizer: Optimizer, label: str = "") -> dict[str, Scheduled]:
    """The options of an optimizer and its parts that are schedules; those of a part end with its label."""
    numbers: dict[str, Scheduled] = {}
    for name, option in optimizer.options.items():
        pairs = enumerate(option) if isinstance(option, tuple) else [("", option)]
        for place, value in pairs:
            if isinstance(value, Scheduled):
                numbers["/".join(filter(None, ("train", name, str(place), label)))] = value
    for part, inner in optimizer.parts.items():
        numbers |= numbers_of(inner, f"{label}/{part}".strip("/"))
    return numbers


def learning_rates(optimizer: Optimizer, state: State, timestamp: Timestamp, name: str) -> dict[str, float]:
    """The learning rate by name; that of each part of a partition by ``<name>/<label>``.

    Args:
        optimizer: that of the run.
        state: the one with the ``lr_scale`` by which they are multiplied.
        timestamp: at which the batch started.
        name: under which they are recorded.
    """
    if not optimizer.parts:
        rate = optimizer.lr(timestamp)
        return {name: rate if state.lr_scale is None else rate * float(state.lr_scale)}
    return {
        result: value
        for label, part in optimizer.parts.items()
        for result, value in learning_rates(part, state, timestamp, f"{name}/{label}").items()
    }
