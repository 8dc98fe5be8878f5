"""The base of loggers that hand everything to a tracker's package, which writes later, and loses it at a kill."""

from __future__ import annotations

import os
import random
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pure_loop._internal.names import Pattern
from pure_loop.cadence import CadenceLike
from pure_loop.loggers._destination import Destination, Names
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import RunFile, file_part, make_folder, read_path
from pure_loop.loggers._lines import Journal

__all__ = ["Tracker", "csv_of", "file_name", "image_layers", "new_id", "own_draws", "variables"]


class Tracker(Destination, ABC):
    """Continues a run of a tracker: what an earlier process had sent is not sent again, and what it lost is.

    The folder has ``<prefix>_run.json`` (the name and the id of the run, and up to which step each name was sent) and,
    until the run is finished, ``<prefix>_journal.jsonl`` with everything that was handed to the package.

    Args:
        folder: for these files.
        prefix: of their names.
        include, exclude, flush: see :class:`pure_loop.loggers._destination.Destination`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], prefix: str, *, include: Names, exclude: Names, flush: CadenceLike
    ) -> None:
        place = Pattern(folder, f"{type(self).__name__} folder")
        super().__init__(include=include, exclude=exclude, flush=flush, place=place)
        self._prefix = prefix
        self.settle(place.text)
        self._is_connected = False
        # The last step of each name that earlier processes sent before they ended, and that this one sends.
        self._had: dict[str, int] = {}
        self._sends: dict[str, int] = {}
        # Names and steps that the tracker has of a process that was killed.
        self._received: set[tuple[str, int]] = set()

    def settle(self, path: str) -> None:
        self.folder = read_path(path, f"{type(self).__name__} folder")
        self._run_file = RunFile(self.folder / f"{self._prefix}_run.json")
        self._journal = Journal(self.folder / f"{self._prefix}_journal.jsonl", type(self).__name__)

    @property
    def recorded_run_name(self) -> str | None:
        return self._run_file.run_name

    # What a tracker overrides.

    @abstractmethod
    def connect(self, run_id: str | None) -> str:
        """Begin a run, or continue the one with this id; its id.

        Args:
            run_id: None: the run is new.
        """

    def received(self, run_id: str, names: Iterable[str]) -> set[tuple[str, int]]:
        """The names and steps that the tracker has of a process that was killed."""
        return set()

    @abstractmethod
    def send(self, entry: Entry) -> None:
        """Hand an entry to the package."""

    @abstractmethod
    def disconnect(self, *, failed: bool) -> None:
        """Write everything, and end the run."""

    # What the base does.

    def begin(self, start: Moment | None) -> None:
        make_folder(self.folder, type(self).__name__)
        content = self._run_file.read()
        is_new = content.get("run_name") != self.run_name or "id" not in content
        if is_new:
            self._journal.discard()
            content = {}
        run_id = self.connect(content.get("id"))
        self._is_connected = True
        self._had = dict(content.get("sent", {}))
        self._sends = dict(self._had)
        self._run_file.write({"run_name": self.run_name, "id": run_id, "sent": self._had})
        kept = self._journal.open(start)
        self._received = self.received(run_id, {entry.name for entry in kept}) if kept else set()
        for entry in kept:
            if not self.has(entry) and not (entry.kind == "file" and not Path(entry.value).exists()):
                self._send(entry)

    def has(self, entry: Entry) -> bool:
        # A setting or a file that is sent again takes the place of itself.
        if entry.kind in ("hyperparameters", "file"):
            return False
        step = entry.moment.batch
        return step <= self._had.get(entry.name, -1) or (entry.name, step) in self._received

    def write(self, entries: Sequence[Entry]) -> None:
        self._journal.append(entries)
        for entry in entries:
            self._send(entry)

    def end(self) -> None:
        if not self._is_connected:
            return
        self._is_connected = False
        error = sys.exception()
        self.disconnect(failed=error is not None and not isinstance(error, GeneratorExit))
        self._run_file.write({**self._run_file.read(), "sent": self._sends})
        self._journal.close(finished=True)

    def _send(self, entry: Entry) -> None:
        self.send(entry)
        if entry.kind not in ("hyperparameters", "file"):
            self._sends[entry.name] = max(entry.moment.batch, self._sends.get(entry.name, -1))


def new_id() -> str:
    """32 hexadecimal digits."""
    return secrets.token_hex(16)


def file_name(entry: Entry, ending: str) -> str:
    """The name of a file that holds an entry, the same wherever it is written again."""
    return f"ba{entry.moment.batch}-{file_part(entry.name)}{ending}"


def csv_of(entry: Entry) -> str:
    """A table as CSV."""
    import csv
    import io

    columns, rows = entry.value
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([columns, *rows])
    return out.getvalue()


def image_layers(entry: Entry) -> dict[str, Any]:
    """Images, and masks upon them, by what is added to their name: each ``(n, height, width, channels)`` of uint8."""
    from pure_loop.loggers._images import as_masks, as_pixels, overlay

    images, masks = entry.value
    pixels = as_pixels(images, entry.name)
    return {"": pixels} | {
        f"/{key}": overlay(pixels, mask) for key, mask in as_masks(masks, pixels, entry.name).items()
    }


@contextmanager
def own_draws() -> Iterator[None]:
    """Code that draws from Python's random generator, and leaves it as it was to the program."""
    state = random.getstate()
    # The names of files that are drawn must differ between processes, also where the program has set a seed.
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
