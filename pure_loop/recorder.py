"""The recorder: what ``fit`` records by itself where loggers are given.

Callbacks say what is recorded and loggers say where, so this is a callback like any other; it
comes before the loggers, which therefore find its values at the event at which they print.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pure_loop.callback import Callback, LoggerGroup
from pure_loop.optim import Optimizer
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["Recorder", "is_scalar", "learning_rates", "losses", "recordable"]


class Recorder(Callback):
    """Records the settings, the training loss, the learning rate and the results of evaluations.

    ``train/loss`` (and ``train/loss/<part>`` for the other parts of a dict) and ``train/learning_rate`` at
    BATCH_END, for the batch that has just ended; ``<label>/<metric>`` at EVAL_END (``eval/train/<metric>`` for the
    label ``train``). A metric that is a mapping, a list or a vector has several names, ``<label>/<metric>/<key>``; a
    matrix, a long vector or what is no number is a table. Only tables are read from the device.

    ``fit`` with loggers has one already; give one yourself to :func:`pure_loop.drive`, where a script of your own
    should be recorded the same way.

    Args:
        optimizer: the optimizer of the run; None records no learning rate.
        hyperparameters: further settings to record, by name.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger, optimizer = InMemoryLogger(), pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "4ba"))
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=optimizer,
    ...                       max_duration="1ep", loggers=[logger]))
    >>> logger.series("train/learning_rate")
    ([1, 2, 3], [1.0, 0.75, 0.5])
    """

    def __init__(self, optimizer: Optimizer | None = None, hyperparameters: Mapping[str, Any] | None = None) -> None:
        self._optimizer = optimizer
        self._hyperparameters = dict(hyperparameters or {})

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        settings: dict[str, Any] = {
            "model": type(state.model._skeleton).__name__,
            "parameters": sum(tensor.numel() for tensor in state.params.values()),
            "seed": state.seed,
        }
        if self._optimizer is not None:
            settings["optimizer"] = repr(self._optimizer)
        if state.timestamp.max_duration is not None:
            settings["max_duration"] = str(state.timestamp.max_duration)
        logger.log_hyperparameters(settings | self._hyperparameters)

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        values = losses(state.loss)
        if self._optimizer is not None:
            # Its batch was the one that started at the timestamp before.
            values |= learning_rates(self._optimizer, state.previous_timestamp, "train/learning_rate")
        logger.log_metrics(values, state)

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        label = state.evaluator
        if label is not None:
            measured = state.metrics.get(label, {})
            place = "eval/train" if label == "train" else label  # "train/loss" is that of training
            values, tables = recordable(place, measured)
            logger.log_metrics(values, state)
            for name, (columns, rows) in tables.items():
                logger.log_table(name, columns, rows, state)


def losses(loss: Any) -> dict[str, Any]:
    """A loss, and the parts of it, by the names under which they are recorded."""
    if isinstance(loss, Mapping):
        return {"train/loss" if part == "total" else f"train/loss/{part}": value for part, value in loss.items()}
    return {} if loss is None else {"train/loss": loss}


def is_scalar(value: Any) -> bool:
    """Whether a logger can plot it: a real number, or a tensor that holds one."""
    return value.numel() == 1 and not value.is_complex() if isinstance(value, Tensor) else isinstance(value, Real)


# Elements of a vector of which each has a name of its own.
MOST_NAMES = 100

Table: TypeAlias = tuple[list[str], list[list[Any]]]
"""Columns and rows."""


def recordable(name: str, value: Any) -> tuple[dict[str, Any], dict[str, Table]]:
    """What loggers are given for a value of any kind: numbers by name, and tables by name.

    Args:
        name: that of the value, and the beginning of those of its parts.
        value: a number, a tensor or array, or a mapping, list or tuple of such; anything else is a table of one cell.

    >>> recordable("f1", {"a": 1.0, "b": torch.tensor([0.5, 0.25])})
    ({'f1/a': 1.0, 'f1/b/0': tensor(0.5000), 'f1/b/1': tensor(0.2500)}, {})
    >>> recordable("confusion", torch.tensor([[3, 1], [0, 4]]))
    ({}, {'confusion': (['0', '1'], [[3, 1], [0, 4]])})
    """
    if is_scalar(value):
        return {name: value}, {}
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        array = value.__array__()
        value = torch.as_tensor(array) if array.dtype.kind in "biufc" else array.tolist()
        return recordable(name, value) if isinstance(value, Tensor | list) else ({}, {name: (["value"], [[value]])})
    if isinstance(value, Tensor):
        if value.is_complex():
            return recordable(name, {"real": value.real, "imag": value.imag})
        if value.ndim != 1 or value.numel() > MOST_NAMES or not value.numel():
            return {}, {name: _table(value.detach())}
        value = value.detach().unbind()
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        return {}, {name: (["value"], [[value]])}
    numbers: dict[str, Any] = {}
    tables: dict[str, Table] = {}
    for key, part in parts:
        more, others = recordable(f"{name}/{key}", part)
        numbers |= more
        tables |= others
    return numbers, tables


def _table(values: Tensor) -> Table:
    """A row for each index along all axes but the last, and a column for each along the last one."""
    if values.ndim == 1:
        return ["index", "value"], [[index, value] for index, value in enumerate(values.tolist())]
    columns = [str(column) for column in range(values.shape[-1])]
    if values.ndim == 2:
        return columns, values.tolist()
    indices = itertools.product(*map(range, values.shape[:-1]))
    rows = values.flatten(0, -2).tolist()
    axes = [f"axis {axis}" for axis in range(values.ndim - 1)]
    return [*axes, *columns], [[*index, *row] for index, row in zip(indices, rows, strict=True)]


def learning_rates(optimizer: Optimizer, timestamp: Timestamp, name: str) -> dict[str, float]:
    """The learning rate by name; that of each part of a partition by ``<name>/<label>``."""
    if not optimizer.parts:
        return {name: optimizer.lr(timestamp)}
    return {
        found: value
        for label, part in optimizer.parts.items()
        for found, value in learning_rates(part, timestamp, f"{name}/{label}").items()
    }
