"""A terminal that is a text, what a person sees in it, a screen that keeps what it is shown, and a clock."""

from __future__ import annotations

import io
import re

import pure_loop as pl
from pure_loop.progress.display import _pass_on
from pure_loop.progress.estimate import Facts
from pure_loop.progress.tracker import Tracker
from tests.support import problem

E = pl.Event
DATA = problem.points(6)
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
        """What is seen: the rows, without empty ones at the end."""
        return Emulator(columns).feed(self.getvalue()).lines


class Emulator:
    """Wraps as xterm does: the character after a full row goes to the next row."""

    def __init__(self, columns):
        self.columns = columns
        self.rows = [[]]
        self.row = self.column = 0

    def feed(self, text):
        for parameters, command, control, character in _TOKEN.findall(text):
            if character:
                self._put(character)
            elif control == "\n":
                self._next_row()
            elif control:
                self.column = 0 if control == "\r" else max(self.column - 1, 0)
            else:
                self._command(command, parameters)
        return self

    @property
    def lines(self):
        return "\n".join("".join(row).rstrip() for row in self.rows).rstrip("\n").split("\n")

    def _put(self, character):
        if self.column == self.columns:
            self._next_row()
        row = self.rows[self.row]
        row.extend(" " * (self.column + 1 - len(row)))
        row[self.column] = character
        self.column += 1

    def _next_row(self):
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append([])

    def _command(self, command, parameters):
        if command == "A":
            self.row = max(self.row - (int(parameters) if parameters.isdigit() else 1), 0)
        elif command == "K":
            del self.rows[self.row][0 if parameters == "2" else self.column :]
        elif command not in ("m", "h", "l"):  # colors, and the cursor's visibility
            raise NotImplementedError(f"ESC [ {parameters} {command}")


def rows_of(lines):
    """The cells of each row of the table."""
    return [line.split() for line in lines if re.match(r" +\d+ ", line)]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Recording:
    """A screen that keeps what it is shown."""

    def __init__(self, live=True, seconds=0.0):
        self.live, self.seconds = live, seconds
        self.shown, self.rows = [], []

    def show(self, snapshot, values):
        self.shown.append((snapshot, values))

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
