"""``pl.diff`` of two recorded runs: the last State that both kept alike, one run from there, and the operation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.tools import diff as tool

ROWS = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
DATA = [(ROWS[start : start + 8], ROWS[start : start + 8, :3].argmax(1)) for start in range(0, 96, 8)]
CALLBACK = pl.callbacks.FlightRecorder


def model(activation: nn.Module | None = None) -> nn.Module:
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(6, 8), activation or nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def changed_from(batch: int) -> Any:
    return pl.optim.adamw(lr=lambda t: 1e-2 if t.batch < batch else 2e-2)


def record(folder: Path, **settings: Any) -> tuple[Any, nn.Module, Any]:
    arguments = {"loss": cross_entropy, "optimizer": changed_from(99), "max_duration": "3ep", **settings}
    recorder = CALLBACK(folder, keep=arguments.pop("keep", "5ba"), digest=arguments.pop("digest", 0))
    pl.run(pl.fit(model(), DATA, callbacks=[recorder], **arguments))
    return folder, model(), lambda state: pl.fit(state, DATA, **arguments)


@given(st.integers(0, 35), st.sampled_from(["5ba", "7ba"]), st.sampled_from([0, "4ba"]))
@settings(max_examples=6, deadline=None)
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


def test_runs_that_are_the_same(tmp_path: Path) -> None:
    assert pl.diff(record(tmp_path / "a"), record(tmp_path / "b")) is None


def test_states_that_differ_at_the_start(tmp_path: Path) -> None:
    where = pl.diff(record(tmp_path / "a"), record(tmp_path / "b", seed=1))
    assert where is not None
    assert (where.by, where.leaf, where.timestamp.batch) == ("start", "seed", 0)


def test_an_operation_is_named(tmp_path: Path) -> None:
    def gelu(approximate: str) -> Any:
        return pl.fit(
            model(nn.GELU(approximate)), DATA, loss=cross_entropy, optimizer=pl.optim.adamw(lr=1e-2), max_duration="1ep"
        )

    where = pl.diff(gelu("none"), gelu("tanh"), operations=True)
    assert where is not None
    assert where.operation is not None
    assert where.operation.startswith("aten.gelu.default")
    assert "other tensors" not in where.operation
    assert where.operation in str(where)
    assert pl.diff(gelu("none"), gelu("none"), operations=True) is None


def test_masks_that_are_drawn_are_no_operation_that_differs() -> None:
    def dropped(factor: float) -> Any:
        class Scaled(nn.Module):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return (inputs * factor).tanh()

        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), Scaled(), nn.Linear(8, 3))
        return pl.fit(net, DATA, loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")

    for _ in range(3):
        runs = []
        for factor in (1.0, 1.01):
            with pl.random.seeded(0):
                runs.append(dropped(factor))
        where = pl.diff(*runs, operations=True)
        assert where is not None
        assert where.operation is not None
        assert where.operation.startswith("aten.mul.Tensor")


def test_streams_that_are_not_those_of_the_state(tmp_path: Path) -> None:
    a = record(tmp_path / "a")
    with pytest.raises(pl.ArgumentTypeError, match=r"make\(state\) of .* returned a int"):
        pl.diff(a, (a[0], a[1], lambda state: 1))  # type: ignore[arg-type,return-value]
    b = record(tmp_path / "b", optimizer=changed_from(12))
    with pytest.raises(pl.ArgumentError, match="was given the State after 10 batches, and its stream begins elsewhere"):
        pl.diff(a, (b[0], b[1], lambda state: b[2](model())))
    with pytest.raises(pl.ArgumentTypeError, match=r"write each as \(folder, model, make\)"):
        pl.diff(str(tmp_path / "a"), str(tmp_path / "b"))  # type: ignore[arg-type]


def test_a_difference_that_does_not_come_back(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b", optimizer=changed_from(12))
    with pytest.raises(pl.RewindError, match="differ with 14 batches finished, and trained again from 10 on"):
        pl.diff(a, (b[0], b[1], a[2]))


def test_a_recorded_operation_of_the_guilty_batch(tmp_path: Path) -> None:
    def scaled(factor: float) -> pl.Algorithm:
        def apply(state: pl.State) -> pl.State:
            return state.replace(loss=state.loss * (factor if state.timestamp.batch == 13 else 1.0))

        return pl.algorithm("after_loss", name="scaled")(apply)

    runs = [record(tmp_path / str(factor), algorithms=[scaled(factor)]) for factor in (1.0, 2.0)]
    where = pl.diff(*runs, operations=True)
    assert where is not None
    assert (where.by, where.timestamp.batch, where.leaf) == ("scaled", 13, "loss")
    assert where.operation is not None
    assert where.operation.startswith("aten.mul.Tensor")


def test_what_is_refused(tmp_path: Path) -> None:
    a = record(tmp_path / "a")
    stream = pl.fit(model(), DATA, loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")
    with pytest.raises(pl.ArgumentTypeError, match="A stream can only be compared with a stream"):
        pl.diff(a, stream)
    with pytest.raises(pl.ArgumentTypeError, match="has a str and a function"):
        pl.diff(a, (a[0], "model", a[2]))  # type: ignore[arg-type]
    with pytest.raises(pl.CheckpointNotFoundError):
        pl.diff(a, (tmp_path / "none", a[1], a[2]))
    resumed = CALLBACK(tmp_path / "c", keep="99ba")
    later = next(state for event, state in a[2](model()) if event is pl.Event.BATCH_END and state.timestamp.batch == 7)
    settings = {"loss": cross_entropy, "optimizer": changed_from(99), "max_duration": "2ep"}
    pl.run(pl.fit(later, DATA, callbacks=[resumed], **settings))
    with pytest.raises(pl.ArgumentError, match="b those after 7, 24 batches"):
        pl.diff(a, (tmp_path / "c", a[1], a[2]))
