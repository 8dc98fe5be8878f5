"""Keeps everything that is recorded, as it comes: for notebooks, plots and tests."""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pure_loop._internal.arguments import check_file_name, path_text
from pure_loop._internal.lazy import require
from pure_loop._internal.owned_files import naming
from pure_loop._internal.recordable import check_metrics, recordable_metrics
from pure_loop._internal.reprs import cell, table
from pure_loop._internal.suggestions import teaching
from pure_loop.callback import Logger
from pure_loop.errors import ArgumentError
from pure_loop.loggers._entry import read_numbers
from pure_loop.loggers._files import make_folder, read_file_path
from pure_loop.ranges import checked
from pure_loop.state import State
from pure_loop.time import Timestamp

if TYPE_CHECKING:
    import pandas

__all__ = ["InMemoryLogger"]

# Columns of the table before those of the metrics.
_FIRST = ("batch", "epoch", "sample")
_MOST = 6


@checked
class InMemoryLogger(Logger):
    """Keeps what is recorded as it comes; tensors stay on their device until they are read.

    Attributes:
        hyperparameters: the settings of the run, by name.
        metrics: for each name the list of ``(timestamp, value)``; values may be tensors on a device.
        tables: for each name the list of ``(timestamp, columns, rows)``.
        images: for each name the list of ``(timestamp, images)``.
        masks: for each name of images that have masks the list of ``(timestamp, masks)``.
        texts: for each name the list of ``(timestamp, text)``.
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
        self.hyperparameters: dict[str, object] = {}
        self.metrics: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.tables: dict[str, list[tuple[Timestamp, Sequence[str], Sequence[Sequence[Any]]]]] = {}
        self.images: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.masks: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.texts: dict[str, list[tuple[Timestamp, str]]] = {}
        self.files: dict[str, str] = {}

    def __repr__(self) -> str:
        """The last value of each metric; numbers are read, which waits for their device."""
        last = [f"{name} {value} at batch {batch}" for name, _, batch, value in self._last()]
        more = [f"... {len(last) - _MOST} more"] if len(last) > _MOST else []
        return f"{type(self).__name__}({', '.join([*last[:_MOST], *more])})"

    def in_a_call(self) -> str:
        return super().__repr__()

    def _repr_html_(self) -> str:
        return table(list(self._last()), head=["metric", "values", "last at batch", "last value"])

    def _last(self) -> Iterator[tuple[str, int, int, str]]:
        for name, recorded in self.metrics.items():
            timestamp, value = recorded[-1]
            yield name, len(recorded), timestamp.batch, cell(value)

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        self.hyperparameters.update(hyperparameters)

    @teaching
    def log_metrics(self, metrics: Mapping[str, object], state: State) -> None:
        for name, value in check_metrics(metrics, state).items():
            # Without its graph, which would otherwise live as long as the logger.
            detached = value.detach() if isinstance(value, Tensor) else value
            self.metrics.setdefault(name, []).append((state.timestamp, detached))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], state: State) -> None:
        self.tables.setdefault(name, []).append((state.timestamp, columns, rows))

    def log_images(self, name: str, images: object, state: State, *, masks: object = None) -> None:
        self.images.setdefault(name, []).append((state.timestamp, images))
        if masks is not None:
            self.masks.setdefault(name, []).append((state.timestamp, masks))

    def log_text(self, name: str, text: str, state: State) -> None:
        self.texts.setdefault(name, []).append((state.timestamp, text))

    def log_file(self, name: str, path: str) -> None:
        self.files[check_file_name(name, "InMemoryLogger.log_file")] = path_text(path)

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
        return [timestamp.batch for timestamp, _ in recorded], list(
            map(float, read_numbers([value for _, value in recorded]))
        )

    def to_pandas(self) -> pandas.DataFrame:
        """All metrics as one ``DataFrame``, for plots and statistics. Waits for the device once.

        The columns are ``batch``, ``epoch`` and ``sample`` (how many had ended) and the names of the metrics, in the
        order in which they were first recorded. Each batch has a row, and as many as the name that was recorded there
        most often. Where a name has no value the cell is NaN.

        Raises:
            MissingExtraError: pandas is not installed: ``pip install 'pure_loop[pandas]'``.

        >>> import torch, pure_loop as pl
        >>> logger = InMemoryLogger()
        >>> state = pl.State.create(torch.nn.Linear(1, 1))
        >>> logger.log_metrics({"train/loss": torch.tensor(0.5), "by_class": torch.tensor([1.0, 2.0])}, state)
        >>> logger.to_pandas()
           batch  epoch  sample  train/loss  by_class/0  by_class/1
        0      0      0       0         0.5         1.0         2.0
        """
        pandas = require("pandas", "pandas", "InMemoryLogger.to_pandas")
        columns, rows = self._table()
        return pandas.DataFrame(rows, columns=columns)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the same table as a CSV file, in a folder that is made; empty cells have no value. Needs no pandas.

        Raises:
            ArgumentError, ArgumentTypeError: ``path`` is no path of a local file.
            OSError: it can't be written.
        """
        file = read_file_path(path, "InMemoryLogger.to_csv path")
        make_folder(file.parent, "InMemoryLogger.to_csv")
        columns, rows = self._table()
        with naming(file, "InMemoryLogger.to_csv"), open(file, "w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows([columns, *rows])

    def _table(self) -> tuple[list[str], list[list[object]]]:
        """The names of columns, and rows with None where there is no value."""
        cells = numbers_in(self.metrics)
        columns = {name: index for index, name in enumerate(dict.fromkeys(name for name, _, _ in cells), len(_FIRST))}
        # The values of a name at one batch take rows of their own; so no value is dropped.
        counts: dict[tuple[str, int], int] = {}
        rows: dict[tuple[int, int], list[object]] = {}
        for name, timestamp, number in cells:
            place = counts.get((name, timestamp.batch), 0)
            counts[name, timestamp.batch] = place + 1
            first = [timestamp.batch, timestamp.epoch, timestamp.sample]
            row = rows.setdefault((timestamp.batch, place), [*first, *[None] * len(columns)])
            row[columns[name]] = number
        names = [f"metric/{name}" if name in _FIRST else name for name in columns]
        return [*_FIRST, *names], [rows[place] for place in sorted(rows)]


def numbers_in(metrics: Mapping[str, Sequence[tuple[Timestamp, object]]]) -> list[tuple[str, Timestamp, int | float]]:
    """Every number of metrics by its name, ``"f1/a"`` for a part of ``"f1"``. Waits for the device once."""
    cells = [
        (name, timestamp, number)
        for recorded_name, recorded in metrics.items()
        for timestamp, value in recorded
        for name, number in recordable_metrics({recorded_name: value})[0].items()
    ]
    numbers = read_numbers([value for _, _, value in cells])
    return [(name, timestamp, number) for (name, timestamp, _), number in zip(cells, numbers, strict=True)]
