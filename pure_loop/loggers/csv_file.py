"""Writes a CSV file with a row for each batch and a column for each name, which a resumed run continues."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from pure_loop._internal.names import printable
from pure_loop._internal.owned_files import naming
from pure_loop.cadence import CadenceLike
from pure_loop.loggers._destination import Names
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import (
    FileDestination,
    RunFile,
    csv_lines,
    file_part,
    first_line,
    open_to_cut,
    remove_written,
    write_all,
)
from pure_loop.ranges import checked

__all__ = ["CSVLogger"]

_FIRST = ["batch", "epoch", "time"]


@checked
class CSVLogger(FileDestination):
    """Writes numbers to a CSV file: a row for each batch after which something was recorded, a column for each name.

    The first columns are ``batch`` (how many had ended), ``epoch`` and ``time`` (seconds since 1970); a cell without a
    value is empty, and one with a name that is recorded again at its batch keeps the first value. A name that is
    recorded for the first time later adds a column. Beside ``metrics.csv`` there are the name of the run and its
    hyperparameters in ``metrics.run.json``, and tables as ``metrics.tables/ba<batch>-<name>.csv``. Texts, images and
    files are left out.

    A run that resumes continues the file: rows of batches that are trained again are removed, as is a last row that a
    kill has torn. The file of another run is refused, unless ``overwrite=True``.

    Args:
        path: the file; its folder is made. It may have the fields ``{run_name}``, ``{start}`` (when ``fit`` was called,
            in whole seconds since 1970), ``{epoch}`` and ``{batch}`` (where the run starts) and ``{rank}``.
        include, exclude, flush: which names are recorded, and how often they are written: see
            :class:`pure_loop.loggers._destination.Destination`.
        overwrite: replace the record of another run, with its tables.

    Raises:
        ArgumentError, ArgumentTypeError: at once.
        RunExistsError: (a FileExistsError) at FIT_START, before any training, where the file is another run's.
        OSError: at FIT_START, where the file can't be written.

    >>> import pathlib, tempfile, torch, pure_loop as pl
    >>> path = pathlib.Path(tempfile.mkdtemp(), "metrics.csv")
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1, bias=False), data, loss=torch.nn.functional.mse_loss,
    ...                       optimizer=pl.optim.sgd(lr=0.5), max_duration="1ep", loggers=[CSVLogger(path)]))
    >>> print(path.read_text())
    batch,epoch,time,train/loss,train/learning_rate
    1,0,...,1.0,0.5
    2,0,...,1.0,0.5
    3,0,...,1.0,0.5
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
        overwrite: bool = False,
    ) -> None:
        super().__init__(path, include=include, exclude=exclude, flush=flush, overwrite=overwrite)
        self._file: BinaryIO | None = None
        self._columns: list[str] = []
        # The last row, which may get further values, and where it begins.
        self._row: dict[str, str] = {}
        self._row_at = 0

    def settle(self, path: str) -> None:
        super().settle(path)
        self._run_file = RunFile(self.path.with_name(f"{self.path.stem}.run.json"))
        self._tables = self.path.with_name(f"{self.path.stem}.tables")

    @property
    def recorded_run_name(self) -> str | None:
        return self._run_file.run_name if self.path.exists() else None

    @property
    def is_foreign(self) -> bool:
        head = first_line(self.path)
        return bool(head) and not head.startswith(",".join(_FIRST).encode())

    def discard(self) -> None:
        for path in (self.path, self._run_file.path):
            path.unlink(missing_ok=True)
        remove_written(self._tables)

    @property
    def last_batch(self) -> int | None:
        return int(self._row.get("batch", -1))

    def begin(self, start: Moment | None) -> None:
        self._run_file.write({**self._run_file.read(), "run_name": self.run_name})
        self._columns, self._row, self._row_at = list(_FIRST), {}, 0
        end = 0
        if self.path.exists():
            with open(self.path, "rb") as lines:
                for number, line in enumerate(lines):
                    cells = next(csv.reader([line.decode(errors="replace")]), [])
                    if not line.endswith(b"\n") or not cells:
                        break  # torn by a kill
                    if number == 0:
                        self._columns = cells
                    elif not cells[0].isdigit() or (start is not None and int(cells[0]) > start.batch):
                        break
                    else:
                        row = zip(self._columns, cells, strict=False)
                        self._row, self._row_at = {column: cell for column, cell in row if cell}, end
                    end += len(line)
        self._open_file(end)
        if not end:
            self._write_at(0, csv_lines([self._columns]))

    def write(self, entries: Sequence[Entry]) -> None:
        self._add_columns(entry.name for entry in entries if entry.kind == "metric")
        finished: list[str] = []
        for entry in entries:
            if entry.kind == "metric":
                batch = str(entry.moment.batch)
                if self._row.get("batch") != batch:
                    if self._row:
                        finished.append(self._line_of(self._row))
                    self._row = {"batch": batch, "epoch": str(entry.moment.epoch), "time": str(entry.seconds)}
                    if not finished:
                        self._row_at = self._size()
                self._row.setdefault(_column(entry.name), repr(entry.value))
            elif entry.kind == "table":
                self._write_table(entry)
            elif entry.kind == "hyperparameters":
                content = self._run_file.read()
                content["hyperparameters"] = {**content.get("hyperparameters", {}), **entry.value}
                self._run_file.write(content)
        if self._row:
            last = self._line_of(self._row)
            # The row that was the last one before is written anew, in one call: values are added and none is removed.
            self._write_at(self._row_at, "".join([*finished, last]))
            self._row_at = self._size() - len(last.encode())

    def end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add_columns(self, names: Iterable[str]) -> None:
        added = [name for name in dict.fromkeys(map(_column, names)) if name not in self._columns]
        if not added:
            return
        self._columns += added
        beside = self.path.with_name(f".{self.path.name}.partial")
        with naming(self.path, "CSVLogger"):
            try:
                with open(self.path, "rb") as old, open(beside, "wb") as file:
                    old.readline()
                    file.write(csv_lines([self._columns]).encode())
                    grown = file.tell()
                    for line in old:
                        self._row_at = grown
                        grown += file.write(line.rstrip(b"\r\n") + b"," * len(added) + b"\n")
                self.end()
                os.replace(beside, self.path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        self._open_file(grown)

    def _line_of(self, row: dict[str, str]) -> str:
        return csv_lines([[row.get(column, "") for column in self._columns]])

    def _write_table(self, entry: Entry) -> None:
        columns, rows = entry.value
        path = Path(self._tables, f"ba{entry.moment.batch}-{file_part(entry.name)}.csv")
        with naming(path, "CSVLogger"):
            self._tables.mkdir(exist_ok=True)
            path.write_text(csv_lines([columns, *rows]), encoding="utf-8", newline="")

    def _open_file(self, end: int) -> None:
        self._file = open_to_cut(self.path, "CSVLogger")
        self._file.truncate(end)

    def _size(self) -> int:
        assert self._file is not None
        return self._file.seek(0, os.SEEK_END)

    def _write_at(self, offset: int, text: str) -> None:
        assert self._file is not None
        self._file.seek(offset)
        write_all(self._file, text, self.path, "CSVLogger")


def _column(name: str) -> str:
    """A name in one line; no column of a metric is one of the first three."""
    is_taken = re.sub("^(metric/)+", "", name) in _FIRST
    return f"metric/{name}" if is_taken else printable(name)
