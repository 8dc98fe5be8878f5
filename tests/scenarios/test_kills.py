"""Runs that are ended from outside, by kill -9, SIGTERM and Ctrl-C: the same command resumes, to the same bits.

The processes are real: see :mod:`tests.support.killed_runs`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import signals
from tests.support.killed_runs import Killer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


def batches_in(folder: Path) -> list[int]:
    return sorted(int(each.stem.rpartition("ba")[2]) for each in folder.glob("ep*-ba*.safetensors"))


def leftovers(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.name.startswith(".")]


@pytest.mark.slow  # processes, which are killed again and again
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.thorough)])
def test_kill_9_at_any_moment(kills: int, killer: Killer, uninterrupted: dict[str, str], tmp_path: Path) -> None:
    draw = random.Random(kills)
    run, reached, found = 0, 0, Counter[str]()
    folder = tmp_path / "0"
    while found["killed"] < kills:
        # By the clock, most often while it starts and reads; where a saver tries its folder; in a save; or somewhere
        # around the batches that follow.
        kind = draw.random()
        if kind < 0.3:
            when = {"after": draw.uniform(0.0, 0.15)}
        elif kind < 0.4:
            when = {"batch": 0, "rename": draw.randint(1, 2)}
        elif kind < 0.6:
            when = {"batch": reached + draw.randint(0, 3), "rename": draw.randint(1, 4)}
        else:
            when = {"batch": reached + draw.randint(1, 4), "after": draw.uniform(0.0, 0.01)}
        saver = {"folder": str(folder), "interval": "1ba", "keep_last": 2, "background": draw.random() < 0.8}
        before = batches_in(folder) if folder.exists() else []
        told = killer(kill=signal.SIGKILL, saver=saver, autoresume=str(folder), **when)
        left = batches_in(folder) if folder.exists() else []
        assert max(left, default=0) >= max(before, default=0), "the kill has cost a checkpoint"
        reached = max([told["batch"], *left])
        found["in a save"] += folder.exists() and bool(leftovers(folder))
        if told["how"] == "SIGKILL":
            found["killed"] += 1
            found["before the first batch"] += told["batch"] == 0
            found["in training"] += told["batch"] > 0
        else:
            assert told["how"] == "end", told
        if told["how"] == "end" or found["killed"] == kills:
            ended = killer(saver=saver, autoresume=str(folder))
            assert ended.get("state") == uninterrupted, f"run {run} ended otherwise: {ended.get('text')}"
            assert not leftovers(folder), "what killed processes have left is swept by the next one"
            run, reached, folder = run + 1, 0, tmp_path / str(run + 1)
    assert all(found[each] for each in ("before the first batch", "in training", "in a save")), found


class Signalled:
    """A run in this process, with a save at no other time than when a signal asks for it."""

    def __init__(self, folder: Path, others: int = 0) -> None:
        self.before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        folders = [folder, *(folder / str(index) for index in range(others))]
        data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4
        self.stream = pl.fit(
            torch.nn.Linear(2, 1),
            data,
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="2ep",
            callbacks=[CheckpointSaver(each, interval="1000ba") for each in folders],
        )

    def handlers_are_as_before(self) -> bool:
        return all(signal.getsignal(number) == handler for number, handler in self.before.items())


# The test's own thread is the main one, or Python wouldn't let it have signals.
in_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals are for the main thread"
)


@in_main_thread
def test_handlers_are_there_while_the_stream_is_and_no_longer(tmp_path: Path) -> None:
    for leave in ("end", "break", "raise", "close"):
        run = Signalled(tmp_path / leave)  # what one has left is in the way of the next
        inside = set()
        try:
            for event, state in run.stream:
                inside.add((event, run.handlers_are_as_before()))
                if state.timestamp.batch == 3 and leave == "break":
                    break
                if state.timestamp.batch == 3 and leave == "raise":
                    raise KeyError(leave)
                if state.timestamp.batch == 3 and leave == "close":
                    run.stream.close()
        except KeyError:
            pass
        run.stream.close()
        assert (Event.BATCH_START, False) in inside
        assert (Event.BATCH_START, True) not in inside
        assert run.handlers_are_as_before(), leave


@in_main_thread
@pytest.mark.parametrize("others", [0, 2])
def test_a_second_signal_acts_at_once(others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_REPEATED_SECONDS", 0.0)
    run = Signalled(tmp_path, others=others)
    seen = []

    def loop() -> None:
        for event, state in run.stream:
            seen.append((event, state.timestamp.batch))
            if event in (Event.BEFORE_FORWARD, Event.AFTER_LOSS) and state.timestamp.batch == 2:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert seen[-1] == (Event.AFTER_LOSS, 2)
    assert run.handlers_are_as_before()
    run.stream.close()
    time.sleep(0.05)  # the first one doesn't act as well
    assert batches_in(tmp_path) == []


@in_main_thread
def test_a_signal_that_a_launcher_passes_on_is_no_second_one(tmp_path: Path) -> None:
    """``timeout`` and ``torchrun`` send each child the signal that the whole process group had a moment before."""
    run = Signalled(tmp_path)

    def loop() -> None:
        for event, state in run.stream:
            if event in (Event.BEFORE_FORWARD, Event.AFTER_LOSS) and state.timestamp.batch == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        loop()
    assert batches_in(tmp_path) == [3]


@in_main_thread
def test_handlers_of_the_program_get_the_signal(tmp_path: Path) -> None:
    calls: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        run = Signalled(tmp_path)
        for event, state in run.stream:
            if event is Event.BEFORE_FORWARD and state.timestamp.batch == 2:
                signal.raise_signal(signal.SIGTERM)
                assert not calls
        assert calls == [signal.SIGTERM]
        assert batches_in(tmp_path) == [3, 8], "the run resumes, as it did without a saver"
        assert run.handlers_are_as_before()
    finally:
        signal.signal(signal.SIGTERM, old)


@in_main_thread
def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        for event, _ in Signalled(tmp_path).stream:
            if event is Event.BATCH_START:
                signal.raise_signal(signal.SIGTERM)
        assert batches_in(tmp_path) == [8]
    finally:
        signal.signal(signal.SIGTERM, old)


@in_main_thread
@pytest.mark.parametrize("leave", ["break", "return", "raise", "close", "wrapped"])
def test_a_signal_is_not_lost_when_the_loop_is_left_before_the_boundary(leave: str, tmp_path: Path) -> None:
    """A generator that is closed by ``break`` can't raise; and yet Ctrl-C is no ``break``."""

    def wrapped() -> Iterator[Any]:
        yield from Signalled(tmp_path).stream

    def loop() -> None:
        for event, state in wrapped() if leave == "wrapped" else (run := Signalled(tmp_path)).stream:
            if event is Event.BEFORE_FORWARD and state.timestamp.batch == 2:
                signal.raise_signal(signal.SIGINT)
                if leave == "return":
                    return
                if leave == "raise":
                    raise KeyError
                if leave == "close":
                    run.stream.close()
                break

    came = False
    try:
        with contextlib.suppress(KeyError):
            loop()
        for _ in range(2000):
            time.sleep(0.001)
    except KeyboardInterrupt:
        came = True
    assert came
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@in_main_thread
@pytest.mark.parametrize("catches", [False, True])
def test_ctrl_c_between_two_pairs_of_pl_run_ends_the_stream(catches: bool) -> None:
    """It doesn't stay open for as long as the traceback is there, and a generator that catches hides nothing."""
    data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4

    def stream() -> Iterator[Any]:
        ends.append("begun")
        try:
            yield from pl.fit(
                torch.nn.Linear(2, 1),
                data,
                loss=torch.nn.functional.mse_loss,
                optimizer=pl.optim.sgd(lr=0.1),
                max_duration="1ep",
            )
        except KeyboardInterrupt:
            ends.append("interrupted")
            if not catches:
                raise

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is pl.run.__code__ and event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGINT)
        return trace if frame.f_code is pl.run.__code__ else None

    for line in range(1, 20):
        ends: list[str] = []
        lines = itertools.count(1)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pl.run(stream())
        except KeyboardInterrupt:
            assert ends in ([], ["begun", "interrupted"]), line
        else:
            pytest.fail("the interrupt was lost")
        finally:
            sys.settrace(before)


@in_main_thread
def test_a_stream_closed_by_another_thread_swallows_no_signal(tmp_path: Path) -> None:
    """Nor does it fail where a loader with workers has set a handler of SIGCHLD, which only the main thread resets."""
    chld = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        run = Signalled(tmp_path)
        next(event for event, _ in run.stream if event is Event.BATCH_START)
        thread = threading.Thread(target=run.stream.close)
        thread.start()
        thread.join()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert run.handlers_are_as_before() or signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:
        Signalled(tmp_path / "next").stream.close()
        signal.signal(signal.SIGCHLD, chld)
