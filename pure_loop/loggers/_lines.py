"""Files of JSON lines with the moment of the run at which each was recorded, so that a resumed run can cut them.

A journal is such a file of what was handed to a service, until the service has said that it has everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pure_loop._internal.owned_files import release, reserve
from pure_loop.event import Event
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import json_safe, open_to_cut, write_all

# A line of a metric, up to its name.
_METRIC = re.compile(rb'\{"time": [0-9.]+, .*?"batch": (?P<batch>[0-9]+), "kind": "metric", ')


class Lines:
    """A file of lines that grows by whole ones.

    Args:
        path: of the file, in a folder that is there.
        writer: the class that writes, for errors.

    Attributes:
        is_empty: whether it has no line.
        last_batch: the batch of its last metric; -1: it has none.
    """

    def __init__(self, path: Path, writer: str) -> None:
        self.path = path
        self.is_empty = True
        self.last_batch = -1
        self._writer = writer
        self._file: BinaryIO | None = None

    def open(self, start: Moment | None, *, metrics: bool = False) -> Iterator[dict[str, Any]]:
        """Open the file, and cut off what a run that resumes at ``start`` records again, and a line torn by a kill.

        Args:
            start: a FIT_START; None: only a torn line is cut.
            metrics: whether lines of metrics are yielded, too.

        Yields:
            What the lines that stay hold. The file is cut after the last one.
        """
        self._file = open_to_cut(self.path, self._writer)
        end = 0
        with open(self.path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                metric = _METRIC.match(line)
                # Nearly all lines are metrics of batches before, and need no parsing.
                if metrics or metric is None or (start is not None and int(metric["batch"]) >= start.batch):
                    content = content_of(line)
                    if content is None:
                        break
                    if content["kind"] != "run" and start is not None and not moment_of(content).is_before(start):
                        break
                    yield content
                if metric is not None:
                    self.last_batch = int(metric["batch"])
                end += len(line)
        self._file.truncate(end)
        self._file.seek(end)
        self.is_empty = end == 0

    def append(self, lines: Sequence[str]) -> None:
        """Add lines at the end, in one call of the system unless the disk is full."""
        assert self._file is not None
        write_all(self._file, "".join(lines), self.path, self._writer)
        self.is_empty = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def line_of(kind: str, name: str, value: object, moment: Moment, seconds: float) -> str:
    """The line of something that was recorded."""
    event, position = moment.event, moment.position
    content: dict[str, object] = {"time": round(seconds, 3), "event": None if event is None else event.name}
    if position is not event:
        content["position"] = None if position is None else position.name
    content["epoch"] = moment.epoch
    if moment.iteration:
        content["iteration"] = moment.iteration
    content |= {"batch": moment.batch, "kind": kind, "name": name, "value": json_safe(value)}
    return json.dumps(content, ensure_ascii=False) + "\n"


def content_of(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None: it is torn, or no line of ours."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(content, dict) and {"event", "epoch", "batch", "kind", "name", "value"} <= content.keys()
    return content if is_ours else None


def moment_of(content: Mapping[str, Any]) -> Moment:
    """Where in the run the line was recorded."""
    event = _event(content["event"])
    position = _event(content["position"]) if "position" in content else event
    return Moment(content["batch"], content["epoch"], content.get("iteration", 0), position, event)


def _event(name: str) -> Event | None:
    return Event.__members__.get(name)


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


def _value(entry: Entry) -> object:
    if entry.kind != "images":
        return entry.value
    from pure_loop.loggers._images import packed

    return packed(entry)


def _entry(content: Mapping[str, Any]) -> Entry:
    value = content["value"]
    if content["kind"] == "metric" and isinstance(value, str):
        value = float(value)  # NaN and infinities
    elif content["kind"] == "table":
        value = tuple(value)
    elif content["kind"] == "images":
        from pure_loop.loggers._images import unpacked

        value = unpacked(value)
    return Entry(content["kind"], content["name"], value, moment_of(content), content["time"])
