"""Runs that end early, beside those of the machine: by other signals, in forks and loaders, before a limit of time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint.coordination import TimeLimit
from pure_loop.errors import ArgumentError
from tests.support.checkpoint_runs import DATA, fit, messages, names, small
from tests.support.streams import assert_same
from tests.support.tiers import examples

NUMBERS: list[Any] = ["USR1", "SIGUSR1", "usr1", signal.SIGUSR1, int(signal.SIGUSR1)]
if hasattr(signal, "SIGRTMIN"):
    NUMBERS.append(signal.SIGRTMIN + 3)  # which has no name


def raises(number: int, batch: int = 5, event: Event = Event.BATCH_START) -> Any:
    def callback(current: Event, state: pl.State) -> None:
        if current is event and state.timestamp.batch == batch:
            signal.raise_signal(number)

    return callback


@pytest.mark.parametrize("written", NUMBERS)
def test_a_signal_by_its_name_or_its_number(tmp_path: Path, written: Any) -> None:
    number = int(signal.SIGUSR1) if isinstance(written, str) else int(written)
    saver = CheckpointSaver(tmp_path, interval=0, signals=[written])
    with messages() as said, pytest.raises(SystemExit) as caught:
        pl.run(fit(callbacks=raises(number), autoresume=saver))
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL
    assert names(tmp_path) == ["ep1-ba6.safetensors"]
    name = "SIGUSR1" if number == signal.SIGUSR1 else f"signal {number}"
    assert any(each.startswith(f"{name}: the State of batch 6 is saved") for each in said)
    assert_same(pl.run(fit(autoresume=saver)), pl.run(fit()), "resumed")


class Data:
    """The batches of a run, before one of which something else happens."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number, self.given = at, number, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in DATA:
            if self.given == self.at:
                signal.raise_signal(self.number)
            self.given += 1
            yield batch


def test_where_the_program_has_a_handler_of_its_own_training_goes_on(tmp_path: Path) -> None:
    calls: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        state = pl.run(fit(data=Data(3, signal.SIGTERM), autoresume=tmp_path))
    finally:
        signal.signal(signal.SIGTERM, old)
    assert calls == [signal.SIGTERM]
    assert state.timestamp.batch == 8
    assert "ep1-ba4.safetensors" in names(tmp_path)


def test_a_load_of_a_stream_inside_does_not_end_the_one_around_it(tmp_path: Path) -> None:
    """In the loop's body another stream loads its batch: the outer one waits for its own boundary."""
    seen = []

    def loop() -> None:
        for event, state in fit(autoresume=tmp_path):
            if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
                pl.run(fit(data=Data(1, signal.SIGINT)))
                seen.append("inner")

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert seen == ["inner"]
    assert len(names(tmp_path)) == 1


def how_it_ended(child: int) -> int | None:
    """The status of a process; one that doesn't end within seconds is killed, and has none."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_a_forked_process_ends_when_it_is_told_to_and_the_one_that_trains_saves(tmp_path: Path) -> None:
    def loop() -> None:
        for event, state in fit(callbacks=CheckpointSaver(tmp_path, interval="9ep")):
            if event is Event.BATCH_START and state.timestamp.batch == 1:
                # The signal comes before, at, or after the call that waits for it.
                for delay in (0.0, 0.0, 0.0, 0.001, 0.01):
                    child = os.fork()
                    if child == 0:
                        signal.pause()
                        os._exit(0)  # not reached: nothing holds the signal back here
                    time.sleep(delay)
                    os.kill(child, signal.SIGTERM)
                    assert how_it_ended(child) == signal.SIGTERM
                assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        loop()
    assert names(tmp_path) == ["ep0-ba2.safetensors"]


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return DATA[index // 4][0][index % 4], DATA[index // 4][1][index % 4]


@pytest.mark.slow  # a loader with a worker that is killed
def test_a_dead_worker_interrupts_no_batch(tmp_path: Path) -> None:
    """Torch raises its error in a handler of SIGCHLD, in any line: it has to come where a batch is loaded."""
    data = DataLoader(Slow(), batch_size=4, num_workers=1)
    seen: list[Event] = []

    def loop() -> None:
        for event, state in fit(data=data, autoresume=tmp_path):
            seen.append(event)
            if event is Event.AFTER_LOSS and state.timestamp.batch == 1:
                pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                os.kill(int(pids[-1]), signal.SIGKILL)
                time.sleep(0.3)  # not here

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        loop()
    assert seen[-1] is Event.BEFORE_DATALOADER
    assert len(names(tmp_path)) == 1
    assert getattr(signal.getsignal(signal.SIGCHLD), "__module__", "") != "pure_loop.checkpoint.signals"
    assert_same(pl.run(fit(data=data, autoresume=tmp_path)), pl.run(fit(data=data)), "resumed")


PROGRAM = """
import logging, os, signal, sys, torch, pure_loop as pl
from pure_loop import Event
folder = sys.argv[1]
{setup}

