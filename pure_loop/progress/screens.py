"""What there is to show, its parts as text, and where it is shown: lines of a file, or HTML in a notebook.

Ctrl-C waits until a drawing is finished: in the middle of one a signal would spoil the terminal, or be lost.
"""

from __future__ import annotations

import importlib
import secrets
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from itertools import groupby
from types import FrameType
from typing import Any, Protocol, TextIO

import attrs

from pure_loop._internal.closing import call_all
from pure_loop.progress import words as _words
from pure_loop.progress.estimate import Inside
from pure_loop.progress.table import Row, Table
from pure_loop.progress.words import BEST


@contextmanager
def deferred_signals() -> Iterator[None]:
    """The handlers of SIGINT and SIGTERM run when this block is left; a second signal of a kind acts at once.

    An exception from a handler leaves rich's console in the middle of a buffer, and what is printed from there on is
    never written; where it comes in a generator of rich that is being closed, Python ignores it. In a terminal that was
    stopped by Ctrl-S no drawing ends: the second Ctrl-C acts.

    In another thread than the main one, where Python runs no handlers, the block does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is no function, such as SIG_DFL, raises nothing.
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    pending: set[int] = set()
    over = False

    def defer(number: int, frame: FrameType | None) -> None:
        if over or number in pending:
            pending.discard(number)
            signal.signal(number, handlers[number])
            signal.raise_signal(number)
        else:
            pending.add(number)

    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        over = True  # a signal that comes from here on acts, between the lines below too
        for number, handler in handlers.items():
            if signal.getsignal(number) is defer:
                signal.signal(number, handler)
        call_all([partial(signal.raise_signal, number) for number in pending], sys.exception())


_GAP = 2


@attrs.frozen
class Part:
    """A part of a line, which is shown whole or not at all.

    Attributes:
        text: the text.
        rank: its importance: of two parts that don't fit, the one with the larger number is left out.
        style: of rich.
    """

    text: str
    rank: int = 0
    style: str = ""


@attrs.frozen(kw_only=True)
class Snapshot:
    """What there is to show at one moment.

    Attributes:
        title: what runs.
        members: how many models an ensemble has, in words; empty for one model.
        epoch: which epoch of how many, ``"epoch 1/2"``; empty outside training.
        batch: which batch of how many, ``"batch 3/20"``.
        inside: the evaluation under way.
        fraction: how much of it is done, in [0, 1]; None where that is not known.
        speed: samples a second; None before it is known.
        left: seconds until the end; None before it is known.
        spent: seconds since the start.
        ending: how it ended, in a word, with what else there is to say behind a colon; empty while it runs.
        remarks: why it ended, and where it came from: a line each, at the end.
    """

    title: str
    members: str = ""
    epoch: str = ""
    batch: str = ""
    inside: Inside | None = None
    fraction: float | None
    speed: float | None
    left: float | None
    spent: float
    ending: str = ""
    remarks: Sequence[str] = ()

    @property
    def done(self) -> bool:
        """Whether it ended well."""
        return self.ending.partition(":")[0] == "done"

    @property
    def place(self) -> str:
        """Epoch and batch; in an evaluation, its batch."""
        if self.inside is None or not self.epoch:
            return "  ".join(filter(None, (self.epoch, self.batch)))
        return f"evaluating {self.inside.label}, {batch_of(self.inside.batch, self.inside.batches)}"

    @property
    def percent(self) -> str:
        return percent(self.fraction)

    @property
    def rate(self) -> str:
        return "" if self.speed is None else f"{_words.rate(self.speed)} samples/s"

    @property
    def time(self) -> str:
        return self.times[0]

    @property
    def times(self) -> tuple[str, ...]:
        """The time, and how it ended, in words; then shorter."""
        if self.ending:
            spent = _words.clock(self.spent)
            word = self.ending.partition(":")[0]
            return f"{self.ending}, {spent}", f"{word}, {spent}", word, spent
        return (time_left(self.left, self.spent),)

    def measured(self, values: Mapping[str, float], longest: int | None = None) -> list[list[str]]:
        """The loss and the speed, then each evaluation: ``[["loss 0.25", "1.2k samples/s"], ["val: loss 0.3"]]``.

        Args:
            values: by name, ``"val/loss"``.
            longest: how long a name may be; None: as long as it is.
        """
        groups: dict[str, list[str]] = {}
        for name, value in values.items():
            label, _, metric = name.rpartition("/")
            if name.endswith(BEST) and label in groups:
                groups[label][-1] += f" (best {_words.number(value)})"
                continue
            metric = metric if longest is None else _words.cut(metric, longest)
            groups.setdefault(label, []).append(f"{metric} {_words.number(value)}")
        if self.speed is not None:
            groups = {"": [*groups.pop("", []), self.rate], **groups}
        for label, texts in groups.items():
            if label:
                texts[0] = f"{label if longest is None else _words.cut(label, longest)}: {texts[0]}"
        return list(groups.values())


def batch_of(batch: int, batches: int | None) -> str:
    """
    >>> batch_of(3, 20), batch_of(3, None)
    ('batch  3/20', 'batch 3')
    """
    return f"batch {batch}" if batches is None else f"batch {str(batch).rjust(len(str(batches)))}/{batches}"


def percent(fraction: float | None) -> str:
    # Rounded down: 100% is the end and nothing before it.
    return "" if fraction is None else f"{int(100 * fraction + 1e-9)}%"


def time_left(left: float | None, spent: float) -> str:
    return _words.clock(spent) if left is None else f"{_words.clock(left)} left"


def that_fit(parts: Iterable[Part], width: int) -> list[Part]:
    """The most important parts, as many as fit beside each other.

    >>> parts = Part("epoch 1/2", 1), Part("batch 30/60", 2), Part("50%", 0)
    >>> [part.text for part in that_fit(parts, width=16)]
    ['epoch 1/2', '50%']
    """
    fitting = [part for part in parts if part.text]
    while fitting and width_of(fitting) > width:
        fitting.remove(max(fitting, key=lambda part: part.rank))
    return fitting


def width_of(parts: Sequence[Part]) -> int:
    return sum(len(part.text) for part in parts) + _GAP * (len(parts) - 1)


def side_by_side(groups: Iterable[Sequence[str]], width: int) -> list[str]:
    """Groups of texts in lines of at most a width; a group that is wider is split, and a text that is wider left out.

    >>> side_by_side([["loss 1.0", "9 samples/s"], ["val: loss 2.0", "accuracy 0.5"]], width=24)
    ['loss 1.0  9 samples/s', 'val: loss 2.0', 'accuracy 0.5']
    """
    lines: list[str] = []
    for group in groups:
        joined = "  ".join(group)
        for gap, text in [("   ", joined)] if len(joined) <= width else [("  ", text) for text in group]:
            if len(text) > width:
                continue
            if lines and len(lines[-1]) + len(gap) + len(text) <= width:
                lines[-1] += gap + text
            else:
                lines.append(text)
    return lines


_LINE_SECONDS = 10.0


class Screen(Protocol):
    """What shows snapshots.

    Attributes:
        live: whether it is redrawn in place, and shows rows.
        seconds: between two drawings, at least.
    """

    @property
    def live(self) -> bool: ...

    @property
    def seconds(self) -> float: ...

    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        """Draw a snapshot, and the values that were measured, by name."""

    def add(self, row: Row, values: Mapping[str, float]) -> None:
        """Add a row to the table."""

    def close(self) -> None:
        """Leave everything as it is."""


class Lines:
    """A plain line now and then: for logs, pipes and files."""

    live = False
    seconds = _LINE_SECONDS

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        measured = map("  ".join, snapshot.measured(values))
        inside = snapshot.inside if snapshot.epoch else None
        left = "" if inside is None or inside.fraction is None else f"{int(100 * inside.fraction)}%"
        done = snapshot.percent if inside is None else left
        parts = (snapshot.title, snapshot.members, snapshot.place, done, *measured, snapshot.time)
        remarks = (f"{snapshot.title}  {remark}" for remark in snapshot.remarks)
        print("  ".join(filter(None, parts)), *remarks, sep="\n", file=self._file, flush=True)

    def add(self, row: Row, values: Mapping[str, float]) -> None:
        pass  # the end of an epoch and each evaluation have lines

    def close(self) -> None:
        pass


# How wide the plain text is that stands beside the HTML, for readers that show none.
_TEXT_WIDTH = 120
_CELL = "text-align:right;padding:1px 8px"
_BAR = '<progress value="{:.4f}" max="1" style="width:240px;vertical-align:middle"></progress>'
_NUMBERS = "font-variant-numeric:tabular-nums"


class Notebook:
    """One output of a cell, with inline styles alone: no script, no widget.

    Args:
        labels: those of the evaluators, in the order of their columns.
    """

    live = True

    def __init__(self, labels: Sequence[str] = ()) -> None:
        self._display: Any = importlib.import_module("IPython.display")
        self._table = Table(labels)
        self._id: str | None = None

    @property
    def seconds(self) -> float:
        # The whole table is sent each time.
        return 0.2 + len(self._table.rows) / 500

    @deferred_signals()
    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        if snapshot.done and self._table.rows:
            values = {}  # the last row has them
        data = {"text/html": self.html(snapshot, values), "text/plain": self.text(snapshot, values)}
        if self._id is None:
            self._id = secrets.token_hex(16)
            self._display.display(data, raw=True, display_id=self._id)
        else:
            self._display.update_display(data, raw=True, display_id=self._id)

    def add(self, row: Row, values: Mapping[str, float]) -> None:
        self._table.add(row, values)  # shown with the next snapshot

    def close(self) -> None:
        pass

    def html(self, snapshot: Snapshot, values: Mapping[str, float]) -> str:
        """The table, the bar, and what was measured since the last row."""
        measured = "".join(f"<div>{_spaced('  '.join(group))}</div>" for group in snapshot.measured(values))
        inside = snapshot.inside if snapshot.epoch else None
        if inside is not None:
            place = f"{inside.label}  {batch_of(inside.batch, inside.batches)}"
            time = "" if inside.left is None or snapshot.ending else time_left(inside.left, snapshot.spent)
            measured = _bar(place, inside.fraction, percent(inside.fraction), time)
        done = 1.0 if snapshot.done and snapshot.fraction is None else snapshot.fraction
        measured += "".join(f"<div>{escape(remark)}</div>" for remark in snapshot.remarks)
        place = "  ".join(filter(None, _place(snapshot)))
        head = f"<b>{escape(snapshot.title)}</b>&ensp;"
        bar = _bar(place, done, snapshot.percent, snapshot.time, head)
        return f'<div style="{_NUMBERS}">{self._html_table()}{bar}{measured}</div>'

    def text(self, snapshot: Snapshot, values: Mapping[str, float]) -> str:
        """The screen as plain text."""
        rows = self._table.lines(_TEXT_WIDTH) if self._table.rows else []
        measured = ["  ".join(group) for group in snapshot.measured(values)]
        line = (snapshot.title, *_place(snapshot), snapshot.percent, *measured, snapshot.time)
        return "\n".join([*rows, "  ".join(filter(None, line)), *snapshot.remarks])

    def _html_table(self) -> str:
        if not self._table.rows:
            return ""
        columns, _ = self._table.columns(width=10**6)
        groups = ""
        for label, members in groupby(columns, key=lambda column: column.group):
            count = len(list(members))
            rule = ";border-bottom:1px solid" if label else ""
            groups += f'<th colspan="{count}" style="text-align:center;padding:1px 8px{rule}">{escape(label)}</th>'
        names = "".join(
            f'<th style="{_CELL}" title="{escape(column.name)}">{escape(column.title)}</th>' for column in columns
        )
        body = ""
        for index in range(len(self._table.rows)):
            cells = self._table.cells(index, columns, final=True)
            texts = (f"<b>{escape(cell.text)}</b>" if cell.best else escape(cell.text) for cell in cells)
            body += "<tr>" + "".join(f'<td style="{_CELL}">{text}</td>' for text in texts) + "</tr>"
        return f"<table><thead><tr>{groups}</tr><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _place(snapshot: Snapshot) -> Sequence[str]:
    label = snapshot.inside.label if snapshot.inside is not None and not snapshot.epoch else ""
    return label, snapshot.members, snapshot.epoch, snapshot.batch


def _bar(place: str, done: float | None, percent: str, time: str, head: str = "") -> str:
    bar = "" if done is None else _BAR.format(done) + "&ensp;"
    after = "  ".join(filter(None, (percent, time)))
    return f"<div>{head}{_spaced(place)}&ensp;{bar}{_spaced(after)}</div>"


def _spaced(text: str) -> str:
    """A text as HTML, in which its parts stay apart."""
    return escape(text).replace("  ", "&ensp;")
