"""The table and the bar as a terminal shows them."""

from __future__ import annotations

import io
import itertools
import re
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.progress.display import progress, screen_for
from pure_loop.progress.words import number
from tests.progress.terminals import DATA, VAL, Clock, E, Terminal, Unsized, fit, followed, rows_of, shown
from tests.support.problem import cross_entropy, points


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
SCREENS = {
    20: """
       train ─
epoch     loss  +6
    1    #####
100%  0:02 left
 66%  0:01 left

    1    #####
    2    #####
100%  done, 0:20""",
    80: """
       train ─  val ───────────────  test ──────────────
epoch     loss     loss   accuracy      loss   accuracy         lr  time
    1    #####    #####*    ######*    #####*    ######*       0.1  0:10
train  epoch 2/2  batch 12/12  ━  100%  0:02 left
  val  batch 4/6  ━   66%  0:01 left

    1    #####    #####*    ######*    #####*    ######*       0.1  0:10
    2    #####   ######*    ######*    #####*    ######*       0.1  0:10
train  epoch 2/2  batch 12/12  ━  4.00 samples/s  100%  done, 0:20""",
}


def test_the_screens():
    for columns, screen in SCREENS.items():
        assert drawing(columns) == screen.splitlines()[1:]


@settings(max_examples=8)
@given(st.integers(20, 300), st.integers(1, 3), st.sampled_from([4, (4, 4, 1), (1, 3)]))
@example(57, 2, 4)
@example(150, 3, (4, 4, 1))
def test_at_any_width_no_line_fills_it_and_no_number_is_cut_and_all_are_those_of_the_states(columns, epochs, sizes):
    data = points(3 if isinstance(sizes, int) else len(sizes), size=sizes)
    lr = pl.schedules.linear(0.1, 0.0, f"{epochs}ep")
    evaluators = {"val": DATA, "a_label_that_is_far_too_long_for_a_terminal": DATA[:2]}
    options = {"max_duration": f"{epochs}ep", "evaluators": evaluators, "optimizer": pl.optim.sgd(lr=lr)}
    wanted, losses, samples = [], [], []
    for event, state in fit(data, **options):
        if event is E.BATCH_END:
            samples.append(state.timestamp.sample - state.previous_timestamp.sample)
            losses.append(float(state.loss) * samples[-1])
            rate = lr(state.previous_timestamp)
        if event is E.EPOCH_CHECKPOINT:
            measured = [metrics[name] for metrics in state.metrics.values() for name in ("loss", "accuracy")]
            cells = [number(sum(losses) / sum(samples)), *(number(float(each)) for each in measured)]
            wanted.append([str(state.timestamp.epoch), *cells, f"{rate:.3g}"])
            del losses[:], samples[:]
    lines = shown(fit(data, **options), columns, description="pretraining of a model of models")
    assert max(map(len, lines)) < columns
    assert len(lines[-1]) <= columns - 4
    assert re.search(r"100%  done, 0:\d\d$", lines[-1])
    rows = [[cell.rstrip("*") for cell in row] for row in rows_of(lines)]
    assert [row[0] for row in rows] == [row[0] for row in wanted]
    for row, cells in zip(rows, wanted, strict=True):
        assert set(row) <= {*cells, row[-1]}
        assert row[-1] in cells or re.fullmatch(r"0:\d\d", row[-1])
        assert columns < 120 or row[:-1] == cells


def going_on(at, duration):
    *_, kept = (state for event, state in fit() if event in (E.BATCH_END, E.FIT_END) and state.timestamp <= at)
    return pl.fit(kept, DATA, optimizer=pl.optim.sgd(lr=0.1), loss=cross_entropy, max_duration=duration)


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
        (going_on("9ba", "3ep"), "2:4 3:4"),
        (going_on("12ba", "2ep"), ""),
        ((pair for pair in fit(evaluators=VAL)), "1:5 2:5"),  # whose learning rate is not known
        (fit(watch=["batch_end"], evaluators=VAL), ""),
        (fit(watch=["epoch_end"], evaluators=VAL), "1:3 2:3"),
        (fit(watch=["epoch_end", "eval_end"], evaluators=VAL), "1:5 2:5"),
        (fit(watch=["epoch_checkpoint"], evaluators=VAL), "1:5 2:5"),
    ):
        lines = shown(stream)
        assert " ".join(f"{row[0]}:{len(row)}" for row in rows_of(lines)) == wanted
        assert any("done" in line and " 0%" not in line for line in lines[-2:])


def test_the_learning_rate_of_each_part_and_what_scales_it_and_no_loss_that_was_skipped():
    parts = pl.optim.partition({"weight": pl.optim.sgd(lr=0.5), "bias": pl.optim.sgd(lr=0.25)}, lambda n, _: n[2:])
    lines = shown(fit(optimizer=parts, train_metrics=[pl.metrics.accuracy()]))
    assert lines[1].split() == ["epoch", "loss", "accuracy", "lr:weight", "lr:bias", "time"]
    assert rows_of(lines)[0][3:5] == ["0.5", "0.25"]
    state = next(s for event, s in fit() if event is E.EPOCH_END).replace(lr_scale=torch.tensor(0.5))
    lines = shown(pl.fit(state, DATA, optimizer=pl.optim.sgd(lr=0.5), loss=cross_entropy, max_duration="2ep"))
    assert rows_of(lines)[0][2] == "0.25"
    calls = itertools.count(1)

    def loss(outputs, targets):
        return cross_entropy(outputs, targets) * (float("nan") if next(calls) == 3 else 1.0)

    rows = rows_of(shown(fit(loss=loss, nonfinite="skip")))
    assert [bool(re.fullmatch(r"\d\.\d{3,4}", row[1])) for row in rows] == [True, True]


# What else is written.


def test_what_the_body_prints_is_between_the_rows_that_come_at_once(terminal, monkeypatch):
    """And no State is referred to."""
    monkeypatch.setattr(sys, "stdout", terminal)
    before = lambda: None  # noqa: E731
    stream = fit(evaluators=VAL, max_duration="12ba", eval_interval="4ba")
    for event, state in progress(stream, file=terminal, refresh_seconds=0):
        if event in (E.BATCH_START, E.BATCH_END):
            assert before() is None  # so the step may write to its memory
            before = weakref.ref(state)
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


def test_a_terminal_of_ascii_gets_ascii_and_one_in_another_thread_the_same(terminal, monkeypatch):
    with ThreadPoolExecutor() as threads:  # where Python has no signals
        threads.submit(lambda: pl.run(progress(fit(), file=terminal, refresh_seconds=0))).result()
    assert "done" in terminal.getvalue()
    monkeypatch.setattr(Terminal, "encoding", "ascii", raising=False)
    plain = Terminal()
    pl.run(progress(fit(evaluators={"a_label_that_is_far_too_long": DATA}), file=plain, refresh_seconds=0))
    assert plain.getvalue().isascii()
    assert "a_label_~too_long" in plain.getvalue()
