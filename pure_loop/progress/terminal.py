"""The table and the bar in a terminal: rows stay, the bar below them is redrawn in place by rich."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from pure_loop.progress import words as _words
from pure_loop.progress.estimate import Inside
from pure_loop.progress.screens import (
    Part,
    Snapshot,
    batch_of,
    deferred_signals,
    percent,
    side_by_side,
    that_fit,
    time_left,
    width_of,
)
from pure_loop.progress.table import Column, Row, Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_NARROWEST_BAR = 8
# At the right of the bar. A terminal shows "^C" where the cursor is, behind the last line; if that wrapped, the next
# drawing would begin a line too low and leave the first line of this one behind.
_MARGIN = 4
_INDENT = 2


class Bar:
    """A table of epochs, and a bar below it, without a thread of its own.

    Args:
        console: of rich.
        labels: those of the evaluators, in the order of their columns.
    """

    live = True
    seconds = 0.0

    def __init__(self, console: Console, labels: Sequence[str] = ()) -> None:
        self._console = console
        self._table = Table(labels)
        self._printed: list[Column] = []
        # What is printed while the bar is there goes above it; what goes to a pipe must not come here.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=bool(sys.stdout.isatty()))
        self._started = False

    @deferred_signals()
    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        self._start()
        self._live.update(self._draw(snapshot, values), refresh=True)

    @deferred_signals()
    def add(self, row: Row, values: Mapping[str, float]) -> None:
        self._start()
        self._table.add(row, values)
        # Not the last column of the terminal: some wrap there.
        columns, dropped = self._table.columns(self._console.width - 1)
        lines = []
        if columns != self._printed:
            self._printed = columns
            lines = self._head(columns, dropped)
        cells = self._table.cells(len(self._table.rows) - 1, columns)
        text = Text()
        for index, (cell, column) in enumerate(zip(cells, columns, strict=True)):
            text.append("  " * (index > 0) + cell.text.rjust(column.width), "green" if cell.best else "")
        text.rstrip()
        for item in [*lines, text]:
            self._console.print(item, no_wrap=True, overflow="crop")

    @deferred_signals()
    def close(self) -> None:
        self._live.stop()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._live.start()

    def _head(self, columns: Sequence[Column], dropped: int) -> list[Text]:
        ascii_only = self._console.options.ascii_only
        groups, names = self._table.head(columns, rule="-" if ascii_only else "─")
        more = f"  +{dropped}" if dropped else ""  # how many columns there would be in a wider terminal
        if len(names) + len(more) < self._console.width:
            names += more
        return [Text(self._plain(groups), "dim"), Text(self._plain(names), "bold")]

    def _draw(self, snapshot: Snapshot, values: Mapping[str, float]) -> RenderableType:
        width = self._console.width - _MARGIN
        title = _words.cut(snapshot.title, max(width // 4, 10))
        failed = bool(snapshot.ending) and not snapshot.done
        time = next((text for text in snapshot.times if len(text) <= width), "")
        done = float(snapshot.done) if snapshot.fraction is None else snapshot.fraction
        place = snapshot.inside.label if snapshot.inside is not None and not snapshot.epoch else ""
        head = [
            Part(title, 3, "bold"),
            Part(_words.cut(place, max(width // 3, 8)), 5),
            Part(snapshot.members, 7),
            Part(snapshot.epoch, 2),
            Part(snapshot.batch, 4),
        ]
        finished = snapshot.done and bool(self._table.rows)
        tail = [
            Part(snapshot.rate if finished else "", 6),
            Part(snapshot.percent.rjust(4) if snapshot.percent else "", 1),
            Part(time, 0, "red" if failed else "cyan"),
        ]
        pulse = snapshot.fraction is None and not snapshot.ending
        lines = [self._line(head, tail, None if pulse else done, width, "red" if failed else "cyan")]
        if snapshot.inside is not None and snapshot.epoch:
            lines.append(self._evaluation(snapshot.inside, snapshot, width))
        elif not finished:  # or else the last row has it
            measured = side_by_side(snapshot.measured(values, max(width // 4, 6)), width - _INDENT)
            lines += [Text(self._plain(" " * _INDENT + line)) for line in measured]
        return Group(*lines, *(Text(self._plain(" " * _INDENT + remark)) for remark in snapshot.remarks))

    def _evaluation(self, inside: Inside, snapshot: Snapshot, width: int) -> RenderableType:
        label = " " * _INDENT + _words.cut(inside.label, max(width // 3, 8))
        head = [Part(label, 2), Part(batch_of(inside.batch, inside.batches), 3)]
        time = "" if inside.left is None or snapshot.ending else time_left(inside.left, snapshot.spent)
        tail = [Part(percent(inside.fraction).rjust(4) if inside.batches else "", 0), Part(time, 1, "cyan")]
        done = 0.0 if snapshot.ending and inside.fraction is None else inside.fraction
        return self._line(head, tail, done, width, "blue")

    def _line(
        self, head: Sequence[Part], tail: Sequence[Part], done: float | None, width: int, color: str
    ) -> RenderableType:
        """A line: parts, a bar where there is room for one, parts."""
        fitting = that_fit([*head, *tail], width)
        before, after = ([part for part in parts if part in fitting] for parts in (head, tail))
        row: list[RenderableType] = [Text(self._plain(part.text), part.style) for part in before]
        space = width - width_of(fitting) - 2
        if space >= _NARROWEST_BAR:
            pulse = done is None
            bar = ProgressBar(total=1.0, completed=done or 0.0, width=space, pulse=pulse, complete_style=color)
            row.append(bar)
        row += [Text(part.text, part.style) for part in after]
        grid = Grid.grid(padding=(0, 2))
        for _ in row:
            grid.add_column(no_wrap=True)
        grid.add_row(*row)
        return grid

    def _plain(self, text: str) -> str:
        return text.replace("…", "~") if self._console.options.ascii_only else text
