"""The table and the bar as a terminal shows them."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.progress.display import progress, screen_for
from pure_loop.progress.screens import deferred_signals
from pure_loop.progress.words import number
from tests.progress.terminals import DATA, Clock, E, Emulator, Terminal, Unsized, fit, followed, rows_of
from tests.support.problem import cross_entropy, points

LOADER = points(size=(4, 4, 4, 4, 4, 4, 1))
VAL = {"val": DATA}


def shown(stream, columns=80, **options):
    """The lines of a terminal after the stream ran there, or after its error."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm-256color")
        with contextlib.suppress(RuntimeError):
            pl.run(progress(stream, file=terminal, refresh_seconds=0, **options))
    return terminal.lines(columns)


def resumed(at, **options):
    kept = next(state for event, state in fit() if event is E.BATCH_END and state.timestamp >= at)
    return pl.fit(kept, DATA, **{"optimizer": pl.optim.sgd(lr=0.1), "loss": cross_entropy} | options)


# What is seen.


def drawing(columns):
    """The screen in an evaluation and at the end; a batch takes a second."""
    terminal, clock = Terminal(), Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm-256color")
        screen, during = screen_for(terminal, ("val", "test")), []
        for event, state in followed(fit(evaluators={"val": DATA, "test": DATA[:2]}), screen, clock, evaluated=0.5):
            if event is E.EVAL_BATCH_END and state.timestamp.batch == 12:
                during.append(terminal.lines(columns))
    lines = [*during[3], "", *terminal.lines(columns)[2:]]
    return [re.sub("(?<=[━╸╺])[━╸╺]+", "", re.sub(r"\d\.\d{3,4}", lambda m: "#" * len(m[0]), line)) for line in lines]


# Numbers of the run are "#", and a bar is as long as there is room.
REFERENCE = {
    20: [
        "       train ─",
        "epoch     loss  +6",
        "    1    #####",
        "100%  0:02 left",
        " 66%  0:01 left",
        "",
        "    1    #####",
        "    2    #####",
        "100%  done, 0:20",
    ],
    40: [
        "       train ─  val ────  test ───",
        "epoch     loss     loss      loss  +4",
        "    1    #####    #####*    #####*",
        "train  epoch 2/2  100%  0:02 left",
        "  val  batch 4/6   66%  0:01 left",
        "",
        "    1    #####    #####*    #####*",
        "    2    #####   ######*    #####*",
        "train  epoch 2/2  100%  done, 0:20",
    ],
    80: [
        "       train ─  val ───────────────  test ──────────────",
        "epoch     loss     loss   accuracy      loss   accuracy         lr  time",
        "    1    #####    #####*    ######*    #####*    ######*       0.1  0:10",
        "train  epoch 2/2  batch 12/12  ━  100%  0:02 left",
        "  val  batch 4/6  ━   66%  0:01 left",
        "",
        "    1    #####    #####*    ######*    #####*    ######*       0.1  0:10",
        "    2    #####   ######*    ######*    #####*    ######*       0.1  0:10",
        "train  epoch 2/2  batch 12/12  ━  4.00 samples/s  100%  done, 0:20",
    ],
}


def test_the_reference():
    assert {columns: drawing(columns) for columns in REFERENCE} == REFERENCE


@settings(max_examples=8)
@given(st.integers(20, 300))
@example(57)
def test_no_line_fills_the_width_and_no_number_is_cut(columns):
    evaluators = {"val": DATA, "a_label_that_is_far_too_long_for_a_terminal": DATA[:2]}
    lines = shown(fit(evaluators=evaluators), columns, description="pretraining of a model of models")
    assert max(map(len, lines)) < columns
    assert len(lines[-1]) <= columns - 4
    assert re.search(r"100%  done, 0:\d\d$", lines[-1])
    assert [row[0] for row in rows_of(lines)] == ["1", "2"]
    for row in rows_of(lines):
        assert all(re.fullmatch(r"\d\.\d{3,6}\*?|0\.1|0:\d\d|\d", cell) for cell in row)


