"""Progress: what it shows, what it leaves alone, and how it closes."""

from __future__ import annotations

import io
import itertools
import re
import runpy
import sys
import threading
import time

import pytest
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.progress import display as _display
from pure_loop.progress import estimate as _readings
from pure_loop.progress.display import _pass_on, progress
from pure_loop.progress.tracker import Tracker
from tests.progress.conftest import Clock, Terminal

torch.set_num_threads(1)

E = pl.Event
X = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
DATA = [(x, (x.sum(1) > 0).long()) for x in X]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def fit(data=DATA, **options):
    options = {"max_duration": "2ep", "optimizer": pl.optim.sgd(lr=0.1), "loss": cross_entropy, **options}
    torch.manual_seed(0)
    return pl.fit(torch.nn.Linear(3, 2), data, **options)


class Recording:
    """A screen that keeps what it is shown."""

    def __init__(self, live=True, seconds=0.0):
        self.live, self.seconds = live, seconds
        self.shown, self.rows, self.closed = [], [], 0

    def show(self, snapshot, values):
        self.shown.append((snapshot, values))

    def add(self, row, values):
        self.rows.append((row, values))

    def close(self):
        self.closed += 1


def watched(stream, screen, *, clock=None, refresh=0.1):
    return _pass_on(stream, Tracker(screen, None, refresh, clock or Clock()))


# What it leaves alone.


def test_it_passes_on_the_same_pairs():
    pairs = list(fit())
    passed = list(progress(iter(pairs), file=io.StringIO()))
    assert all(a is b for a, b in zip(pairs, passed, strict=True))


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_it_changes_no_training(file, terminal):
    alone = pl.run(fit(evaluators={"val": DATA}))
    shown = pl.run(progress(fit(evaluators={"val": DATA}, strict=True), file=file(), refresh_seconds=0))
    assert all(torch.equal(alone.params[name], shown.params[name]) for name in alone.params)
    assert {k: float(v) for k, v in alone.metrics["val"].items()} == {
        k: float(v) for k, v in shown.metrics["val"].items()
    }


