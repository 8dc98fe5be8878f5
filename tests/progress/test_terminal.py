"""The table and the bar as a terminal shows them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import signal
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.progress.display import progress
from pure_loop.progress.screens import deferred_signals
from pure_loop.progress.words import number
from tests.progress.conftest import Terminal
from tests.progress.emulator import Emulator
from tests.progress.test_progress import DATA, fit

E = pl.Event
LOADER = [(x, y) for x, y in DATA] + [(DATA[0][0][:1], DATA[0][1][:1])]


def shown(stream, columns=80, **options):
    """The lines of a terminal after the stream ran there, or after its error."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm-256color")
        with contextlib.suppress(RuntimeError):
            pl.run(progress(stream, file=terminal, refresh_seconds=0, **options))
    return Emulator(columns).feed(terminal.getvalue()).lines


def rows_of(lines):
    """The cells of each row."""
    return [line.split() for line in lines if re.match(r" +\d+ ", line)]


def interrupted(stream, at, terminal):
    """Ctrl-C at a pair: the terminal shows it, then Python raises."""
    for pair, index in zip(stream, itertools.count(), strict=False):
        if index == at:
            terminal.write("^C")
            signal.raise_signal(signal.SIGINT)
        yield pair


pytestmark = pytest.mark.usefixtures("terminal")


# The table.


def test_a_row_an_epoch_with_the_numbers_of_the_states():
    lr = pl.schedules.linear(0.1, 0.0, "3ep")
    options = {"max_duration": "3ep", "evaluators": {"val": DATA}, "optimizer": pl.optim.sgd(lr=lr)}
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
    assert lines[1].split() == ["epoch", "loss", "loss", "accuracy", "lr", "time"]
    assert lines[0].split() == ["train", "─", "val", "─" * 15]
    assert [[cell.rstrip("*") for cell in row[:-1]] for row in rows_of(lines)] == epochs
    assert all(re.fullmatch(r"0:\d\d", row[-1]) for row in rows_of(lines))
    assert lines[5].startswith("train  epoch 3/3  batch 21/21  ━")
    assert re.search(r"  100%  done, 0:\d\d$", lines[5])
    assert len(lines) == 6


def test_training_metrics_and_three_evaluators():
    evaluators = {"val": DATA, "test": DATA[:2], "far": DATA[2:4]}
    lines = shown(fit(evaluators=evaluators, train_metrics=[pl.metrics.accuracy()]), columns=120)
    assert lines[0].split() == ["train", "─" * 11, "val", "─" * 15, "test", "─" * 14, "far", "─" * 15]
    assert lines[1].split() == ["epoch", *["loss", "accuracy"] * 4, "lr", "time"]
    assert [len(row) for row in rows_of(lines)] == [11, 11]


@pytest.mark.parametrize("columns", [20, 40, 57, 80, 120])
def test_no_line_fills_the_width_and_no_number_is_cut(columns):
    evaluators = {"val": DATA, "a_label_that_is_far_too_long_for_a_terminal": DATA[:2]}
    lines = shown(fit(evaluators=evaluators), columns, description="pretraining of a model of models")
    assert max(map(len, lines)) < columns
    assert len(lines[-1]) <= columns - 4
    assert re.search(r"100%  done, 0:\d\d$", lines[-1])
    assert [row[0] for row in rows_of(lines)] == ["1", "2"]
    for row in rows_of(lines):
        assert all(re.fullmatch(r"\d\.\d{4,6}\*?|0\.1|0:\d\d|\d", cell) for cell in row)


def test_40_columns_say_how_many_columns_are_left_out():
    lines = shown(fit(evaluators={"val": DATA}), 40)
    assert lines[1].split() == ["epoch", "loss", "loss", "accuracy", "+2"]


def test_evaluations_of_the_end_are_in_the_last_row():
    for options, found in (
        ({"max_duration": "3ep", "eval_interval": "2ep"}, [["1"], ["2"], ["3"]]),
        ({"max_duration": "8ba", "eval_interval": "3ba"}, [["1", "3"], ["1", "6"], ["2", "8"]]),
        ({"max_duration": "8ba", "eval_interval": "1ep"}, [["1", "6"], ["2", "8"]]),
        ({"max_duration": "9ba", "eval_interval": "6ba"}, [["1", "6"], ["2", "9"]]),
        ({"max_duration": "6ba", "eval_interval": "2ba"}, [["1", "2"], ["1", "4"], ["1", "6"]]),
    ):
        rows = rows_of(shown(fit(evaluators={"val": DATA}, **options)))
        assert [row[: len(found[0])] for row in rows] == found
        evaluated = [len(row) == len(found[0]) + 5 for row in rows]
        assert evaluated == ([False, True, True] if options["eval_interval"] == "2ep" else [True] * len(rows))