# The table.


def test_a_row_an_epoch_with_the_numbers_of_the_states():
    lr = pl.schedules.linear(0.1, 0.0, "3ep")
    options = {"max_duration": "3ep", "evaluators": VAL, "optimizer": pl.optim.sgd(lr=lr)}
    epochs, losses, samples = [], [], []
    for event, state in fit(LOADER, **options):
        if event is E.BATCH_END:
            samples.append(state.timestamp.sample - state.previous_timestamp.sample)
            losses.append(float(state.loss) * samples[-1])
            rate = lr(state.previous_timestamp)
        if event is E.EPOCH_CHECKPOINT:
            val = state.metrics["val"]
            cells = [number(sum(losses) / sum(samples)), *(number(float(val[name])) for name in ("loss", "accuracy"))]
            epochs.append([str(state.timestamp.epoch), *cells, f"{rate:.3g}"])
            losses.clear()
            samples.clear()
    lines = shown(fit(LOADER, **options))
    assert [[cell.rstrip("*") for cell in row[:-1]] for row in rows_of(lines)] == epochs
    assert all(re.fullmatch(r"0:\d\d", row[-1]) for row in rows_of(lines))
    assert lines[5].startswith("train  epoch 3/3  batch 21/21  ━")
    assert len(lines) == 6


def test_which_rows_there_are():
    """By the duration and the interval of the evaluations: epoch, batch where it isn't in epochs, and all cells."""
    evaluated = {
        ("8ba", "3ba"): "1 3:7  1 6:7  2 8:7",
        ("8ba", "1ep"): "1 6:7  2 8:7",
        ("9ba", "6ba"): "1 6:7  2 9:7",
        ("6ba", "2ba"): "1 2:7  1 4:7  1 6:7",
    }
    for (end, interval), wanted in evaluated.items():
        for data in (DATA, Unsized()) if interval == "3ba" else (DATA,):
            rows = rows_of(shown(fit(data, evaluators=VAL, max_duration=end, eval_interval=interval)))
            assert "  ".join(f"{row[0]} {row[1]}:{len(row)}" for row in rows) == wanted
    for stream, wanted in (
        (fit(evaluators=VAL, max_duration="3ep", eval_interval="2ep"), "1:4 2:6 3:6"),
        (fit(evaluators=VAL, order="2021"), "1:6 2:6"),
        (fit(max_duration="8ba"), "1:5 2:5"),  # an epoch that is cut short
        (resumed("9ba", max_duration="3ep"), "2:4 3:4"),
        (pl.fit(pl.run(fit()), DATA, optimizer=pl.optim.sgd(lr=0.1), loss=cross_entropy, max_duration="2ep"), ""),
        ((pair for pair in fit(evaluators=VAL)), "1:5 2:5"),  # whose learning rate is not known
        (fit(watch=["batch_end"], evaluators=VAL), ""),
        (fit(watch=["epoch_end"], evaluators=VAL), "1:3 2:3"),
        (fit(watch=["epoch_end", "eval_end"], evaluators=VAL), "1:5 2:5"),
        (fit(watch=["epoch_checkpoint"], evaluators=VAL), "1:5 2:5"),
    ):
        lines = shown(stream)
        assert " ".join(f"{row[0]}:{len(row)}" for row in rows_of(lines)) == wanted
        assert any("done" in line and " 0%" not in line for line in lines[-2:])


