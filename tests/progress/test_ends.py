"""Whatever ends a loop, an error or Ctrl-C at any moment: one bar stays, which says so, and a terminal as it was."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import signal
import sys

import pytest

import pure_loop as pl
from pure_loop.progress.display import progress
from pure_loop.progress.screens import deferred_signals
from tests.progress.terminals import DATA, VAL, E, Terminal, fit, lines_of, rows_of, shown
from tests.support.problem import cross_entropy


def left_by(how, outer):
    for event, _ in outer:
        if event is E.AFTER_LOSS and how == "error":
            raise KeyError("mine")
        if event is E.BATCH_END and how == "break":
            return
        if how == "close":
            outer.close()


def cursor_is_back(text):
    return text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_whatever_ends_the_loop_closes_the_bar_and_the_stream(terminal):
    for how in ("break", "close", "error"):
        inner, file = fit(), Terminal()
        with contextlib.suppress(KeyError):
            left_by(how, progress(inner, file=file))
        assert inner.gi_frame is None
        assert "stopped" in file.getvalue()
        assert cursor_is_back(file.getvalue())

    def stubborn():
        try:
            yield from fit()
        finally:
            raise OSError("disk full")

    outer = progress(stubborn(), file=terminal)
    next(outer)
    with pytest.raises(OSError, match="disk full"):
        outer.close()
    assert cursor_is_back(terminal.getvalue())


def test_an_error_is_named_and_passes(terminal):
    """In an evaluation it shows where, and the row of the epoch."""
    calls = itertools.count(1)

    def loss(outputs, targets):
        if next(calls) == 10:
            raise RuntimeError("broken")
        return cross_entropy(outputs, targets)

    lines = shown(fit(loss=loss, evaluators={"val": pl.Evaluator(DATA, metrics=[pl.metrics.loss()])}))
    assert [row[0] for row in rows_of(lines)] == ["1"]
    assert "failed: RuntimeError" in lines[3]
    assert re.match(r"  val  batch 3/6  ━", lines[4])
    calls, out = itertools.count(1), io.StringIO()
    with pytest.raises(RuntimeError, match="broken"):
        pl.run(progress(fit(loss=loss), file=out))
    assert re.search(r"batch +9.*failed: RuntimeError", out.getvalue())


# Ctrl-C.


def left_one_bar(text, columns):
    lines = lines_of(text, columns)
    assert sum("interrupted" in line for line in lines) == 1
    assert not any(line.endswith("left") or "^C" in line for line in lines)
    assert cursor_is_back(text)
    return lines


def test_ctrl_c_leaves_one_bar(monkeypatch, terminal):
    """At a pair: the terminal shows it, then Python raises. That at 95 is in an evaluation, whose bar is last."""
    for columns, at in ((20, 95), (40, 30), (43, 95), (80, 140)):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal = Terminal()

        def interrupted(stream, at=at, terminal=terminal):
            for index, pair in enumerate(stream):
                if index == at:
                    terminal.write("^C")
                    signal.raise_signal(signal.SIGINT)
                yield pair

        with pytest.raises(KeyboardInterrupt):
            pl.run(progress(interrupted(fit(evaluators=VAL)), file=terminal, refresh_seconds=0))
        lines = left_one_bar(terminal.getvalue(), columns)
        assert sum("%" in line and "val" not in line for line in lines) == (columns > 20)


def test_ctrl_c_in_the_middle_of_a_drawing(terminal, monkeypatch):
    """Rich would be left in the middle of a buffer: the interrupt waits until the drawing is there."""
    for point in itertools.count(1):
        writes = itertools.count(1)

        class Interrupting(Terminal):
            def write(self, text, writes=writes, point=point):
                if next(writes) == point:
                    signal.raise_signal(signal.SIGINT)
                return super().write(text)

        screen = Interrupting()
        monkeypatch.setattr(sys, "stdout", screen)
        try:
            pl.run(progress(fit(DATA[:4], max_duration="1ep"), file=screen, refresh_seconds=0))
        except KeyboardInterrupt:
            print("after")
        else:
            break
        lines = screen.lines()
        assert lines[-1] == "after", point
        assert not any(line.endswith("left") for line in lines), point
        assert cursor_is_back(screen.getvalue()), point
    assert point > 8


def test_a_second_ctrl_c_ends_a_drawing_that_does_not_end():
    """A terminal that was stopped by Ctrl-S takes no more text. Handlers are as before after a drawing."""

    def interrupt_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one acts at once")

    with pytest.raises(KeyboardInterrupt):
        deferred_signals()(interrupt_twice)()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for kind in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(kind)
        for handler in (signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None):
            signal.signal(kind, handler)
            with deferred_signals():
                assert (signal.getsignal(kind) is handler) is not callable(handler)
            assert signal.getsignal(kind) is handler
        signal.signal(kind, before)
