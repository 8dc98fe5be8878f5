"""Signals to a run in this process: when they act, whose handler they get to, and that none is lost."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import signals
from tests.support.problem import fit, points

# The test's own thread is the main one, or Python wouldn't let it have signals.
pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals are for the main thread"
)
BOTH = (signal.SIGTERM, signal.SIGINT)


def saved(folder: Path) -> list[int]:
    return sorted(int(each.stem.rpartition("ba")[2]) for each in folder.glob("ep*-ba*.safetensors"))


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in BOTH]


def stream(folder: Path, others: int = 0) -> pl.Stream:
    """A run of 8 batches with a save at no other time than when a signal asks for it, and at the end."""
    folders = [folder, *(folder / str(index) for index in range(others))]
    return fit(data=points(4), callbacks=[CheckpointSaver(each, interval="1000ba") for each in folders])


def signalled(pairs: Any, number: int, *events: Event) -> list[tuple[Event, int]]:
    """The events of a run that is signalled in its third batch."""
    seen = []
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        for event, state in pairs:
            seen.append((event, state.timestamp.batch))
            if event in events and state.timestamp.batch == 2:
                signal.raise_signal(number)
        seen.append((event, -1))  # nothing ended it
    return seen


def test_handlers_are_there_while_the_stream_is_and_no_longer(tmp_path: Path) -> None:
    before = handlers()
    for leave in ("end", "break", "raise", "close"):
        run = stream(tmp_path / leave)  # what one has left is in the way of the next
        with contextlib.suppress(KeyError):
            for event, state in run:
                assert event is not Event.BATCH_START or not set(handlers()) & set(before)
                if state.timestamp.batch == 3 and leave == "break":
                    break
                if state.timestamp.batch == 3 and leave == "raise":
                    raise KeyError(leave)
                if state.timestamp.batch == 3 and leave == "close":
                    run.close()
        run.close()
        assert handlers() == before, leave


@pytest.mark.parametrize("others", [0, 2])
def test_a_second_signal_acts_at_once_but_one_that_a_launcher_passes_on_is_no_second_one(
    others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``timeout`` and ``torchrun`` send each child the signal that the whole process group had a moment before."""
    before, twice = handlers(), (Event.BEFORE_FORWARD, Event.AFTER_LOSS)
    assert signalled(stream(tmp_path / "launched", others), signal.SIGTERM, *twice)[-1][1] == 3
    assert saved(tmp_path / "launched") == [3]
    monkeypatch.setattr(signals, "_REPEATED_SECONDS", 0.0)
    run = stream(tmp_path, others)
    assert signalled(run, signal.SIGINT, *twice)[-1] == (Event.AFTER_LOSS, 2)
    assert handlers() == before
    run.close()
    time.sleep(0.05)  # the first one doesn't act as well
    assert saved(tmp_path) == []


def test_handlers_of_the_program_get_the_signal_and_one_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    calls: list[int] = []
    own = lambda number, frame: calls.append(number)  # noqa: E731
    for handler, number, batches in ((own, 1, [3, 8]), (signal.SIG_IGN, 0, [8])):
        old = signal.signal(signal.SIGTERM, handler)
        try:
            run = signalled(stream(tmp_path / str(number)), signal.SIGTERM, Event.BEFORE_FORWARD)
            assert run[-1] == (Event.FIT_END, -1), "the run resumes, as it did without a saver"
            assert calls == [signal.SIGTERM]
            assert saved(tmp_path / str(number)) == batches
            assert signal.getsignal(signal.SIGTERM) is handler
        finally:
            signal.signal(signal.SIGTERM, old)


def left(leave: str, folder: Path) -> None:
    """Leave the loop in a batch in which a signal came."""

    def wrapped() -> Iterator[Any]:
        yield from stream(folder)

    run = stream(folder)
    for event, state in wrapped() if leave == "wrapped" else run:
        if event is Event.BEFORE_FORWARD and state.timestamp.batch == 2:
            signal.raise_signal(signal.SIGINT)
            if leave == "return":
                return
            if leave == "raise":
                raise KeyError
            if leave == "close":
                run.close()
            break


def test_a_signal_is_not_lost_when_the_loop_is_left_before_the_boundary(tmp_path: Path) -> None:
    """A generator that is closed by ``break`` can't raise; and yet Ctrl-C is no ``break``."""
    for leave in ("break", "return", "raise", "close", "wrapped"):
        came = False
        try:
            with contextlib.suppress(KeyError):
                left(leave, tmp_path / leave)
            for _ in range(2000):
                time.sleep(0.001)
        except KeyboardInterrupt:
            came = True
        assert came, leave
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_between_two_pairs_of_pl_run_ends_the_stream() -> None:
    """It doesn't stay open for as long as the traceback is there, and a generator that catches hides nothing."""

    def pairs(catches: bool) -> Iterator[Any]:
        ends.append("begun")
        try:
            yield from fit(max_duration="1ep")
        except KeyboardInterrupt:
            ends.append("interrupted")
            if not catches:
                raise

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is pl.run.__code__ and event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGINT)
        return trace if frame.f_code is pl.run.__code__ else None

    for line, catches in itertools.product(range(1, 20), (False, True)):
        ends: list[str] = []
        lines = itertools.count(1)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pl.run(pairs(catches))
        except KeyboardInterrupt:
            assert ends in ([], ["begun", "interrupted"]), line
        else:
            pytest.fail("the interrupt was lost")
        finally:
            sys.settrace(before)


def test_a_stream_closed_by_another_thread_swallows_no_signal(tmp_path: Path) -> None:
    """Nor does it fail where a loader with workers has set a handler of SIGCHLD, which only the main thread resets."""
    child, before = signal.signal(signal.SIGCHLD, lambda number, frame: None), handlers()
    try:
        run = stream(tmp_path)
        next(event for event, _ in run if event is Event.BATCH_START)
        thread = threading.Thread(target=run.close)
        thread.start()
        thread.join()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert handlers() == before
    finally:
        stream(tmp_path / "next").close()
        signal.signal(signal.SIGCHLD, child)