def test_the_learning_rate_of_each_part_and_what_scales_it():
    parts = pl.optim.partition({"weight": pl.optim.sgd(lr=0.5), "bias": pl.optim.sgd(lr=0.25)}, lambda n, _: n[2:])
    lines = shown(fit(optimizer=parts, train_metrics=[pl.metrics.accuracy()]))
    assert lines[1].split() == ["epoch", "loss", "accuracy", "lr:weight", "lr:bias", "time"]
    assert rows_of(lines)[0][3:5] == ["0.5", "0.25"]
    state = next(s for event, s in fit() if event is E.EPOCH_END).replace(lr_scale=torch.tensor(0.5))
    lines = shown(pl.fit(state, DATA, optimizer=pl.optim.sgd(lr=0.5), loss=cross_entropy, max_duration="2ep"))
    assert rows_of(lines)[0][2] == "0.25"


def test_a_loss_that_is_nan_and_skipped_is_not_in_the_mean():
    calls = itertools.count(1)
    loss = lambda outputs, targets: cross_entropy(outputs, targets) * (float("nan") if next(calls) == 3 else 1.0)  # noqa: E731
    rows = rows_of(shown(fit(loss=loss, nonfinite="skip")))
    assert [bool(re.fullmatch(r"\d\.\d{3,4}", row[1])) for row in rows] == [True, True]


# What else is written.