def test_it_leaves_no_thread_and_the_standard_streams_as_they_were(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    streams, threads = (sys.stdout, sys.stderr), threading.enumerate()
    for _ in progress(fit(), file=terminal, refresh_seconds=0):
        assert set(threading.enumerate()) <= set(threads)  # one that another test left may end
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_an_event_costs_less_than_a_microsecond(file, terminal):
    state = pl.State.create(torch.nn.Linear(1, 1))
    pairs = [(E.BEFORE_FORWARD, state)] * 9 + [(E.BATCH_END, state.replace(loss=torch.tensor(1.0)))]

    def stream():
        for _ in range(10_000):
            yield from pairs

    def seconds(pairs):
        began = time.process_time()
        for _ in pairs:
            pass
        return time.process_time() - began

    bare = min(seconds(stream()) for _ in range(5))
    shown = min(seconds(progress(stream(), file=file())) for _ in range(5))
    assert (shown - bare) / 100_000 < 1e-6


# Plain lines.


def test_lines_come_at_every_epoch_and_evaluation_without_escape_codes():
    out = io.StringIO()
    pl.run(progress(fit(evaluators={"val": DATA}), file=out))
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert [re.sub(r"[\d.]+ ?k? samples/s  ", "", re.sub(r"\d\.\d{3,4}", "#", line)) for line in lines] == [
        "train  epoch 1/2  batch  6/12  50%  loss #  0:00 left",
        "train  epoch 1/2  batch  6/12  val: loss #  accuracy #  0:00",
        "train  epoch 2/2  batch 12/12  100%  loss #  0:00 left",  # its evaluation is left
        "train  epoch 2/2  batch 12/12  val: loss #  accuracy #  0:00",
        "train  epoch 2/2  batch 12/12  100%  loss #  val: loss #  accuracy #  done, 0:00",
    ]


def test_the_numbers_are_those_of_the_state():
    out = io.StringIO()
    losses = [s.loss for e, s in progress(fit(), file=out) if e is E.BATCH_END]
    shown = [float(found) for found in re.findall(r"loss (\S+)", out.getvalue())]
    assert shown == pytest.approx([float(losses[5]), float(losses[11]), float(losses[11])], rel=1e-3)


def test_a_line_comes_about_every_ten_seconds():
    clock, screen = Clock(), Recording(live=False, seconds=10.0)
    for event, _ in watched(fit(DATA * 10, max_duration="60ba"), screen, clock=clock):
        clock.now += event is E.BATCH_START
    assert [snapshot.place.split()[-1] for snapshot, _ in screen.shown][:3] == ["10/60", "20/60", "30/60"]


def test_speed_leaves_evaluations_out():
    clock, screen = Clock(), Recording()
    stream = fit(DATA * 4, max_duration="24ba", evaluators={"val": DATA}, eval_interval="12ba")
    for event, _ in watched(stream, screen, clock=clock):
        clock.now += {E.BATCH_START: 2.0, E.EVAL_BATCH_START: 50.0}.get(event, 0.0)
    speeds = [snapshot.speed for snapshot, _ in screen.shown if snapshot.speed is not None]
    assert len(speeds) > 20
    assert speeds == pytest.approx([2.0] * len(speeds))


def test_the_time_left_is_that_of_the_batches_to_come():
    clock, screen = Clock(), Recording()
    for event, _ in watched(fit(max_duration="12ba"), screen, clock=clock):
        clock.now += 2.0 * (event is E.BATCH_START)
    left = {snapshot.place.split()[-1]: snapshot.left for snapshot, _ in screen.shown}
    assert left["1/12"] is None
    assert [left[f"{n}/12"] for n in range(2, 12)] == pytest.approx([2.0 * (12 - n) for n in range(2, 12)])


# How far it is.


@pytest.mark.parametrize(
    ("options", "fractions"),
    [
        ({"max_duration": "2ep"}, [(n + 1) / 12 for n in range(12)]),
        ({"max_duration": "8ba"}, [(n + 1) / 8 for n in range(8)]),
        ({"max_duration": "48sp"}, [(n + 1) / 12 for n in range(12)]),
        ({"max_duration": "2ep", "batches_per_epoch": 3}, [(n + 1) / 6 for n in range(6)]),
    ],
)
def test_the_fraction_grows_with_every_batch(options, fractions):
    clock, screen = Clock(), Recording()
    for event, _ in watched(fit(**options), screen, clock=clock):
        clock.now += event is E.BATCH_START
    shown = dict.fromkeys(s.fraction for s, _ in screen.shown)
    assert list(shown) == pytest.approx([0.0, *fractions])


def test_the_length_of_an_epoch_comes_with_the_state_or_is_learned():
    class Unsized:
        def __iter__(self):
            return iter(DATA)

    out = io.StringIO()
    # Of any stream: this one is not the generator that fit gave.
    pl.run(progress((pair for pair in fit()), file=out))
    assert "epoch 1/2  batch  6/12" in out.getvalue()
    clock, screen = Clock(), Recording()
    for event, state in watched(fit(Unsized()), screen, clock=clock):
        clock.now += event is E.BATCH_START
        if event is E.BATCH_START and state.timestamp.batch == 5:
            assert screen.shown[-1][0].fraction is None
        if event is E.BATCH_END and state.timestamp.batch == 9:
            assert screen.shown[-1][0].fraction == pytest.approx(9 / 12)
    assert "batch 12/12" in screen.shown[-1][0].place


# The bar.


def test_the_bar_shows_everything_within_the_width(terminal):
    pl.run(progress(fit(evaluators={"val": DATA}), file=terminal, refresh_seconds=0, description="pretrain"))
    text = ESCAPE.sub("", terminal.getvalue())
    for words in (
        "pretrain  epoch 1/2  batch  6/12",
        "50%",
        "left",
        "samples/s",
        "val  batch 3/6",
        "accuracy",
    ):
        assert words in text
    assert "done" in text.splitlines()[-1]
    assert max(map(len, text.replace("\r", "\n").splitlines())) <= 80


def test_the_cursor_comes_back(terminal):
    pl.run(progress(fit(), file=terminal))
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("columns", ["20", "40", "300"])
def test_a_bar_of_any_width(columns, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    pl.run(progress(fit(evaluators={"val": DATA}), file=terminal, refresh_seconds=0))
    text = ESCAPE.sub("", terminal.getvalue()).replace("\r", "\n")
    assert max(map(len, text.splitlines())) <= int(columns)


def test_it_is_never_drawn_more_often_than_it_may_be():
    clock, screen = Clock(), Recording()
    times = []
    screen.show = lambda *_: times.append(clock.now)
    for _ in watched(fit(DATA * 3, evaluators={"val": DATA}, eval_interval="2ba"), screen, clock=clock, refresh=5.0):
        clock.now += 0.3
    while_running = times[1:-1]
    assert len(while_running) > 5
    assert all(b - a >= 5.0 for a, b in itertools.pairwise(while_running))


def test_what_the_body_prints_stands_above_the_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    for event, _ in progress(fit(), file=terminal, refresh_seconds=0):
        if event is E.EPOCH_END:
            print("the body was here")
    lines = ESCAPE.sub("", terminal.getvalue()).replace("\r", "\n").splitlines()
    assert lines.count("the body was here") == 2


def test_what_goes_to_a_pipe_stays_there(terminal, monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    for event, _ in progress(fit(), file=terminal, refresh_seconds=0):
        if event is E.EPOCH_END:
            print("a result")
    assert pipe.getvalue() == "a result\n" * 2
    assert "a result" not in terminal.getvalue()


def test_a_bar_in_a_bar_prints_lines_above_it(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    for event, state in progress(fit(), refresh_seconds=0):
        if event is E.EPOCH_END:
            pl.run(progress(pl.evaluate(state, {"inner": DATA}, loss=cross_entropy), description="nested"))
    text = ESCAPE.sub("", terminal.getvalue())
    assert "nested  batch 6/6  inner: loss" in text
    assert terminal.getvalue().count("\x1b[?25l") == 1


def test_evaluation_and_prediction_by_themselves():
    state, out = pl.State.create(torch.nn.Linear(3, 2)), io.StringIO()
    pl.run(progress(pl.evaluate(state, {"test": DATA}, loss=cross_entropy), file=out))
    pl.run(progress(pl.predict(state, DATA), file=out))
    assert re.search(r"^evaluate  batch 6/6  100%  test: loss \S+  accuracy \S+  done", out.getvalue(), re.MULTILINE)
    assert re.search(r"^predict  batch 6/6  100%  done", out.getvalue(), re.MULTILINE)


def test_a_stream_that_yields_only_some_events():
    out = io.StringIO()
    pl.run(progress(fit(watch=["epoch_end"]), file=out))
    assert "epoch 1/2  batch  6/12  50%" in out.getvalue()


# Where there is no rich, or no terminal.


def test_a_terminal_without_rich_gets_lines_and_one_hint(terminal, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(_display, "_hinted", [])
    pl.run(progress(fit(), file=terminal))
    pl.run(progress(fit(), file=terminal))
    lines = terminal.getvalue().splitlines()
    assert 'pip install "pure_loop[progress]"' in lines[0]
    assert sum("pip install" in line for line in lines) == 1
    assert sum("done" in line for line in lines) == 2
    assert "\x1b" not in terminal.getvalue()


def test_a_pipe_without_rich_gets_no_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(_display, "_hinted", [])
    out = io.StringIO()
    pl.run(progress(fit(), file=out))
    assert "pip install" not in out.getvalue()


def test_a_terminal_that_can_only_print_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    pl.run(progress(fit(), file=terminal))
    assert "\x1b" not in terminal.getvalue()
    assert "done" in terminal.getvalue()


def test_a_log_gets_lines_even_where_colours_are_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    pl.run(progress(fit(), file=out))
    assert "\x1b" not in out.getvalue()


def test_rich_is_not_imported_before_it_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "screen_for" in runpy.run_path(_display.__file__)


# A device that computes behind the loop's back.


class Device:
    """Stands in for a device: what it was given is done so many polls later."""

    def __init__(self, polls):
        self.polls, self.waited = polls, 0

    def Event(self, _):
        return Mark(self)


class Mark:
    def __init__(self, device):
        self._device, self._left = device, device.polls

    def record(self, _):
        pass

    def query(self):
        self._left -= 1
        return self._left < 0

    def synchronize(self):
        if self._left >= 0:
            self._device.waited += 1


@pytest.fixture
def device(monkeypatch):
    device = Device(polls=3)
    monkeypatch.setattr(_readings, "on_cpu", lambda value: False)
    monkeypatch.setattr(sys.modules["pure_loop.progress.tracker"], "on_cpu", lambda value: False)
    monkeypatch.setattr(torch, "Event", device.Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    return device


def test_it_never_waits_for_a_device_before_the_end(device):
    clock, screen = Clock(), Recording()
    losses = []
    for event, state in watched(fit(DATA * 4), screen, clock=clock):
        if event is E.BATCH_END:
            losses.append(float(state.loss))
            clock.now += 1.0
        if event is not E.FIT_END:
            assert device.waited == 0
    assert 0 < len(screen.shown) < len(losses)
    for snapshot, values in screen.shown[1:]:
        batch = int(re.search(r"batch +(\d+)", snapshot.place)[1])
        assert values["loss"] == losses[batch - 1]  # a loss stands beside the batch that it is of


def test_lines_of_epochs_are_late_and_complete_where_a_device_is_slow(device):
    clock, screen = Clock(), Recording(live=False, seconds=10.0)
    for event, _ in watched(fit(DATA, evaluators={"val": DATA}), screen, clock=clock):
        clock.now += event is E.BATCH_START
    assert [" ".join(values) for _, values in screen.shown] == [
        "loss", "val/loss val/accuracy", "loss", "val/loss val/accuracy", "loss val/loss val/accuracy",
    ]  # fmt: skip


def test_after_an_error_a_device_is_not_asked(device):
    clock, screen = Clock(), Recording()
    device.polls = 10**6
    with pytest.raises(RuntimeError, match="broken"):
        train(watched(failing(fit(), after=40), screen, clock=clock), clock)
    assert device.waited == 0
    assert screen.shown[-1][0].ending == "failed: RuntimeError"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_reading_of_a_real_device():
    values = {"loss": torch.tensor(2.5, device="cuda"), "n": 3}
    reading = _readings.Reading(values)
    torch.cuda.synchronize()
    assert reading.ready
    assert reading.values() == {"loss": 2.5, "n": 3.0}


# Closing.


def failing(stream, after):
    try:
        for n, pair in enumerate(stream):
            if n == after:
                raise RuntimeError("broken")
            yield pair
    finally:
        stream.close()


def train(stream, clock):
    for event, _ in stream:
        clock.now += event is E.BATCH_START


def leave(inner, file):
    for event, _ in progress(inner, file=file):
        if event is E.AFTER_LOSS:
            raise KeyError("mine")


def closed(stream):
    return stream.gi_frame is None


def test_break_closes_bar_and_stream(terminal):
    inner = fit()
    for event, _ in progress(inner, file=terminal):
        if event is E.BATCH_END:
            break
    assert closed(inner)
    assert "stopped" in terminal.getvalue()
    assert "\x1b[?25h" in terminal.getvalue()


def test_an_exception_in_the_body_closes_both(terminal):
    inner, threads = fit(), set(threading.enumerate())
    with pytest.raises(KeyError, match="mine"):
        leave(inner, terminal)
    assert closed(inner)
    assert terminal.getvalue().count("\x1b[?25h") == 1
    assert set(threading.enumerate()) <= threads


def test_close_closes_both(terminal):
    inner = fit()
    outer = progress(inner, file=terminal)
    next(outer)
    outer.close()
    assert closed(inner)
    assert "stopped" in terminal.getvalue()


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_an_error_of_the_stream_is_named_and_passes(file, terminal):
    out = file()
    with pytest.raises(RuntimeError, match="broken"):
        pl.run(progress(failing(fit(), after=50), file=out))
    last = ESCAPE.sub("", out.getvalue()).splitlines()
    assert any("failed: RuntimeError" in line for line in last)
    assert any(re.search(r"batch +[1-9]", line) and "failed" in line for line in last)


def test_an_error_of_the_inner_close_still_closes_the_bar(terminal):
    def stubborn():
        try:
            yield from fit()
        finally:
            raise OSError("disk full")

    outer = progress(stubborn(), file=terminal)
    next(outer)
    with pytest.raises(OSError, match="disk full"):
        outer.close()
    assert terminal.getvalue().count("\x1b[?25h") == terminal.getvalue().count("\x1b[?25l")


@pytest.mark.parametrize(
    "wrong",
    [
        {"description": 3},
        {"refresh_seconds": -1},
        {"refresh_seconds": float("nan")},
        {"refresh_seconds": "fast"},
        {"file": "log.txt"},
    ],
)
def test_wrong_arguments_are_refused_at_the_call(wrong):
    with pytest.raises(pl.PureLoopError, match=next(iter(wrong))):
        progress(fit(), **wrong)


def test_what_is_no_stream_is_refused():
    with pytest.raises(pl.ArgumentTypeError, match="the stream itself"):
        progress(torch.nn.Linear(1, 1))
