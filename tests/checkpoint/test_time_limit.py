"""``stop_before``: a run saves and ends before the time limit of its job, and the next job resumes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint.coordination import TimeLimit
from tests.support import streams as sameness
from tests.support.checkpoint_runs import fit, messages, small
from tests.support.sharding import network, pool, train, whole

# The callbacks of a run come before the saver, so that what they take is in the next batch.


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def job(folder: Path, limit: str, *, seconds: Callable[[int], float] = lambda batch: 10.0, **options: Any) -> Any:
    """A job of 8 batches that takes these seconds for each of them; the last State, or the exit code."""
    clock = Clock()

    def pass_time(event: Event, state: pl.State) -> None:
        if event is Event.BEFORE_FORWARD:
            clock.now += seconds(state.timestamp.batch)
        if event is Event.EVAL_END:
            clock.now += options.get("evaluation", 0.0)

    settings = {name: value for name, value in options.items() if name != "evaluation"}
    saver = CheckpointSaver(folder, interval=0, stop_before=limit)
    try:
        state = pl.run(fit(small(), clock=clock, callbacks=pass_time, autoresume=saver, **settings))
    except SystemExit as error:
        return error.code, clock.now - 1000.0
    return state, clock.now - 1000.0


def saved_batch(folder: Path) -> int:
    path = pl.latest(folder)
    assert path is not None
    return pl.load(path, model=small()).timestamp.batch


def test_it_stops_while_there_is_time_for_one_batch_more(tmp_path: Path) -> None:
    with messages() as said:
        assert job(tmp_path, "45s") == (pl.checkpoint.REQUEUE, 40.0) == (75, 40.0)
    assert saved_batch(tmp_path) == 4
    assert len(said) == 1
    assert said[0].startswith("stop_before='45s': the State of batch 4 is saved in ")
    assert said[0].endswith(": the same command resumes from it")
    # The limit is of each job, so the second one has as long, and the third one has the end of the epoch left.
    assert job(tmp_path, "45s") == (75, 40.0)
    assert saved_batch(tmp_path) == 8
    state, spent = job(tmp_path, "45s")
    assert spent == 0.0
    wanted = pl.run(fit(small()))
    assert state.params.keys() == wanted.params.keys()
    assert all(torch.equal(tensor, wanted.params[name]) for name, tensor in state.params.items())


@pytest.mark.parametrize(
    ("limit", "batches", "stopped"),
    [("1h", 8, False), ("91s", 8, False), ("90s", 8, True), ("80s", 7, True), ("79s", 7, True), ("1s", 1, True)],
)
def test_where_it_stops(tmp_path: Path, limit: str, batches: int, stopped: bool) -> None:
    result, _ = job(tmp_path, limit)
    assert (result == 75) == stopped
    assert saved_batch(tmp_path) == batches
    # A duration in batches is over with the last one.
    assert job(tmp_path / "batches", limit, max_duration=f"{batches}ba")[0] != 75


def test_evaluations_and_slow_batches_count(tmp_path: Path) -> None:
    # After batches 4 and 8 an evaluation of 30 seconds: batch 9 ends after 150 s, and with another one batch 10 would
    # end after 190 s.
    assert job(tmp_path / "a", "3m", evaluation=30.0, max_duration="9ep")[0] == 75
    assert saved_batch(tmp_path / "a") == 9
    # The first batch compiles, and is not the measure of others.
    code, spent = job(tmp_path / "b", "2m", seconds=lambda batch: 50.0 if batch == 0 else 10.0)
    assert (code, spent, saved_batch(tmp_path / "b")) == (75, 110.0, 7)


@settings(max_examples=40)
@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30), st.floats(0.5, 1000.0))
def test_the_limit_holds_where_no_batch_is_longer_than_those_before(seconds: list[float], limit: float) -> None:
    seconds = sorted(seconds, reverse=True)
    state = pl.State.create(nn.Linear(1, 1))
    watch = TimeLimit(limit, "")
    watch.begin(state, 1)
    total = 0.0
    for number, each in enumerate(seconds):
        state, total = state.count_batch(samples=1, seconds=each), total + each
        if watch.is_near(state):
            # The first batch, after which one knows, is trained whatever it takes.
            assert number == 0 or total < limit
            break
        assert total < limit
    else:
        assert total < limit


def test_a_state_that_takes_long_to_save_is_saved_earlier() -> None:
    state = pl.State.create(nn.Linear(1000, 1000))  # 4 MB, 0.04 s
    for limit, stops in ((1.0401, True), (1.0399, True), (2.0402, False), (2.0399, True)):
        watch = TimeLimit(limit, "")
        watch.begin(state, 1)
        assert watch.is_near(state.count_batch(samples=1, seconds=1.0)) is stops


def test_weights_alone_are_nothing_to_resume_from(tmp_path: Path) -> None:
    weights = CheckpointSaver(tmp_path / "weights", weights_only=True, stop_before="1h")
    with pytest.raises(pl.ArgumentError, match=r"weights_only=True, stop_before='1h'.*autoresume=CheckpointSaver"):
        fit(small(), callbacks=[weights])
    fit(small(), callbacks=[weights, CheckpointSaver(tmp_path / "whole")])
    fit(small(), callbacks=[weights], autoresume=tmp_path / "resumed")


def test_a_script_counts_no_seconds(tmp_path: Path) -> None:
    def script(state: pl.State) -> Any:
        return (yield Event.FIT_END, state)

    with pytest.raises(pl.ArgumentError, match="counts no seconds"):
        pl.drive(script(pl.State.create(small())), callbacks=[CheckpointSaver(tmp_path, stop_before="1h")])


def test_two_savers_both_save(tmp_path: Path) -> None:
    clock = Clock()

    def pass_time(event: Event, state: pl.State) -> None:
        clock.now += 10.0 * (event is Event.BATCH_START)

    other = CheckpointSaver(tmp_path / "other", interval=0)
    saver = CheckpointSaver(tmp_path / "runs", interval=0, stop_before="45s")
    with pytest.raises(SystemExit) as caught, messages() as said:
        pl.run(fit(small(), clock=clock, callbacks=[pass_time, other], autoresume=saver))
    assert caught.value.code == 75
    assert saved_batch(tmp_path / "other") == saved_batch(tmp_path / "runs") == 4
    assert [line.partition(":")[0] for line in said] == ["stop_before='45s'", "stop_before"]


@pytest.mark.slow  # real ranks
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_all_ranks_stop_at_one_boundary(tmp_path: Path, kind: str) -> None:
    def program(rank: int) -> tuple[Any, int, Any]:
        clock, last = Clock(), 0

        def pass_time(event: Event, state: pl.State) -> None:
            nonlocal last
            # The clocks of ranks differ.
            clock.now += (10.0 + rank) * (event is Event.BATCH_START)
            last = state.timestamp.batch

        pass_time.all_ranks = True  # type: ignore[attr-defined]
        saver = CheckpointSaver(tmp_path, interval=0, stop_before="50s")
        options: dict[str, Any] = {"parallel": kind, "clock": clock, "callbacks": pass_time}
        try:
            pl.run(train(network(), autoresume=saver, **options))
        except SystemExit as error:
            code = error.code
        assert pl.latest(tmp_path) is not None  # on each rank, as soon as it ends
        at = last
        rest = whole(pl.run(train(network(), parallel=kind, autoresume=tmp_path)))
        return code, at, rest

    results = pool().run(program)
    assert [result[0] for result in results] == [75, 75]
    assert results[0][1] == results[1][1] < 8
    wanted = pool().run(lambda rank: whole(pl.run(train(network(), parallel=kind))))[0]
    sameness.assert_same(results[0][2], wanted, kind)


def test_the_program_ends_with_the_code(tmp_path: Path) -> None:
    import subprocess

    text = f"""
import itertools, torch, pure_loop as pl
clock = itertools.count(0.0, 10.0)
data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 20
saver = pl.callbacks.CheckpointSaver({str(tmp_path)!r}, stop_before="1m")
pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
              max_duration="1ep", autoresume=saver, clock=lambda: next(clock)))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 75
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("stop_before='1m': the State of batch ")
