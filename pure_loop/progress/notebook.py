"""The table and the bar in a notebook: HTML, which is replaced in place and stays in the file."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from pure_loop.progress.screens import Snapshot, batch_of, deferred_signals, percent, time_left
from pure_loop.progress.table import Row, Table

__all__ = ["Notebook"]

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
        if snapshot.ending == "done" and self._table.rows:
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
        done = 1.0 if snapshot.ending == "done" and snapshot.fraction is None else snapshot.fraction
        place = "  ".join(filter(None, _place(snapshot)))
        head = f"<b>{escape(snapshot.title)}</b>&ensp;"
        bar = _bar(place, done, snapshot.percent, snapshot.time, head)
        return f'<div style="{_NUMBERS}">{self._html_table()}{bar}{measured}</div>'

    def text(self, snapshot: Snapshot, values: Mapping[str, float]) -> str:
        """The same as plain text."""
        rows = self._table.lines(_TEXT_WIDTH) if self._table.rows else []
        measured = ["  ".join(group) for group in snapshot.measured(values)]
        line = (snapshot.title, *_place(snapshot), snapshot.percent, *measured, snapshot.time)
        return "\n".join([*rows, "  ".join(filter(None, line))])

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
    return label, snapshot.epoch, snapshot.batch


def _bar(place: str, done: float | None, percent: str, time: str, head: str = "") -> str:
    bar = "" if done is None else _BAR.format(done) + "&ensp;"
    after = "  ".join(filter(None, (percent, time)))
    return f"<div>{head}{_spaced(place)}&ensp;{bar}{_spaced(after)}</div>"


def _spaced(text: str) -> str:
    """A text whose parts stay apart in HTML."""
    return escape(text).replace("  ", "&ensp;")
