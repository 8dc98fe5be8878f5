"""Progress: what it leaves alone, its lines, a device that computes behind the loop's back, and how it closes."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import threading
import time

import pytest
import torch

import pure_loop as pl
from pure_loop.progress import display as _display
from pure_loop.progress import estimate as _readings
from pure_loop.progress.display import progress
from tests.progress.terminals import DATA, Clock, E, Recording, Terminal, fit, followed
from tests.support.problem import cross_entropy
from tests.support.refused import Refusal, check, rows
from tests.support.streams import assert_same

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
FILES = pytest.mark.parametrize("file", [io.StringIO, Terminal])


# What it leaves alone.


@FILES
def test_it_passes_on_the_pairs_and_changes_no_training(file, terminal):
    pairs = list(fit())
    assert all(a is b for a, b in zip(pairs, progress(iter(pairs), file=file()), strict=True))
    alone = pl.run(fit(evaluators={"val": DATA}))
    shown = pl.run(progress(fit(evaluators={"val": DATA}, strict=True), file=file(), refresh_seconds=0))
    assert_same(shown, alone, "with progress")


def test_it_leaves_no_thread_and_the_standard_streams_as_they_were(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    streams, threads = (sys.stdout, sys.stderr), threading.enumerate()
    for _ in progress(fit(), file=terminal, refresh_seconds=0):
        assert set(threading.enumerate()) <= set(threads)  # one that another test left may end
    assert (sys.stdout, sys.stderr) == streams


@FILES
def test_an_event_costs_less_than_a_microsecond(file, terminal):
    state = pl.State.create(torch.nn.Linear(1, 1))
    pairs = [(E.BEFORE_FORWARD, state)] * 9 + [(E.BATCH_END, state.replace(loss=torch.tensor(1.0)))]

    def stream():
        for _ in range(5_000):
            yield from pairs

    def seconds(pairs):
        began = time.process_time()
        for _ in pairs:
            pass
        return time.process_time() - began

    bare = min(seconds(stream()) for _ in range(4))
    shown = min(seconds(progress(stream(), file=file())) for _ in range(4))
    assert (shown - bare) / 50_000 < 1e-6


# Plain lines.


def test_lines_come_at_every_epoch_and_evaluation_with_the_numbers_of_the_state(monkeypatch):
    """Without escape codes, even where colours are forced."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, losses = io.StringIO(), []
    for event, state in progress(fit(evaluators={"val": DATA}), file=out):
        if event is E.BATCH_END:
            losses.append(float(state.loss))
    lines = out.getvalue().splitlines()
    assert [re.sub(r"[\d.]+ ?k? samples/s  ", "", re.sub(r"\d\.\d{3,4}", "#", line)) for line in lines] == [
        "train  epoch 1/2  batch  6/12  50%  loss #  0:00 left",
        "train  epoch 1/2  batch  6/12  val: loss #  accuracy #  0:00",
        "train  epoch 2/2  batch 12/12  100%  loss #  0:00 left",  # its evaluation is left
        "train  epoch 2/2  batch 12/12  val: loss #  accuracy #  0:00",
        "train  epoch 2/2  batch 12/12  100%  loss #  val: loss #  accuracy #  done, 0:00",
    ]
    shown = [float(found) for found in re.findall(r"%  loss (\S+)", out.getvalue())]
    assert shown == pytest.approx([losses[5], losses[11], losses[11]], rel=1e-3)


def test_lines_of_any_stream_of_one_with_few_events_of_an_evaluation_and_of_a_prediction():
    state, out = pl.State.create(torch.nn.Linear(4, 3)), io.StringIO()
    streams = [fit(watch=["epoch_end"]), (pair for pair in fit())]
    streams += [pl.evaluate(state, {"test": DATA}, loss=cross_entropy), pl.predict(state, DATA)]
    for stream in streams:
        pl.run(progress(stream, file=out))
    assert out.getvalue().count("epoch 1/2  batch  6/12  50%") == 2
    assert re.search(r"^evaluate  batch 6/6  100%  test: loss \S+  accuracy \S+  done", out.getvalue(), re.MULTILINE)
    assert re.search(r"^predict  batch 6/6  100%  done", out.getvalue(), re.MULTILINE)


# Where there is no rich, or no terminal.


