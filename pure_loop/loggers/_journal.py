"""What was handed to a service that writes later: a file of it, until the service has said that it has everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pure_loop._internal.owned_files import release, reserve
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._lines import Lines, line_of, moment_of

__all__ = ["Journal"]


class Journal:
    """What was handed to a service, which loses it when the process is killed; but for hyperparameters.

    Args:
        path: of the file, in a folder that is there.
        writer: the class that writes, for errors.
    """

    def __init__(self, path: Path, writer: str) -> None:
        self._path, self._writer = path, writer
        self._lines: Lines | None = None

    def open(self, start: Moment | None) -> list[Entry]:
        """Open it, and give what a run that resumes at ``start`` does not record again, in its order."""
        reserve(self._path, self._writer)
        self._lines = Lines(self._path, self._writer)
        return [_entry(content) for content in self._lines.open(start, metrics=True)]

    def append(self, entries: Sequence[Entry]) -> None:
        """Add what is handed to the service next."""
        lines = [
            line_of(e.kind, e.name, _value(e), e.moment, e.seconds) for e in entries if e.kind != "hyperparameters"
        ]
        if lines and self._lines is not None:
            self._lines.append(lines)

    def close(self, *, finished: bool) -> None:
        """Close it, and remove it where the service has everything; nothing where it could not be opened."""
        if self._lines is None:
            return
        self._lines.close()
        self._lines = None
        release(self._path)
        if finished:
            self.discard()

    def discard(self) -> None:
        """Remove what another run has left."""
        self._path.unlink(missing_ok=True)


def _value(entry: Entry) -> Any:
    if entry.kind != "images":
        return entry.value
    from pure_loop.loggers._images import packed

    return packed(entry)


def _entry(content: Any) -> Entry:
    value = content["value"]
    if content["kind"] == "metric" and isinstance(value, str):
        value = float(value)  # NaN and infinities
    elif content["kind"] == "table":
        value = tuple(value)
    elif content["kind"] == "images":
        from pure_loop.loggers._images import unpacked

        value = unpacked(value)
    return Entry(content["kind"], content["name"], value, moment_of(content), content["time"])
