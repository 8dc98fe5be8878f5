"""A terminal that is a text, what a person sees in it, a screen that keeps what it is shown, and a clock."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

import pure_loop as pl
from pure_loop.progress.display import _pass_on, progress
from pure_loop.progress.estimate import Facts
from pure_loop.progress.tracker import Tracker
from tests.support import problem

E = pl.Event
DATA = problem.points(6)
VAL = {"val": DATA}
_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|([\r\n\b])|([^\x1b\r\n\b])")


def fit(data=DATA, **options):
    return problem.fit(data=data, **{"strict": False, **options})


class Unsized:
    """Data whose length isn't known."""

    def __init__(self, data=DATA):
        self.data = data

    def __iter__(self):
        return iter(self.data)


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def lines(self, columns=80):
        return lines_of(self.getvalue(), columns)


def lines_of(text, columns):
    """What is seen of it: the rows, without empty ones at the end. Wraps as xterm does, after a full row."""
    rows, row, column = [[]], 0, 0
    for parameters, command, control, character in _TOKEN.findall(text):
        if control == "\n" or (character and column == columns):
            row, column = row + 1, 0
            rows += [[]] * (row == len(rows))
            rows[row] = [*rows[row]]
        if character:
            rows[row].extend(" " * (column + 1 - len(rows[row])))
            rows[row][column] = character
            column += 1
        elif control:
            column = max(column - 1, 0) if control == "\b" else 0
        elif command == "A":
            row = max(row - (int(parameters) if parameters.isdigit() else 1), 0)
        elif command == "K":
            del rows[row][0 if parameters == "2" else column :]
        elif command not in ("m", "h", "l", ""):  # colors, and the cursor's visibility
            raise NotImplementedError(f"ESC [ {parameters} {command}")
    return "\n".join("".join(each).rstrip() for each in rows).rstrip("\n").split("\n")


def shown(stream, columns=80, **options):
    """The lines of a terminal after the stream ran there, or after its error."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm-256color")
        with contextlib.suppress(RuntimeError):
            pl.run(progress(stream, file=terminal, refresh_seconds=0, **options))
    return terminal.lines(columns)


def rows_of(lines):
    """The cells of each row of the table."""
    return [line.split() for line in lines if re.match(r" +\d+ ", line)]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Recording:
    """A screen that keeps what it is shown, and the time at which it is."""

    def __init__(self, live=True, seconds=0.0, clock=None):
        self.live, self.seconds, self.clock = live, seconds, clock or Clock()
        self.shown, self.rows, self.times = [], [], []

    def show(self, snapshot, values):
        self.shown.append((snapshot, values))
        self.times.append((self.clock.now, snapshot))

    def add(self, row, values):
        self.rows.append((row, values))

    def close(self):
        pass


def followed(stream, screen, clock, *, batch=1.0, evaluated=0.0, refresh=0.0, facts=None):
    """The pairs, shown on a screen; a batch of training and one of an evaluation take so many seconds."""
    facts = Facts.of(stream) if facts is None else facts
    for event, state in _pass_on(stream, Tracker(screen, None, refresh, clock, facts)):
        clock.now += {E.BATCH_START: batch, E.EVAL_BATCH_START: evaluated}.get(event, 0.0)
        yield event, state
