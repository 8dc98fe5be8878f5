"""Everything that was recorded, kept in memory: for notebooks, plots and tests."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pure_loop.callback import Logger
from pure_loop.errors import ArgumentError
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["InMemoryLogger"]


class InMemoryLogger(Logger):
    """Keeps what is recorded as it comes; tensors stay on their device until somebody asks.

    Attributes:
        hyperparameters: the settings of the run, by name.
        metrics: for each name the list of ``(timestamp, value)``; values may be tensors on a device.
        tables: for each name the list of ``(timestamp, columns, rows)``.
        images: for each name the list of ``(timestamp, images)``.
        files: for each name the last path.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger = InMemoryLogger()
    >>> state = pl.State.create(torch.nn.Linear(1, 1))
    >>> logger.log_metrics({"norm": torch.tensor(2.0)}, state)
    >>> logger.series("norm")
    ([0], [2.0])
    """

    def __init__(self) -> None:
        self.hyperparameters: dict[str, Any] = {}
        self.metrics: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.tables: dict[str, list[tuple[Timestamp, Sequence[str], Sequence[Sequence[Any]]]]] = {}
        self.images: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.files: dict[str, str] = {}

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self.hyperparameters.update(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, Any], state: State) -> None:
        for name, value in metrics.items():
            # Without its graph, which would otherwise live as long as the logger.
            kept = value.detach() if isinstance(value, Tensor) else value
            self.metrics.setdefault(name, []).append((state.timestamp, kept))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], state: State) -> None:
        self.tables.setdefault(name, []).append((state.timestamp, columns, rows))

    def log_images(self, name: str, images: Any, state: State) -> None:
        self.images.setdefault(name, []).append((state.timestamp, images))

    def log_file(self, name: str, path: str) -> None:
        self.files[name] = path

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """One metric: the batches finished when it was recorded, and its values. Waits for the device.

        Raises:
            ArgumentError: nothing was recorded under this name; the message gives those there are.
        """
        if name not in self.metrics:
            near = difflib.get_close_matches(name, self.metrics, n=1)
            names = ", ".join(map(repr, self.metrics)) or "nothing"
            raise ArgumentError(
                f"no metric {name!r} was recorded{f'; did you mean {near[0]!r}?' if near else ''}; there is {names}"
            )
        recorded = self.metrics[name]
        return [timestamp.batch for timestamp, _ in recorded], _read([value for _, value in recorded])


def _read(values: list[Any]) -> list[float]:
    """The values as floats, with one transfer for all tensors of a kind instead of one for each."""
    read = list(values)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            alike.setdefault((value.device, value.dtype), []).append(index)
    for indices in alike.values():
        numbers = torch.stack([values[index].reshape(()) for index in indices]).tolist()
        for index, number in zip(indices, numbers, strict=True):
            read[index] = number
    return [float(value) for value in read]