def test_a_row_is_there_before_the_next_batch(terminal):
    stream = fit(evaluators={"val": DATA}, max_duration="12ba", eval_interval="4ba")
    for event, state in progress(stream, file=terminal, refresh_seconds=0):
        if event is E.BATCH_CHECKPOINT and state.timestamp.batch == 4:
            assert [row[:2] for row in rows_of(Emulator(80).feed(terminal.getvalue()).lines)] == [["1", "4"]]


def test_an_evaluation_at_the_end_of_an_epoch_of_unknown_length_has_one_row():
    class Unsized:
        def __iter__(self):
            return iter(DATA)

    options = {"max_duration": "9ba", "eval_interval": "3ba", "evaluators": {"val": DATA}}
    rows = rows_of(shown(fit(Unsized(), **options)))
    assert [(*row[:2], len(row)) for row in rows] == [("1", "3", 7), ("1", "6", 7), ("2", "9", 7)]


def test_in_the_order_of_2021_evaluations_are_in_the_row_of_their_epoch():
    rows = rows_of(shown(fit(evaluators={"val": DATA}, order="2021")))
    assert [(row[0], len(row)) for row in rows] == [("1", 6), ("2", 6)]


def test_an_epoch_that_is_cut_short_has_a_row():
    assert [row[:2] for row in rows_of(shown(fit(max_duration="8ba")))] == [["1", "6"], ["2", "8"]]


def test_a_resumed_run_shows_what_is_left():
    kept = next(state for event, state in fit() if event is E.BATCH_END and state.timestamp >= "9ba")
    lines = shown(pl.fit(kept, DATA, optimizer=pl.optim.sgd(lr=0.1), loss=cross_entropy, max_duration="3ep"))
    assert [row[0] for row in rows_of(lines)] == ["2", "3"]


def test_a_run_that_is_over_has_no_row():
    kept = pl.run(fit())
    lines = shown(pl.fit(kept, DATA, optimizer=pl.optim.sgd(lr=0.1), loss=cross_entropy, max_duration="2ep"))
    assert rows_of(lines) == []
    assert "done" in lines[-1]


def test_a_loss_that_is_nan_and_left_out():
    calls = itertools.count(1)
    loss = lambda outputs, targets: cross_entropy(outputs, targets) * (float("nan") if next(calls) == 3 else 1.0)  # noqa: E731
    rows = rows_of(shown(fit(loss=loss, nonfinite="skip")))
    assert [bool(re.fullmatch(r"0\.\d{4}", row[1])) for row in rows] == [True, True]


def test_any_stream_of_pairs_has_a_table():
    rows = rows_of(shown(pair for pair in fit(evaluators={"val": DATA})))
    assert [len(row) for row in rows] == [5, 5]  # the learning rate is not known


@pytest.mark.parametrize("watch", [["batch_end"], ["epoch_end"], ["batch_end", "eval_end"], ["epoch_end", "eval_end"]])
def test_of_a_stream_that_yields_some_events_there_are_rows(watch):
    rows = rows_of(shown(fit(watch=watch, evaluators={"val": DATA})))
    assert [row[0] for row in rows] == ([] if watch == ["batch_end"] or "epoch_end" not in watch else ["1", "2"])


def test_parts_of_an_optimizer_have_their_learning_rates():
    parts = pl.optim.partition({"weight": pl.optim.sgd(lr=0.5), "bias": pl.optim.sgd(lr=0.25)}, lambda name, _: name)
    lines = shown(fit(optimizer=parts))
    assert lines[1].split() == ["epoch", "loss", "lr:weight", "lr:bias", "time"]
    assert rows_of(lines)[0][2:4] == ["0.5", "0.25"]


def test_the_learning_rate_is_that_of_the_step():
    state = next(s for event, s in fit() if event is E.EPOCH_END).replace(lr_scale=torch.tensor(0.5))
    lines = shown(pl.fit(state, DATA, optimizer=pl.optim.sgd(lr=0.5), loss=cross_entropy, max_duration="2ep"))
    assert rows_of(lines)[0][2] == "0.25"


