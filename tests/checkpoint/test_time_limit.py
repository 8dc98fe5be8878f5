"""``stop_before``: a run saves and ends before the time limit of its job, and the next job resumes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint.coordination import TimeLimit
from tests.support.checkpoint_runs import fit, messages, small
from tests.support.streams import assert_same
from tests.support.tiers import examples

# The callbacks of a run come before the saver, so that what they take is in the next batch.


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def job(
    folder: Path,
    limit: str,
    *,
    seconds: Callable[[int], float] = lambda batch: 10.0,
    evaluation: float = 0.0,
    **options: Any,
) -> tuple[Any, float, int]:
    """A job that takes these seconds for each batch: the last State or the exit code, its seconds, the saved batch."""
    clock = Clock()

    def pass_time(event: Event, state: pl.State) -> None:
        clock.now += seconds(state.timestamp.batch) * (event is Event.BEFORE_FORWARD)
        clock.now += evaluation * (event is Event.EVAL_END)

    saver = CheckpointSaver(folder, interval=0, stop_before=limit)
    ended: Any = None
    try:
        ended = pl.run(fit(clock=clock, **{"callbacks": pass_time, "autoresume": saver, **options}))
    except SystemExit as error:
        ended = error.code
    path: Any = pl.latest(folder)
    return ended, clock.now - 1000.0, pl.load(path, model=small()).timestamp.batch


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
    assert job(tmp_path / "a", "3m", evaluation=30.0, max_duration="9ep")[::2] == (75, 9)
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
    with pytest.raises(pl.ArgumentError, match=r"weights_only=True, stop_before='1h'.*autoresume=CheckpointSaver"):
        fit(callbacks=[weights])
    fit(callbacks=[weights, CheckpointSaver(tmp_path / "whole")])
    fit(callbacks=[weights], autoresume=tmp_path / "resumed")

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
        pl.run(fit(clock=clock, callbacks=[pass_time, other], autoresume=saver))
    assert caught.value.code == 75
    for folder in ("other", "runs"):
        assert str(pl.latest(tmp_path / folder)).endswith("-ba4.safetensors")
    assert [line.partition(":")[0] for line in said] == ["stop_before='45s'", "stop_before"]
