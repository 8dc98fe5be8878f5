"""What a NonFiniteError names: what was first not finite, in which rows, and what to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.compile import interpreted

INPUTS, TARGETS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3


class Logarithm(nn.Module):
    """Not finite for rows with a negative number."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.log()


class Norm(nn.Module):
    """Of 0 it is finite, and has no derivative."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.square().sum(1, keepdim=True).sqrt() * torch.ones(3)


def model() -> nn.Module:
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def error_of(net: nn.Module, data: Any, **settings: Any) -> pl.NonFiniteError:
    arguments: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.adamw(lr=1e-2),
        "max_duration": "1ep",
        **settings,
    }
    with pytest.raises(pl.NonFiniteError) as caught:
        pl.run(pl.fit(net, data, **arguments))
    return caught.value


def with_row(row: int, value: float) -> torch.Tensor:
    inputs = INPUTS.clone()
    inputs[row, 2] = value
    return inputs


@given(st.integers(0, 31), st.sampled_from([math.nan, math.inf]), st.sampled_from([None, 5, 32]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_a_row_of_the_batch(row: int, value: float, size: int | None, donate: bool) -> None:
    data = [(INPUTS, TARGETS), (with_row(row, value), TARGETS)]
    error = error_of(model(), data, microbatch_size=size, donate="auto" if donate else False)
    assert (error.index, error.kind, error.name, error.rows) == (1, "batch", "0", (row,))
    assert error.batch is data[1]
    assert "learning rate helps" in str(error)
    assert "Lower the learning rate" not in str(error)


@given(st.sets(st.integers(0, 31), min_size=1, max_size=4), st.sampled_from([None, 5]))
@settings(max_examples=8, deadline=None)
def test_rows_of_the_output_of_a_module(rows: set[int], size: int | None) -> None:
    inputs = INPUTS.abs() + 0.1
    inputs[sorted(rows), 1] = -1.0
    error = error_of(
        nn.Sequential(nn.Identity(), Logarithm(), nn.Linear(4, 3)), [(inputs, TARGETS)], microbatch_size=size
    )
    first = min(rows) // 5 if size else 0
    expected = tuple(sorted(row for row in rows if not size or row // 5 == first))
    assert (error.kind, error.name, error.rows) == ("output", "1", expected)
    assert "module '1' (Logarithm)" in str(error)
    # The State before the update: its parameters can be looked at.
    assert error.state is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in error.state.params.values())
    assert error.state.batch[0] is inputs


def test_a_parameter_that_was_so_before() -> None:
    net = model()
    with torch.no_grad():
        net[3].weight[0, 0] = math.nan  # type: ignore[union-attr,index,operator]
    error = error_of(net, [(INPUTS, TARGETS)])
    assert (error.kind, error.name) == ("parameter", "3.weight")


def test_the_loss_of_finite_outputs() -> None:
    error = error_of(model(), [(INPUTS, torch.full_like(TARGETS, -100))])
    assert (error.kind, error.rows) == ("loss", ())
    assert "the loss of rows 0 to 31 of the batch" in str(error)


def test_a_loss_that_an_algorithm_made() -> None:
    @pl.algorithm(pl.Event.AFTER_LOSS)
    def broken(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * math.nan)

    assert error_of(model(), [(INPUTS, TARGETS)], algorithms=[broken]).kind == "algorithm"


@pytest.mark.parametrize("donate", ["auto", False])
def test_a_gradient(donate: Any) -> None:
    inputs = INPUTS.clone()
    inputs[3] = 0
    net = nn.Sequential(nn.Linear(4, 8, bias=False), Norm())
    error = error_of(net, [(inputs, TARGETS)], donate=donate)
    assert (error.kind, error.name) == ("gradient", "0.weight")
    # A step that was written in place has no parameters from before it.
    assert (error.state is None) == (donate == "auto")


def test_a_gradient_before_a_norm_made_all_of_them_nan() -> None:
    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            return self.last(hidden + (hidden * 0).abs().sqrt())

    for options in ({}, {"clip_grad": 1.0}):
        assert error_of(Middle(), [(INPUTS, TARGETS)], **options).name == "first.bias"


def test_masks_are_no_cause() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)
            self.fill = nn.Threshold(-1e9, -math.inf)
            self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            scores = self.fill(self.first(inputs)[:, None] + self.mask)
            return self.last(scores.softmax(-1).sum(1))

    data = [(INPUTS, TARGETS)]
    assert error_of(Masked(), data, loss=lambda out, y: cross_entropy(out, y) * math.inf).kind == "loss"
    # A mask in the batch beside targets that are NaN.
    batch = {"x": INPUTS, "mask": torch.full((32,), -math.inf), "y": torch.full((32, 3), math.nan)}
    task = pl.Task(forward=lambda module, item: module(item["x"]), loss=lambda out, item: (out - item["y"]).mean())
    error = error_of(Masked(), [batch], loss=None, task=task)
    assert (error.kind, error.name) == ("batch", "y")


def test_buffers_are_those_of_before_the_batch() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    inputs = INPUTS.clone()
    inputs[5] = 1e30  # whose variance overflows
    spoiled = error_of(
        net, [(INPUTS, TARGETS), (inputs, TARGETS)], loss=lambda out, y: cross_entropy(out, y) * math.nan
    )
    assert spoiled.kind == "loss"
    with torch.no_grad():
        net[0].running_mean.fill_(math.nan)  # type: ignore[union-attr,operator]
    before = error_of(net, [(INPUTS, TARGETS)], loss=lambda out, y: cross_entropy(out, y) * math.nan)
    assert (before.kind, before.name) == ("buffer", "0.running_mean")


def test_a_step() -> None:
    error = error_of(nn.Linear(4, 3), [(1e4 * INPUTS, TARGETS)], optimizer=pl.optim.sgd(lr=3e38))
    assert (error.kind, error.index) == ("step", 0)


def test_a_forward_that_raises_when_repeated() -> None:
    class Once(nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            Once.calls += 1
            if Once.calls > 1:
                raise RuntimeError("called twice")
            return super().forward(inputs).log()

    error = error_of(Once(4, 3), [(INPUTS, TARGETS)])
    assert error.kind is None
    assert "RuntimeError: called twice" in str(error)


def test_batches_of_a_step_count_their_rows_together() -> None:
    error = error_of(model(), [(INPUTS, TARGETS), (with_row(5, math.nan), TARGETS)], batches_per_step=2)
    assert error.rows == (37,)


def test_a_compiled_step_names_a_batch_that_is_not_finite() -> None:
    with interpreted():
        error = error_of(model(), [(INPUTS, TARGETS), (with_row(5, math.nan), TARGETS)], compile=True, watch=set())
    assert (error.index, error.kind, error.rows) == (1, "batch", (5,))


def test_the_line_is_of_the_run_that_failed(tmp_path: Path) -> None:
    """A run that is started where the error of another one is handled adds no line of its own to it."""
    data = [(INPUTS, TARGETS), (with_row(5, math.nan), TARGETS)]
    settings = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=1e-2), "max_duration": "1ep"}
    caught: pl.NonFiniteError | None = None
    try:
        pl.run(pl.fit(model(), data, callbacks=[pl.callbacks.FlightRecorder(tmp_path / "a")], **settings))
    except pl.NonFiniteError as error:
        caught = error
        pl.run(pl.fit(model(), data[:1], callbacks=[pl.callbacks.FlightRecorder(tmp_path / "b")], **settings))
    assert caught is not None
    (note,) = caught.__notes__
    assert str(tmp_path / "a") in note


def test_the_line_that_rewinds(tmp_path: Path) -> None:
    data = [(INPUTS, TARGETS), (with_row(5, math.nan), TARGETS)]
    error = error_of(model(), data, callbacks=[pl.callbacks.FlightRecorder(tmp_path)])
    assert f'pl.rewind({str(tmp_path)!r}, "1ba", "batch_start"' in error.__notes__[0]
    settings = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=1e-2), "max_duration": "1ep"}
    event, state = next(pl.rewind(tmp_path, "1ba", "batch_start", model(), data, **settings))
    assert event is pl.Event.BATCH_START
    assert state.batch is data[1]