def test_what_the_body_prints_is_between_the_rows(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    for event, state in progress(fit(evaluators={"val": DATA}), file=terminal, refresh_seconds=0):
        if event is E.EPOCH_CHECKPOINT:
            print("body", state.timestamp.epoch)
    lines = Emulator(80).feed(terminal.getvalue()).lines
    assert [line.split()[0] for line in lines[2:6]] == ["1", "body", "2", "body"]
    assert "done" in lines[6]


def test_an_evaluation_has_a_bar_of_its_own(terminal):
    seen = set()
    for event, _ in progress(fit(evaluators={"val": DATA}), file=terminal, refresh_seconds=0):
        if event is E.EVAL_BATCH_END:
            seen.add(re.sub("[━╸╺]+", "=", Emulator(80).feed(terminal.getvalue()).lines[-1]))
    assert any(re.fullmatch(r"  val  batch 3/6  =   50%  0:\d\d left", line) for line in seen)


def test_it_refers_to_no_state(terminal):
    before = lambda: None  # noqa: E731
    for event, state in progress(fit(evaluators={"val": DATA}), file=terminal, refresh_seconds=0):
        if event in (E.BATCH_START, E.BATCH_END):
            assert before() is None  # so the step may write to its memory
            before = weakref.ref(state)


# The end.


@pytest.mark.parametrize("columns", [20, 40, 43, 80])
@pytest.mark.parametrize("at", [30, 95, 140])  # 95 is in an evaluation, whose bar is the last line
def test_ctrl_c_leaves_one_bar(columns, at, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(KeyboardInterrupt):
        pl.run(progress(interrupted(fit(evaluators={"val": DATA}), at, terminal), file=terminal, refresh_seconds=0))
    lines = Emulator(columns).feed(terminal.getvalue()).lines
    assert not any(line.endswith("left") for line in lines)
    assert sum("%" in line and "val" not in line for line in lines) == (columns > 20)
    assert sum("interrupted" in line for line in lines) == 1
    assert not any("^C" in line for line in lines)


def interrupted_inside(monkeypatch, functions, point=0):
    """The terminal, where Ctrl-C falls on a call of a drawing or its return; and how many of those there are.

    Args:
        functions: the pattern of those that count.
    """
    terminal, points = Terminal(), itertools.count(1)
    monkeypatch.setattr(sys, "stdout", terminal)
    drawn = re.compile(r"\b(rich|progress)\b.*\.py$")

    def trace(frame, event, _):
        if not drawn.search(frame.f_code.co_filename):
            return None
        # An exception where a generator yields would pass its handlers by, as no signal does.
        yields = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        counts = event in ("call", "return") and not yields and re.search(functions, frame.f_code.co_name)
        if counts and next(points) == point:
            signal.raise_signal(signal.SIGINT)
        return trace

    def traced(stream):
        for event, state in stream:
            yield event, state
            if event is E.BATCH_END:
                sys.settrace(trace if state.timestamp.batch == 2 else before)

    before = sys.gettrace()
    try:
        pl.run(progress(traced(fit(max_duration="1ep")), file=terminal, refresh_seconds=0))
        print("the end")
    except KeyboardInterrupt:
        sys.settrace(before)
        print("after")
    finally:
        sys.settrace(before)
    return terminal, next(points) - 1


@pytest.mark.parametrize(("functions", "step"), [("_buffer$|^loop_", 3), pytest.param("", 7, marks=pytest.mark.slow)])
def test_ctrl_c_in_the_middle_of_a_drawing(functions, step, monkeypatch):
    """Rich would be left in the middle of a buffer, or the exception be ignored in a generator that is closed."""
    terminal, points = interrupted_inside(monkeypatch, functions)
    assert terminal.getvalue().endswith("the end\n")
    assert points > 50
    for point in range(1, points, step):
        terminal, reached = interrupted_inside(monkeypatch, functions, point)
        if reached < point:
            break  # a rate of fewer digits, say, takes fewer calls
        lines = Emulator(80).feed(terminal.getvalue()).lines
        assert lines[-1] == "after", point
        assert sum("interrupted" in line for line in lines) == 1, point
        assert not any(line.endswith("left") for line in lines), point
        assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1, point


def test_a_second_ctrl_c_ends_a_drawing_that_does_not_end():
    """A terminal that was stopped by Ctrl-S takes no more text."""

    def interrupt_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one acts at once")

    with pytest.raises(KeyboardInterrupt):
        deferred_signals()(interrupt_twice)()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None])
def test_handlers_are_as_before_after_a_drawing(number, handler):
    before = signal.signal(number, handler)
    try:
        with deferred_signals():
            assert (signal.getsignal(number) is handler) is not callable(handler)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_drawing_in_another_thread(terminal):
    """Where Python has no signals."""
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: pl.run(progress(fit(), file=terminal, refresh_seconds=0))).result()
    assert "done" in terminal.getvalue()


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


def test_a_terminal_of_ascii_gets_ascii(monkeypatch):
    monkeypatch.setattr(Terminal, "encoding", "ascii", raising=False)
    terminal = Terminal()
    evaluators = {"a_label_that_is_far_too_long": DATA}
    pl.run(progress(fit(evaluators=evaluators), file=terminal, refresh_seconds=0))
    assert terminal.getvalue().isascii()
    assert "a_label_~too_long" in terminal.getvalue()


def test_where_the_ends_of_epochs_alone_are_watched_there_are_rows_all_the_same():
    lines = shown(fit(max_duration="3ep", evaluators={"val": LOADER}, watch={E.EPOCH_CHECKPOINT}), columns=100)
    assert [row[0] for row in rows_of(lines)] == ["1", "2", "3"]
    assert any("val" in line for line in lines)
    assert "epoch 3/3" in lines[-1] or "epoch 3/3" in lines[-2]
    assert not any("0%" in line.split("done")[0].split() for line in lines[-2:])
