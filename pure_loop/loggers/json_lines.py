"""Writes a file with one JSON object a line, which survives a kill and which a resumed run continues."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from pure_loop._internal.names import check_recorded_run_name
from pure_loop.cadence import CadenceLike
from pure_loop.loggers._destination import Destination, Names
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import json_safe, make_folder, read_file_path, set_aside
from pure_loop.loggers._lines import Lines, content_of, line_of
from pure_loop.ranges import checked

__all__ = ["JSONLinesLogger"]


@checked
class JSONLinesLogger(Destination):
    """Writes a file of JSON lines: one object for each number, table, text, image and file that is recorded.

    The keys of each object are ``time`` (seconds since 1970), ``event``, ``epoch``, ``batch`` (how many had ended),
    ``kind``, ``name`` and ``value``. After kinds:

    * ``metric``: a number; NaN and infinities are the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, because JSON
      doesn't have them;
    * ``table``: ``{"columns": [...], "rows": [...]}``;
    * ``text``: the text; ``file``: its path;
    * ``images``: paths of PNG files, which are written to a folder beside the file, relative to it;
    * ``hyperparameters``: the mapping; ``run``: the name of the run, in the first line.

    A line whose last boundary is not its event has the key ``position``, and one of a run with iterations
    ``iteration``. A run that resumes continues the file: lines from its boundary on are removed, because they are
    recorded again, and a last line that a kill has torn is removed. The file of a run of another name is renamed to
    ``<stem>.<name>.jsonl``.

    Args:
        path: the file; its folder is made.
        include, exclude, flush: which names are recorded, and how often they are written: see
            :class:`pure_loop.loggers._destination.Destination`.

    Raises:
        ArgumentError, ArgumentTypeError: at once.
        OSError: at FIT_START, where the file can't be written.

    >>> import json, pathlib, tempfile, torch, pure_loop as pl
    >>> path = pathlib.Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1, bias=False), data, loss=torch.nn.functional.mse_loss,
    ...                       optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
    ...                       loggers=[JSONLinesLogger(path, include="train/*")]))
    >>> lines = [json.loads(line) for line in path.read_text().splitlines()]
    >>> [(line["batch"], line["value"]) for line in lines if line["name"] == "train/loss"]
    [(1, 1.0), (2, 1.0), (3, 1.0)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
    ) -> None:
        super().__init__(include=include, exclude=exclude, flush=flush)
        self.path = read_file_path(path, "JSONLinesLogger path")
        self._file: Lines | None = None
        self._hyperparameters: dict[str, Any] = {}

    @property
    def recorded_run_name(self) -> str | None:
        first = content_of(self._first_line())
        name = first["value"] if first is not None and first["kind"] == "run" else None
        return check_recorded_run_name(name, self.path)

    def begin(self, start: Moment | None) -> None:
        make_folder(self.path.parent, "JSONLinesLogger")
        recorded = self.recorded_run_name
        head = self._first_line()
        if self.run_name != recorded or (head.endswith(b"\n") and content_of(head) is None):
            set_aside(self.path, recorded)
        self._file = Lines(self.path)
        self._hyperparameters = {}
        for content in self._file.open(start):
            if content["kind"] == "hyperparameters":
                self._hyperparameters.update(content["value"])
        if self._file.is_empty and self.run_name is not None:
            self._file.append([line_of("run", "run_name", self.run_name, start or Moment(), time.time())])

    def write(self, entries: Sequence[Entry]) -> None:
        assert self._file is not None
        self._file.append([line_of(e.kind, e.name, self._value(e), e.moment, e.seconds) for e in entries])

    def has(self, entry: Entry) -> bool:
        if entry.kind != "hyperparameters":
            return False
        value = json_safe(entry.value)
        known = self._hyperparameters
        if all(name in known and known[name] == value[name] for name in value):
            return True
        known.update(value)
        return False

    def end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _first_line(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                return file.readline()
        except OSError:
            return b""

    def _value(self, entry: Entry) -> Any:
        if entry.kind == "table":
            columns, rows = entry.value
            return {"columns": columns, "rows": rows}
        if entry.kind == "images":
            from pure_loop.loggers._images import write_images

            paths = write_images(self.path.with_name(f"{self.path.stem}.images"), entry)
            return [os.path.relpath(path, self.path.parent) for path in paths]
        return entry.value
