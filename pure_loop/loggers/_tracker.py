"""The base of loggers that hand everything to a tracker's package, which writes later, and loses it at a kill."""

from __future__ import annotations

import os
import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from pure_loop.cadence import CadenceLike
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.loggers._destination import Names, has_failed
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import FolderDestination, csv_lines, file_part, make_folder
from pure_loop.loggers._lines import Journal


class Tracker(FolderDestination, ABC):
    """Continues a run of a tracker: what an earlier process had sent is not sent again, and what it lost is.

    The folder has ``<prefix>_run.json`` (the name and the id of the run, and up to which step each name was sent) and,
    until the run is finished, ``<prefix>_journal.jsonl`` with everything that was handed to the package.

    Args:
        folder: for these files.
        tags: of the run.
        options: further arguments of the tracker.
        include, exclude, flush: see :class:`pure_loop.loggers._destination.Destination`.

    Raises:
        ArgumentTypeError: ``tags`` is a text.
        ArgumentError: an option that the logger passes itself.
    """

    # In what trackers differ besides how an entry is sent.
    service: ClassVar[str]
    """What takes the options, for errors."""
    own_options: ClassVar[tuple[str, ...]]
    """Options that the logger passes itself."""
    id_bytes: ClassVar[int] = 16
    """How long the id of a run is."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tags: Sequence[str],
        options: Mapping[str, object] | None,
        *,
        include: Names,
        exclude: Names,
        flush: CadenceLike,
    ) -> None:
        super().__init__(folder, include=include, exclude=exclude, flush=flush)
        name = type(self).__name__
        if isinstance(tags, str):
            raise ArgumentTypeError(f"{name} tags={tags!r}: write a list, [{tags!r}].")
        own = [option for option in options or () if option in self.own_options]
        if own:
            raise ArgumentError(
                f"{name} options has {own[0]!r}, which the logger passes to {self.service} itself: write its own "
                "argument, or fit(run_name=) for the name."
            )
        self._is_connected = False
        # The last step of each name that earlier processes sent before they ended, and that this one sends.
        self._had: dict[str, int] = {}
        self._sends: dict[str, int] = {}
        # Names and steps that the tracker has of a process that was killed.
        self._received: set[tuple[str, int]] = set()

    def settle(self, path: str) -> None:
        super().settle(path)
        self._journal = Journal(self.folder / f"{self.prefix}_journal.jsonl", type(self).__name__)

    # What a tracker overrides.

    @abstractmethod
    def connect(self, run_id: str) -> None:
        """Begin the run with this id, or continue it."""

    def received(self, run_id: str, names: set[str]) -> set[tuple[str, int]]:
        """The names and steps that the tracker has of a process that was killed.

        Args:
            run_id: that of the run.
            names: of what the journal has; none where no process was killed.
        """
        return set()

    def pass_on(self, entries: Sequence[Entry]) -> None:
        """Hand entries to the package, in their order."""
        for entry in self.counted_entries(entries):
            with own_draws():
                self._hand_over(entry)

    def _hand_over(self, entry: Entry) -> None:
        """Hand an entry to the package."""

    @abstractmethod
    def disconnect(self, *, failed: bool) -> None:
        """Write everything, and end the run."""

    # What the base does.

    def begin(self, start: Moment | None) -> None:
        make_folder(self.folder, type(self).__name__)
        content = self._run_file.read()
        if content.get("run_name") != self.run_name or "id" not in content:
            self._journal.discard()
            content = {"id": secrets.token_hex(self.id_bytes)}
        run_id = content["id"]
        self._had = dict(content.get("sent", {}))
        self._sends = dict(self._had)
        # Before the run begins, so that a process that is killed then leaves its id to the next one.
        self._run_file.write({"run_name": self.run_name, "id": run_id, **({"sent": self._had} if self._had else {})})
        self.connect(run_id)
        self._is_connected = True
        entries = self._journal.open(start)
        self._received = self.received(run_id, {entry.name for entry in entries})
        self.pass_on([entry for entry in entries if not self.has(entry) and not _is_gone(entry)])

    def has(self, entry: Entry) -> bool:
        # A setting or a file that is sent again takes the place of itself.
        return entry.kind not in ("hyperparameters", "file") and self.has_step(entry.name, entry.moment.batch)

    def has_step(self, name: str, step: int) -> bool:
        """Whether the tracker has a value of a name at a step."""
        return step <= self._had.get(name, -1) or (name, step) in self._received

    def write(self, entries: Sequence[Entry]) -> None:
        self._journal.append(entries)
        self.pass_on(entries)

    def end(self) -> None:
        if not self._is_connected:
            return
        self._is_connected = False
        self.disconnect(failed=has_failed())
        if self._sends:
            self._run_file.write({**self._run_file.read(), "sent": self._sends})
        self._journal.close(finished=True)

    def counted_entries(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        """Entries one after the other; each counts as sent once the next one is asked for."""
        for entry in entries:
            yield entry
            if entry.kind not in ("hyperparameters", "file"):
                self._sends[entry.name] = max(entry.moment.batch, self._sends.get(entry.name, -1))


def _is_gone(entry: Entry) -> bool:
    return entry.kind == "file" and not Path(entry.value).exists()


def file_name(entry: Entry, ending: str) -> str:
    """The name of a file that holds an entry, the same wherever it is written again."""
    return f"ba{entry.moment.batch}-{file_part(entry.name)}{ending}"


def csv_of(entry: Entry) -> str:
    """A table as CSV."""
    columns, rows = entry.value
    return csv_lines([columns, *rows])


def image_files(entry: Entry) -> Iterator[tuple[str, bytes]]:
    """Images, and masks upon them, as PNG files, each by what is added to the name: ``"/0"``, ``"/mask/0"``."""
    from pure_loop.loggers._images import layers_of, png

    for key, layer in layers_of(entry).items():
        for index, image in enumerate(layer):
            yield f"/{index}" if key is None else f"/{key}/{index}", png(image)


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
