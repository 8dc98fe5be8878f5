"""``pl.diff`` of two recorded runs: the last State that both kept alike, one run from there, and the operation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.callbacks import FlightRecorder
from pure_loop.tools import diff as tool
from tests.support import problem

DATA = problem.points(12)


def changed_from(batch: int) -> Any:
    return pl.optim.adamw(lr=lambda t: 1e-2 if t.batch < batch else 2e-2)


def record(folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    arguments = {"optimizer": changed_from(99), "max_duration": "3ep", "strict": False, **settings}
    recorder = FlightRecorder(folder, keep=arguments.pop("keep", "5ba"), digest=arguments.pop("digest", 0))
    problem.run(problem.noisy(), DATA, callbacks=[recorder], **arguments)
    return folder, problem.noisy(), lambda state: problem.fit(state, DATA, **arguments)


@given(st.integers(0, 35), st.sampled_from(["5ba", "7ba"]), st.sampled_from([0, "4ba"]))
@settings(max_examples=4)
def test_the_batch_and_the_stage_are_named(batch: int, keep: str, digest: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        a = record(Path(folder, "a"), keep=keep, digest=digest)
        b = record(Path(folder, "b"), keep=keep, digest=digest, optimizer=changed_from(batch))
        where = pl.diff(a, b)
    assert where is not None
    assert (where.event, where.by, where.leaf) == (pl.Event.BATCH_END, "optimizer", "params/0.weight")
    assert where.timestamp.batch == batch + 1


def test_few_states_are_read_and_one_segment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = record(tmp_path / "a", keep="1ba")
    folder, net, make = record(tmp_path / "b", keep="1ba", optimizer=changed_from(29))
    read, batches = [], []
    load = tool.load
    monkeypatch.setattr(tool, "load", lambda path, **options: (read.append(path), load(path, **options))[1])

    def counted(state: pl.State) -> Any:
        batches.append(state.timestamp.batch)
        return make(state)

    assert pl.diff(a, (folder, net, counted)) is not None
    assert batches == [29]
    assert len(read) <= 2 * 8  # two a comparison: log2(37) + 2 comparisons, and those that are trained from


def scaled(factor: float) -> pl.Algorithm:
    def apply(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * (factor if state.timestamp.batch == 13 else 1.0))  # type: ignore[operator, arg-type]

    return pl.algorithm("after_loss", name="scaled")(apply)


def test_runs_that_are_the_same_that_start_apart_and_an_operation(tmp_path: Path) -> None:
    a = record(tmp_path / "a")
    assert pl.diff(a, record(tmp_path / "b")) is None
    where = pl.diff(a, record(tmp_path / "c", seed=1))
    assert where is not None
    assert (where.by, where.leaf, where.timestamp.batch) == ("start", "seed", 0)
    # Masks that are drawn are no operation that differs.
    runs = [record(tmp_path / str(factor), algorithms=[scaled(factor)]) for factor in (1.0, 2.0)]
    where = pl.diff(*runs, operations=True)
    assert where is not None
    assert (where.by, where.timestamp.batch, where.leaf) == ("scaled", 13, "loss")
    assert str(where.operation).startswith("aten.mul.Tensor")


def test_what_is_refused(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b", optimizer=changed_from(12))
    later = next(state for event, state in a[2](a[1]) if event is pl.Event.BATCH_END and state.timestamp.batch == 7)
    problem.run(later, DATA, callbacks=[FlightRecorder(tmp_path / "c", keep="99ba")], optimizer=changed_from(99))
    for other, error, says in (
        ((a[0], a[1], lambda state: 1), pl.ArgumentTypeError, r"make\(state\) of .* returned a int"),
        ((b[0], b[1], lambda _: b[2](b[1])), pl.ArgumentError, "after 10 batches, and its stream begins elsewhere"),
        (str(tmp_path / "b"), pl.ArgumentTypeError, "a stream|write each as"),
        # A difference that does not come back.
        ((b[0], b[1], a[2]), pl.RewindError, "differ with 14 batches finished, and trained again from 10 on"),
        (problem.fit(), pl.ArgumentTypeError, "A stream can only be compared with a stream"),
        ((a[0], "model", a[2]), pl.ArgumentTypeError, "has a str and a function"),
        ((tmp_path / "none", a[1], a[2]), pl.CheckpointNotFoundError, "none"),
        ((tmp_path / "c", a[1], a[2]), pl.ArgumentError, "b those after 7, 24 batches"),
    ):
        with pytest.raises(error, match=says):
            pl.diff(a, other)