def interrupt(event, state):
    if event is Event.BEFORE_LOSS and state.timestamp.batch == 3:
        os.kill(os.getpid(), signal.SIGINT)

data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 20
savers = [pl.callbacks.CheckpointSaver(folder + "/runs", interval=0)][{first}:]
pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
              max_duration="1ep", callbacks=[interrupt, *savers]))
"""
SETUPS = {
    "no logging": "",
    "on stderr": "logging.basicConfig()",
    "switched off": "logging.disable()",
    "nowhere": 'logging.getLogger("pure_loop").addHandler(logging.NullHandler())',
    "no saver": "",
}


@pytest.mark.slow  # processes in a terminal
@pytest.mark.parametrize("setup", SETUPS)
def test_one_line_on_stderr_says_where_the_state_is_however_the_program_logs(tmp_path: Path, setup: str) -> None:
    text = PROGRAM.format(setup=SETUPS[setup], first=int(setup == "no saver"))
    command = [sys.executable, "-c", text, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (130, -2)
    assert done.stderr.count("Traceback") == 1
    note = '\ninterrupted after batch 3, and nothing is saved: with fit(..., autoresume="runs/1") Ctrl-C saves, and '
    last = f"KeyboardInterrupt{note}the same command resumes" if setup == "no saver" else "KeyboardInterrupt"
    assert done.stderr.rstrip().endswith(last)
    assert "During handling" not in done.stderr
    # The line of the loop, and where there is no saver that of the callback; no line stands there twice.
    frames = [line for line in done.stderr.splitlines() if line.startswith('  File "')]
    assert len(frames) == len(set(frames)) <= 12
    found = [line for line in done.stderr.splitlines() if "is saved in" in line]
    path = f"{tmp_path}/runs/ep0-ba4.safetensors"
    says = f"SIGINT: the State of batch 4 is saved in {path}: resume it with fit(..., load_path=...)"
    assert len(found) == (setup != "no saver")
    assert all(line.endswith(says) for line in found)


# The callbacks of a run come before the saver, so that what they take is in the next batch.


def job(
    folder: Path, limit: str, seconds: Any = lambda batch: 10.0, evaluation: int = 0, saver: Any = None, **options: Any
) -> tuple[Any, float, int]:
    """A job that takes these seconds for each batch: the last State or the exit code, its seconds, the saved batch."""
    now = 0.0

    def pass_time(event: Event, state: pl.State) -> None:
        nonlocal now
        now += seconds(state.timestamp.batch) * (event is Event.BEFORE_FORWARD) + evaluation * (event is Event.EVAL_END)

    limited: Any = CheckpointSaver(folder, interval=0, stop_before=limit)
    callbacks = [pass_time, saver] if saver else [pass_time]
    ended: Any = None
    try:
        ended = pl.run(fit(clock=lambda: now, callbacks=callbacks, autoresume=limited, **options))
    except SystemExit as error:
        ended = error.code
    path: Any = pl.latest_path(folder)
    return ended, now, pl.load(path, model=small()).timestamp.batch


def test_it_stops_while_there_is_time_for_one_batch_more(tmp_path: Path) -> None:
    assert pl.checkpoint.REQUEUE == 75
    with messages() as said:
        assert job(tmp_path, "45s") == (75, 40.0, 4)
    (line,) = said
    assert line.startswith("stop_before='45s': the State of batch 4 is saved in ")
    assert line.endswith(": the same command resumes from it")
    # The limit is of each job, so the second one has as long, and the third one has the end of the epoch left.
    assert job(tmp_path, "45s") == (75, 40.0, 8)
    state, spent, _ = job(tmp_path, "45s")
    assert spent == 0.0
    assert_same(dict(state.params), dict(pl.run(fit()).params), "resumed")


def test_where_it_stops(tmp_path: Path) -> None:
    rows = ("1h", 8, False), ("91s", 8, False), ("90s", 8, True), ("80s", 7, True), ("79s", 7, True), ("1s", 1, True)
    for limit, batches, stopped in rows:
        result, _, saved = job(tmp_path / limit, limit)
        assert (result == 75, saved) == (stopped, batches), limit
        # A duration in batches is over with the last one.
        assert job(tmp_path / f"{limit} batches", limit, max_duration=f"{batches}ba")[0] != 75
    # After batches 4 and 8 an evaluation of 30 seconds: batch 9 ends after 150 s, and with another one batch 10 would
    # end after 190 s.
    assert job(tmp_path / "a", "3m", evaluation=30, max_duration="9ep")[::2] == (75, 9)
    # The first batch compiles, and is not the measure of others.
    assert job(tmp_path / "b", "2m", seconds=lambda batch: 50.0 if batch == 0 else 10.0) == (75, 110.0, 7)


@examples(40, 1000)
@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30), st.floats(0.5, 1000.0))
def test_the_limit_holds_where_no_batch_is_longer_than_those_before(seconds: list[float], limit: float) -> None:
    state, watch, total = pl.State.create(nn.Linear(1, 1)), TimeLimit(limit, ""), 0.0
    watch.begin(state, 1)
    for number, each in enumerate(sorted(seconds, reverse=True)):
        state, total = state.count_batch(samples=1, seconds=each), total + each
        is_near = watch.is_near(state)
        # The first batch, after which one knows, is trained whatever it takes.
        assert total < limit or (number == 0 and is_near)
        if is_near:
            return


def test_a_state_that_takes_long_to_save_is_saved_earlier() -> None:
    state = pl.State.create(nn.Linear(1000, 1000))  # 4 MB, 0.04 s
    rows = ((1.0401, 1, True), (1.0399, 1, True), (2.0402, 1, False), (2.0399, 1, True), (3.0402, 2, False))
    for limit, ranks, stops in (*rows, (3.0399, 2, True)):
        watch = TimeLimit(limit, "")
        watch.begin(state, ranks)
        assert watch.is_near(state.count_batch(samples=1, seconds=1.0)) is stops


def test_weights_alone_and_scripts_need_something_to_resume_from(tmp_path: Path) -> None:
    weights = CheckpointSaver(tmp_path / "weights", weights_only=True, stop_before="1h")
    with pytest.raises(ArgumentError, match=r"weights_only=True, stop_before='1h'.*autoresume=CheckpointSaver"):
        fit(callbacks=[weights])
    fit(callbacks=[weights, CheckpointSaver(tmp_path / "whole")])
    fit(callbacks=[weights], autoresume=tmp_path / "resumed")

    def script(state: pl.State) -> Any:
        return (yield Event.FIT_END, state)

    with pytest.raises(ArgumentError, match="counts no seconds"):
        pl.drive(script(pl.State.create(small())), callbacks=[CheckpointSaver(tmp_path, stop_before="1h")])


def test_two_savers_both_save(tmp_path: Path) -> None:
    other = CheckpointSaver(tmp_path / "other", interval=0)
    with messages() as said:
        assert job(tmp_path / "runs", "45s", saver=other) == (75, 40.0, 4)
    assert str(pl.latest_path(tmp_path / "other")).endswith("-ba4.safetensors")
    assert [line.partition(":")[0] for line in said] == ["stop_before='45s'", "stop_before"]
