"""Values of any kind as numbers and tables, which loggers can hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from pure_loop._internal.tree_ops import is_sharded
from pure_loop.errors import ArgumentError, ArgumentTypeError


def is_scalar(value: object) -> TypeGuard[Tensor | float]:
    """Whether a logger can plot it: a real number, or a tensor that holds one."""
    return value.numel() == 1 and not value.is_complex() if isinstance(value, Tensor) else isinstance(value, Real)


def losses(loss: object) -> dict[str, Any]:
    """A loss, and the parts of it, by the names under which they are recorded."""
    if isinstance(loss, Mapping):
        return {"train/loss" if part == "total" else f"train/loss/{part}": value for part, value in loss.items()}
    return {} if loss is None else {"train/loss": loss}


def check_metrics(metrics: object, state: object) -> Mapping[str, object]:
    """What ``log_metrics`` is given.

    Raises:
        ArgumentTypeError: it is no mapping, or what comes after it is no State.
    """
    if not isinstance(metrics, Mapping) or not hasattr(state, "timestamp"):
        name = metrics if isinstance(metrics, str) else "loss"
        kinds = f"{type(metrics).__name__} and {type(state).__name__}"
        raise ArgumentTypeError(
            f"log_metrics takes a mapping of values by name, and the State, which has the step; it was given {kinds}: "
            f"write log_metrics({{{name!r}: value}}, state)."
        )
    return metrics


# Elements of a vector of which each has a name of its own.
MOST_NAMES = 100

Table: TypeAlias = tuple[list[str], list[list[object]]]
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

    Raises:
        ArgumentTypeError: a sharded tensor: the ranks have to compute its value together.
    """
    if is_sharded(value):
        raise ArgumentTypeError(
            f"{name!r} is a sharded tensor (DTensor), and loggers take values that one rank has: record "
            "value.full_tensor(), or pl.gradients.global_norm(...), in a callback with all_ranks = True, because all "
            "ranks compute it together."
        )
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
    parts: Iterable[tuple[object, object]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        return {}, {name: (["value"], [[value]])}
    numbers: dict[str, object] = {}
    tables: dict[str, Table] = {}
    for key, part in parts:
        part_numbers, part_tables = recordable(f"{name}/{key}", part)
        numbers |= part_numbers
        tables |= part_tables
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


def recordable_metrics(metrics: Mapping[str, object]) -> tuple[Mapping[str, object], dict[str, Table]]:
    """Numbers and tables by name, of several values; where all are numbers, the mapping itself and no tables.

    Raises:
        ArgumentError: two of them would have one name.
        ArgumentTypeError: a sharded tensor.
    """
    if all(is_scalar(value) and not is_sharded(value) for value in metrics.values()):
        return metrics, {}
    numbers: dict[str, object] = {}
    tables: dict[str, Table] = {}
    for name, value in metrics.items():
        value_numbers, value_tables = recordable(name, value)
        twice = next((key for key in (*value_numbers, *value_tables) if key in numbers or key in tables), None)
        if twice is not None:
            raise ArgumentError(
                f"{twice!r} would be the name of two values, one of them a part of {name!r}: give them names of which "
                "none is the beginning of another."
            )
        numbers |= value_numbers
        tables |= value_tables
    return numbers, tables