def test_without_rich_a_terminal_gets_lines_and_one_hint_and_a_pipe_none(terminal, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(_display, "_hinted", [])
    pipe = io.StringIO()
    for file in (pipe, terminal, terminal):
        pl.run(progress(fit(), file=file))
    assert "pip install" not in pipe.getvalue()
    lines = terminal.getvalue().splitlines()
    assert 'pip install "pure_loop[progress]"' in lines[0]
    assert sum("pip install" in line for line in lines) == 1
    assert sum("done" in line for line in lines) == 2
    assert "\x1b" not in terminal.getvalue()
    assert "screen_for" in runpy.run_path(_display.__file__)  # it is not imported before it is used


def test_a_terminal_that_can_only_print_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    pl.run(progress(fit(), file=terminal))
    assert "\x1b" not in terminal.getvalue()
    assert "done" in terminal.getvalue()


# A device that computes behind the loop's back.


class Device:
    """Stands in for a device: what it was given is done so many polls later."""

    polls, waited = 3, 0

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
        self._device.waited += self._left >= 0


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(_readings, "on_cpu", lambda value: False)
    monkeypatch.setattr(sys.modules["pure_loop.progress.tracker"], "on_cpu", lambda value: False)
    monkeypatch.setattr(torch, "Event", device.Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    return device


def test_it_never_waits_for_a_device_before_the_end(device):
    screen, losses = Recording(), []
    for event, state in followed(fit(DATA * 4), screen, Clock(), refresh=0.1):
        if event is E.BATCH_END:
            losses.append(float(state.loss))
        if event is not E.FIT_END:
            assert device.waited == 0
    assert 0 < len(screen.shown) < len(losses)
    for snapshot, values in screen.shown[1:]:
        batch = int(re.search(r"batch +(\d+)", snapshot.place)[1])
        assert values["loss"] == losses[batch - 1]  # a loss stands beside the batch that it is of


def test_lines_of_epochs_are_late_and_complete_where_a_device_is_slow(device):
    screen = Recording(live=False, seconds=10.0)
    list(followed(fit(evaluators={"val": DATA}), screen, Clock(), refresh=0.1))
    epoch = ["loss", "val/loss val/accuracy"]
    assert [" ".join(values) for _, values in screen.shown] == [*epoch, *epoch, "loss val/loss val/accuracy"]


def test_after_an_error_a_device_is_not_asked(device):
    screen, device.polls = Recording(), 10**6
    with pytest.raises(RuntimeError, match="broken"):
        list(followed(failing(fit(), after=40), screen, Clock(), refresh=0.1))
    assert device.waited == 0
    assert screen.shown[-1][0].ending == "failed: RuntimeError"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_reading_of_a_real_device():
    reading = _readings.Reading({"loss": torch.tensor(2.5, device="cuda"), "n": 3})
    torch.cuda.synchronize()
    assert reading.ready
    assert reading.values() == {"loss": 2.5, "n": 3.0}


# Closing.


def failing(stream, after):
    for n, pair in enumerate(stream):
        if n == after:
            raise RuntimeError("broken")
        yield pair


def left_by(how, outer):
    for event, _ in outer:
        if event is E.AFTER_LOSS and how == "error":
            raise KeyError("mine")
        if event is E.BATCH_END and how == "break":
            return
        if how == "close":
            outer.close()


def test_whatever_ends_the_loop_closes_the_bar_and_the_stream(terminal):
    threads = set(threading.enumerate())
    for how in ("break", "close", "error"):
        inner, file = fit(), Terminal()
        with contextlib.suppress(KeyError):
            left_by(how, progress(inner, file=file))
        assert inner.gi_frame is None
        assert "stopped" in file.getvalue()
        assert file.getvalue().count("\x1b[?25h") == file.getvalue().count("\x1b[?25l") == 1
        assert set(threading.enumerate()) <= threads


@FILES
def test_an_error_of_the_stream_is_named_and_passes(file, terminal):
    out = file()
    with pytest.raises(RuntimeError, match="broken"):
        pl.run(progress(failing(fit(), after=50), file=out))
    last = ESCAPE.sub("", out.getvalue()).splitlines()
    assert any(re.search(r"batch +[1-9]", line) and "failed: RuntimeError" in line for line in last)


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


@rows(
    [
        Refusal("description", lambda: progress(fit(), description=3), pl.ArgumentTypeError, ("description",)),
        Refusal("nan", lambda: progress(fit(), refresh_seconds=float("nan")), pl.ArgumentError, ("refresh_seconds",)),
        Refusal("file", lambda: progress(fit(), file="log.txt"), pl.ArgumentTypeError, ("file",)),
        Refusal("model", lambda: progress(torch.nn.Linear(1, 1)), pl.ArgumentTypeError, ("the stream itself",)),
    ]
)
def test_a_wrong_argument_is_refused_at_the_call(refusal):
    check(refusal)
