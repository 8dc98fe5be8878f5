"""The report of a profile: rows, a table, and a trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Literal

import attrs
import torch

from pure_loop._internal.arguments import check_choice
from pure_loop._internal.reprs import table
from pure_loop.tools.spans import Key, Recorder

__all__ = ["Profile", "Row", "chrome_trace"]

_KINDS = ("kind", "name", "event")
# Rows of a smaller share are shown as one; `rows` has them all.
_SMALLEST = 0.001
_HEAD = ("", "event", "calls", "ms a batch", "share")


@attrs.frozen
class Row:
    """Where time went.

    Attributes:
        kind: ``"stage"``, ``"data"``, ``"algorithm"``, ``"callback"`` or ``"logger"``.
        name: of the stage, algorithm, callback class or source of data.
        event: at which an algorithm or an observer was called; "" for others.
        calls: how often.
        seconds: without those of rows inside it.
        share: of all seconds, from 0 to 1.
    """

    kind: str
    name: str
    event: str
    calls: int
    seconds: float
    share: float


@attrs.frozen(eq=False, repr=False)
class Profile:
    """What :func:`pl.profile <pure_loop.tools.profile>` measured; a notebook or a terminal shows it as a table.

    Attributes:
        rows: where time went, the longest first.
        seconds: that the measured batches took, evaluations and checkpoints between them included.
        batches: how many were measured.
        unattributed: seconds of no row: the loop itself, and what it does between stages.
        device: of the parameters.
        synchronized: whether rows have the time of their kernels; else, on an accelerator, that of launching them.
        compiled: whether steps were compiled: what algorithms do is in ``compiled step`` then.
        torch: the ``torch.profiler.profile`` that ran meanwhile: ``report.torch.key_averages().table()``; or None.
    """

    rows: tuple[Row, ...]
    seconds: float
    batches: int
    unattributed: float
    device: torch.device
    synchronized: bool
    compiled: bool
    torch: Any = None

    @classmethod
    def of(cls, recorder: Recorder, device: torch.device, *, compiled: bool) -> Profile:
        """The report of a recorder that is over."""
        whole = max(recorder.stopped - recorder.started, 1)
        rows = [
            Row(*key, recorder.calls.get(key, 0), nanoseconds / 1e9, nanoseconds / whole)
            for key, nanoseconds in recorder.nanoseconds.items()
        ]
        return cls(
            rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
            seconds=whole / 1e9,
            batches=recorder.finished - recorder.warmup,
            unattributed=recorder.unattributed / 1e9,
            device=device,
            synchronized=recorder.synchronize,
            compiled=compiled,
            torch=recorder.torch_profiler,
        )

    def by(self, what: Literal["kind", "name", "event"]) -> dict[str, float]:
        """Seconds by kind, by name or by event, the most first; ``""``: of no event.

        >>> row = Row("stage", "forward", "", 2, 0.5, 0.5)
        >>> report = Profile((row, attrs.evolve(row, name="loss", seconds=0.25)), 1.0, 2, 0.25, "cpu", False, False)
        >>> report.by("kind")
        {'stage': 0.75}
        """
        check_choice("what", what, _KINDS, where="Profile.by")
        result: dict[str, float] = {}
        for row in self.rows:
            key = getattr(row, what)
            result[key] = result.get(key, 0.0) + row.seconds
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    def table(self) -> list[dict[str, Any]]:
        """The rows as dicts, for ``pandas.DataFrame(report.table())``."""
        return [attrs.asdict(row) for row in self.rows]

    def __repr__(self) -> str:
        cells = [list(_HEAD), *self._cells()]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self._title(), "", *(f"  {line}" for line in lines), *self._notes()])

    def _repr_html_(self) -> str:
        notes = " ".join(note.strip() for note in self._notes() if note)
        return table(self._cells(), _HEAD, " ".join([self._title() + ".", notes]).strip())

    def _title(self) -> str:
        each = self.seconds / max(self.batches, 1)
        many = f"{self.batches} batch{'' if self.batches == 1 else 'es'}"
        return f"profile: {many} in {self.seconds:.3g} s, {1e3 * each:.3g} ms a batch, on {self.device}"

    def _cells(self) -> list[list[str]]:
        shown = [row for row in self.rows if row.share >= _SMALLEST]
        small = [row for row in self.rows if row.share < _SMALLEST]
        if len(small) < 2:  # which would not make it shorter
            shown, small = list(self.rows), []
        rest = [Row("", "unattributed", "", 0, self.unattributed, self.unattributed / self.seconds)]
        if small:
            seconds, count = sum(row.seconds for row in small), sum(row.calls for row in small)
            rest.insert(0, Row("", f"{len(small)} others", "", count, seconds, seconds / self.seconds))
        cells: list[list[str]] = []
        for row in (*shown, *rest):
            milliseconds = 1e3 * row.seconds / max(self.batches, 1)
            name = f"{row.kind} {row.name}" if row.kind in ("algorithm", "callback", "logger") else row.name
            calls = f"{row.calls:,}" if row.calls else ""
            cells.append([name, row.event, calls, f"{milliseconds:.3f}", f"{100 * row.share:.1f}%"])
        return cells

    def _notes(self) -> list[str]:
        notes = []
        if str(self.device).partition(":")[0] != "cpu" and not self.synchronized:
            notes.append("  Times are the host's: kernels run on after a stage returns. With them: synchronize=True.")
        if self.compiled:
            notes.append("  Steps are compiled: algorithms inside a step are part of its graphs.")
        return ["", *notes] if notes else []


def chrome_trace(spans: Iterable[tuple[Key, int, int]]) -> bytes:
    """Spans in the Trace Event Format, JSON, as chrome://tracing and Perfetto read it.

    Args:
        spans: of each its key, and nanoseconds: when it began, and how long it took.
    """
    process = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "pure_loop"}},
        {"ph": "M", "name": "thread_name", "pid": process, "tid": 0, "args": {"name": "the loop"}},
    ]
    # By their beginnings, the longer one first: the one that others are inside.
    for key, started, took in sorted(spans, key=lambda span: (span[1], -span[2])):
        events.append(
            {
                "ph": "X",
                "name": str(key),
                "cat": key.kind,
                "ts": started / 1e3,  # microseconds
                "dur": took / 1e3,
                "pid": process,
                "tid": 0,
                "args": {"event": key.event} if key.event else {},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
