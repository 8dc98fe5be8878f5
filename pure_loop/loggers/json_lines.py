"""Writes a file with one JSON object a line, which survives a kill and which a resumed run continues."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from pure_loop._internal.names import check_recorded_run_name
from pure_loop.cadence import CadenceLike
from pure_loop.loggers._destination import Names
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import FileDestination, first_line, json_safe, remove_written
from pure_loop.loggers._lines import Lines, content_of, line_of
from pure_loop.ranges import checked

__all__ = ["JSONLinesLogger"]


@checked
class JSONLinesLogger(FileDestination):
    """Writes a file of JSON lines: one object for each number, table, text, image and file that is recorded.

    The keys of each object are ``time`` (seconds since 1970), ``event``, ``epoch``, ``batch`` (how many had ended),
    ``kind``, ``name`` and ``value``. After kinds:

    * ``metric``: a number; NaN and infinities are the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, because JSON
      doesn't have them;
    * ``table``: ``{"columns": [...], "rows": [...]}``;
    * ``text``: the text; ``file``: its path;
    * ``images``: paths of PNG files, which are written to a folder beside the file, relative to it;
    * ``hyperparameters``: the mapping; ``run``: the name of the run, in the first line.

    A line with another last boundary than its event has the key ``position``, and one of a run with iterations
    ``iteration``. A run that resumes continues the file: lines from its boundary on are removed, because they are
    recorded again, and a last line that a kill has torn is removed. The file of another run is refused, unless
    ``overwrite=True``.

    Args:
        path: the file; its folder is made. It may have the fields ``{run_name}``, ``{start}`` (when ``fit`` was called,
            in whole seconds since 1970), ``{epoch}`` and ``{batch}`` (where the run starts) and ``{rank}``.
        include, exclude, flush: which names are recorded, and how often they are written: see
            :class:`pure_loop.loggers._destination.Destination`.
        overwrite: replace the record of another run, with its images.

    Raises:
        ArgumentError, ArgumentTypeError: at once.
        RunExistsError: (a FileExistsError) at FIT_START, before any training, where the file is another run's.
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
        overwrite: bool = False,
    ) -> None:
        super().__init__(path, include=include, exclude=exclude, flush=flush, overwrite=overwrite)
        self._file: Lines | None = None
        self._hyperparameters: dict[str, object] = {}

    def settle(self, path: str) -> None:
        super().settle(path)
        self._images = self.path.with_name(f"{self.path.stem}.images")

    @property
    def recorded_run_name(self) -> str | None:
        first = content_of(first_line(self.path))
        name = first["value"] if first is not None and first["kind"] == "run" else None
        return check_recorded_run_name(name, self.path)

    @property
    def is_foreign(self) -> bool:
        head = first_line(self.path)
        return bool(head) and content_of(head) is None

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        remove_written(self._images)

    @property
    def last_batch(self) -> int | None:
        return None if self._file is None else self._file.last_batch

    def begin(self, start: Moment | None) -> None:
        self._file = Lines(self.path, "JSONLinesLogger")
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
        recorded = self._hyperparameters
        if all(name in recorded and recorded[name] == value[name] for name in value):
            return True
        recorded.update(value)
        return False

    def end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _value(self, entry: Entry) -> object:
        if entry.kind == "table":
            columns, rows = entry.value
            return {"columns": columns, "rows": rows}
        if entry.kind == "images":
            from pure_loop.loggers._images import write_images

            paths = write_images(self._images, entry)
            return [os.path.relpath(path, self.path.parent) for path in paths]
        return entry.value