def test_what_the_body_prints_is_between_the_rows_that_come_at_once(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    stream = fit(evaluators=VAL, max_duration="12ba", eval_interval="4ba")
    for event, state in progress(stream, file=terminal, refresh_seconds=0):
        if event is E.BATCH_CHECKPOINT and state.timestamp.batch == 4:
            assert [row[:2] for row in rows_of(terminal.lines())] == [["1", "4"]]
        if event is E.EPOCH_CHECKPOINT:
            print("body", state.timestamp.epoch)
    assert [line.split()[0] for line in terminal.lines()[2:7]] == ["1", "1", "body", "2", "2"]


def test_what_goes_to_a_pipe_stays_there_and_a_bar_in_a_bar_prints_lines_above_it(terminal, monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", terminal)
    for event, state in progress(fit(), refresh_seconds=0):
        if event is E.EPOCH_END:
            print("a result")
            pl.run(progress(pl.evaluate(state, {"inner": DATA}, loss=cross_entropy), description="nested"))
    assert pipe.getvalue() == "a result\n" * 2
    assert "a result" not in terminal.getvalue()
    assert "nested  batch 6/6  inner: loss" in "\n".join(terminal.lines())
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


def test_it_refers_to_no_state(terminal):
    before = lambda: None  # noqa: E731
    for event, state in progress(fit(evaluators=VAL), file=terminal, refresh_seconds=0):
        if event in (E.BATCH_START, E.BATCH_END):
            assert before() is None  # so the step may write to its memory
            before = weakref.ref(state)


def test_a_terminal_of_ascii_gets_ascii(monkeypatch):
    monkeypatch.setattr(Terminal, "encoding", "ascii", raising=False)
    terminal = Terminal()
    pl.run(progress(fit(evaluators={"a_label_that_is_far_too_long": DATA}), file=terminal, refresh_seconds=0))
    assert terminal.getvalue().isascii()
    assert "a_label_~too_long" in terminal.getvalue()


# The end.


def test_an_error_in_an_evaluation_shows_where_and_the_row_of_the_epoch():
    calls = itertools.count(1)

    def loss(outputs, targets):
        if next(calls) == 10:
            raise RuntimeError("broken")
        return cross_entropy(outputs, targets)

    lines = shown(fit(loss=loss, evaluators={"val": pl.Evaluator(DATA, metrics=[pl.metrics.loss()])}))
    assert [row[0] for row in rows_of(lines)] == ["1"]
    assert "failed: RuntimeError" in lines[3]
    assert re.match(r"  val  batch 3/6  ━", lines[4])


def left_one_bar(text, columns):
    lines = Emulator(columns).feed(text).lines
    assert sum("interrupted" in line for line in lines) == 1
    assert not any(line.endswith("left") or "^C" in line for line in lines)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    return lines


@pytest.mark.parametrize(("columns", "at"), [(20, 95), (40, 30), (43, 95), (80, 140)])
def test_ctrl_c_leaves_one_bar(columns, at, terminal, monkeypatch):
    """At a pair: the terminal shows it, then Python raises. That at 95 is in an evaluation, whose bar is last."""
    monkeypatch.setenv("COLUMNS", str(columns))

    def interrupted(stream):
        for index, pair in enumerate(stream):
            if index == at:
                terminal.write("^C")
                signal.raise_signal(signal.SIGINT)
            yield pair

    with pytest.raises(KeyboardInterrupt):
        pl.run(progress(interrupted(fit(evaluators=VAL)), file=terminal, refresh_seconds=0))
    lines = left_one_bar(terminal.getvalue(), columns)
    assert sum("%" in line and "val" not in line for line in lines) == (columns > 20)


def test_ctrl_c_in_the_middle_of_a_drawing(monkeypatch):
    """Rich would be left in the middle of a buffer: the interrupt waits until the drawing is there."""
    for point in itertools.count(1):
        writes = itertools.count(1)

        class Interrupting(Terminal):
            def write(self, text, writes=writes, point=point):
                if next(writes) == point:
                    signal.raise_signal(signal.SIGINT)
                return super().write(text)

        terminal = Interrupting()
        monkeypatch.setattr(sys, "stdout", terminal)
        try:
            pl.run(progress(fit(max_duration="1ep"), file=terminal, refresh_seconds=0))
        except KeyboardInterrupt:
            print("after")
        else:
            break
        lines = terminal.lines()
        assert lines[-1] == "after", point
        assert not any(line.endswith("left") for line in lines), point
        assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1, point
    assert point > 10


def test_a_second_ctrl_c_ends_a_drawing_that_does_not_end():
    """A terminal that was stopped by Ctrl-S takes no more text."""

    def interrupt_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one acts at once")

    with pytest.raises(KeyboardInterrupt):
        deferred_signals()(interrupt_twice)()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_are_as_before_after_a_drawing():
    for kind in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(kind)
        for handler in (signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None):
            signal.signal(kind, handler)
            with deferred_signals():
                assert (signal.getsignal(kind) is handler) is not callable(handler)
            assert signal.getsignal(kind) is handler
        signal.signal(kind, before)


def test_a_drawing_in_another_thread(terminal):
    """Where Python has no signals."""
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: pl.run(progress(fit(), file=terminal, refresh_seconds=0))).result()
    assert "done" in terminal.getvalue()


PROGRAM = """
import time, torch, pure_loop as pl

class Slow:
    def __len__(self):
        return 8
    def __iter__(self):
        for _ in range(8):
            time.sleep(0.05)
            yield torch.ones(4, 3), torch.ones(4, 1)

stream = pl.fit(torch.nn.Linear(3, 1), Slow(), loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.01),
                max_duration="500ep", evaluators={"val": Slow()})
try:
    pl.run(pl.progress(stream))
except KeyboardInterrupt:
    print("after")
"""


def typed(key, when, columns):
    """What a process writes to its terminal; the key is typed once it has written this."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env={**os.environ, "COLUMNS": str(columns)},
        # Its controlling terminal, which turns the key into a signal.
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(theirs)
    written, end = b"", time.monotonic() + 120
    with contextlib.suppress(OSError):  # the process has closed it
        while time.monotonic() < end and (data := os.read(ours, 65536)):
            written += data
            if key and when in written:
                os.write(ours, key)
                key = b""
    process.kill()
    process.wait()
    os.close(ours)
    return written.decode()


@pytest.mark.slow  # a process in a pseudo-terminal, in which Ctrl-C is typed
@pytest.mark.parametrize(("columns", "when"), [(40, b"epoch 2"), (80, b"batch 3/8")])
def test_ctrl_c_in_a_real_terminal(columns, when):
    assert left_one_bar(typed(b"\x03", when, columns), columns)[-1] == "after"
