"""Progress as lines: what it leaves alone, where there is no terminal, and a device that computes behind its back."""

from __future__ import annotations

import io
import re
import runpy
import sys
import threading
import time

import pytest
import torch

import pure_loop as pl
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.progress import display as _display
from pure_loop.progress import estimate as _readings
from pure_loop.progress.display import progress
from tests.progress.terminals import DATA, VAL, Clock, E, Recording, Terminal, fit, followed
from tests.support.problem import cross_entropy
from tests.support.refused import Refusal, check, rows
from tests.support.streams import assert_same


def test_it_passes_on_the_pairs_changes_no_training_and_leaves_all_as_it_was(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    streams, threads = (sys.stdout, sys.stderr), threading.enumerate()
    alone = pl.run(fit(evaluators=VAL))
    for file in (io.StringIO(), terminal):
        pairs = list(fit(DATA[:2]))
        assert all(a is b for a, b in zip(pairs, progress(iter(pairs), file=file), strict=True))
        for event, state in progress(fit(evaluators=VAL), file=file, refresh_seconds=0):
            assert set(threading.enumerate()) <= set(threads)  # one that another test left may end
            if event is E.FIT_END:
                assert_same(state, alone, "with progress")
    assert (sys.stdout, sys.stderr) == streams


def test_an_event_costs_less_than_a_microsecond(terminal):
    state = pl.State.create(torch.nn.Linear(1, 1))
    pairs = [*[(E.BEFORE_FORWARD, state)] * 9, (E.BATCH_END, state.replace(loss=torch.tensor(1.0)))] * 2_000

    def seconds(pairs):
        began = time.process_time()
        for _ in pairs:
            pass
        return time.process_time() - began

    bare = min(seconds(iter(pairs)) for _ in range(4))
    for file in (io.StringIO, Terminal):
        shown = min(seconds(progress(iter(pairs), file=file())) for _ in range(4))
        assert (shown - bare) / len(pairs) < 1e-6


def test_lines_come_at_every_epoch_and_evaluation_with_the_numbers_of_the_state(monkeypatch):
    """Without escape codes, even where colours are forced."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, losses = io.StringIO(), []
    for event, state in progress(fit(evaluators=VAL), file=out):
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


def test_lines_of_any_stream_and_of_a_terminal_that_can_only_print(terminal, monkeypatch):
    """Of a generator, of one with few events, of an evaluation and of a prediction."""
    monkeypatch.setenv("TERM", "dumb")
    state = pl.State.create(torch.nn.Linear(4, 3))
    streams = [fit(watch=["epoch_end"]), (pair for pair in fit())]
    streams += [pl.evaluate(state, {"test": DATA}, loss=cross_entropy), pl.predict(state, DATA)]
    for stream in streams:
        pl.run(progress(stream, file=terminal))
    text = terminal.getvalue()
    assert "\x1b" not in text
    assert text.count("epoch 1/2  batch  6/12  50%") == 2
    assert re.search(r"^evaluate  batch 6/6  100%  test: loss \S+  accuracy \S+  done", text, re.MULTILINE)
    assert re.search(r"^predict  batch 6/6  100%  done", text, re.MULTILINE)


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


# A device that computes behind the loop's back.


class Device:
    """Stands in for a device, and for its events: what it was given is done so many polls later."""

    polls, waited = 3, []

    def __init__(self, *_):
        self.left = self.polls

    def record(self, _):
        pass

    def query(self):
        self.left -= 1
        return self.left < 0

    def synchronize(self):
        self.waited.append(self.left >= 0)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(Device, "waited", [])
    for module in (_readings, sys.modules["pure_loop.progress.tracker"]):
        monkeypatch.setattr(module, "on_cpu", lambda value: False)
    monkeypatch.setattr(torch, "Event", Device)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)


def test_it_never_waits_for_a_device_before_the_end(device, monkeypatch):
    """Where it is slow, lines of epochs are late and complete; after an error it is not asked."""
    screen, losses = Recording(), []
    for event, state in followed(fit(DATA * 4), screen, Clock(), refresh=0.1):
        if event is E.BATCH_END:
            losses.append(float(state.loss))
        if event is not E.FIT_END:
            assert not any(Device.waited)
    assert 0 < len(screen.shown) < len(losses)
    for snapshot, values in screen.shown[1:]:
        batch = int(re.search(r"batch +(\d+)", snapshot.place)[1])
        assert values["loss"] == losses[batch - 1]  # a loss stands beside the batch that it is of

    screen = Recording(live=False, seconds=10.0)
    list(followed(fit(evaluators=VAL), screen, Clock(), refresh=0.1))
    epoch = ["loss", "val/loss val/accuracy"]
    assert [" ".join(values) for _, values in screen.shown] == [*epoch, *epoch, "loss val/loss val/accuracy"]

    monkeypatch.setattr(Device, "polls", 10**6)
    Device.waited.clear()
    screen = Recording()
    stream = (pair if n < 40 else pair[n] for n, pair in enumerate(fit()))
    with pytest.raises(IndexError):
        list(followed(stream, screen, Clock(), refresh=0.1))
    assert not any(Device.waited)
    assert screen.shown[-1][0].ending == "failed: IndexError"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_reading_of_a_real_device():
    reading = _readings.Reading({"loss": torch.tensor(2.5, device="cuda"), "n": 3})
    torch.cuda.synchronize()
    assert reading.ready
    assert reading.values() == {"loss": 2.5, "n": 3.0}


@rows(
    [
        Refusal("description", lambda: progress(fit(), description=3), ArgumentTypeError, ("description",)),
        Refusal("nan", lambda: progress(fit(), refresh_seconds=float("nan")), ArgumentError, ("refresh_seconds",)),
        Refusal("file", lambda: progress(fit(), file="log.txt"), ArgumentTypeError, ("file",)),
        Refusal("model", lambda: progress(torch.nn.Linear(1, 1)), ArgumentTypeError, ("the stream itself",)),
    ]
)
def test_a_wrong_argument_is_refused_at_the_call(refusal):
    check(refusal)
