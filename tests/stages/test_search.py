"""What a NonFiniteError names: what was first not finite, in which rows, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.compile import interpreted

INPUTS, TARGETS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
SETTINGS: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=1e-2), "max_duration": "1ep"}
PAIR = (INPUTS, TARGETS)


class Made(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


def model() -> Any:
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def error_of(net: nn.Module, data: Any, **options: Any) -> pl.errors.NonFiniteError:
    with pytest.raises(pl.errors.NonFiniteError) as caught:
        pl.run(pl.fit(net, data, **SETTINGS | options))
    return caught.value


def found(net: nn.Module, data: Any, **options: Any) -> tuple[Any, ...]:
    error = error_of(net, data, **options)
    return error.kind, error.name, error.rows


def with_row(row: int, value: float, column: int | slice = 2) -> tuple[Tensor, Tensor]:
    inputs = INPUTS.clone()
    inputs[row, column] = value
    return inputs, TARGETS


@given(st.integers(0, 31), st.sampled_from([math.nan, math.inf]), st.sampled_from([None, 5, 32]), st.booleans())
@settings(max_examples=6)
def test_a_row_of_the_batch(row: int, value: float, size: int | None, donate: bool) -> None:
    data = [PAIR, with_row(row, value)]
    error = error_of(model(), data, microbatch_size=size, donate="auto" if donate else False)
    assert (error.index, error.kind, error.name, error.rows) == (1, "batch", "0", (row,))
    assert error.batch is data[1]
    assert "learning rate helps" in str(error)
    assert "Lower the learning rate" not in str(error)


@given(st.sets(st.integers(0, 31), min_size=1, max_size=4), st.sampled_from([None, 5]))
@settings(max_examples=6)
def test_rows_of_the_output_of_a_module(rows: set[int], size: int | None) -> None:
    inputs = INPUTS.abs() + 0.1
    inputs[sorted(rows), 1] = -1.0
    net = nn.Sequential(nn.Identity(), Made(torch.log), nn.Linear(4, 3))
    error = error_of(net, [(inputs, TARGETS)], microbatch_size=size)
    first = min(rows) // 5 if size else 0
    expected = tuple(sorted(row for row in rows if not size or row // 5 == first))
    assert (error.kind, error.name, error.rows) == ("output", "1", expected)
    assert "module '1' (Made)" in str(error)
    # The State before the update: its parameters can be looked at.
    assert error.state is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in error.state.params.values())
    assert error.state.batch[0] is inputs


def with_nan(tensor: Any) -> None:
    tensor.data[0] = math.nan


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.fill = nn.Linear(4, 3), nn.Linear(3, 3), nn.Threshold(-1e9, -math.inf)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, inputs: Tensor) -> Any:
        return self.last(self.fill(self.first(inputs)[:, None] + self.mask).softmax(-1).sum(1))


def times(factor: float) -> Any:
    return lambda outputs, targets: cross_entropy(outputs, targets) * factor


def test_what_was_so_before_the_batch_and_what_is_no_cause() -> None:
    net = model()
    with_nan(net[3].weight)
    assert found(net, [PAIR])[:2] == ("parameter", "3.weight")
    # Masks are no cause, neither in a model nor in the batch beside targets that are NaN.
    assert found(Masked(), [PAIR], loss=times(math.inf))[0] == "loss"
    batch = {"x": INPUTS, "mask": torch.full((32,), -math.inf), "y": torch.full((32, 3), math.nan)}
    task = pl.Task(forward=lambda module, item: module(item["x"]), loss=lambda out, item: (out - item["y"]).mean())
    assert found(Masked(), [batch], loss=task)[:2] == ("batch", "y")
    # Buffers are those of before the batch, whose variance overflows.
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    assert found(net, [PAIR, with_row(5, 1e30, slice(None))], loss=times(math.nan))[0] == "loss"
    with_nan(net[0].running_mean)
    assert found(net, [PAIR], loss=times(math.inf))[:2] == ("buffer", "0.running_mean")


def test_the_loss_an_algorithm_or_a_step() -> None:
    error = error_of(model(), [(INPUTS, torch.full_like(TARGETS, -100))])
    assert (error.kind, error.rows) == ("loss", ())
    assert "the loss of rows 0 to 31 of the batch" in str(error)
    broken = pl.algorithm(pl.Event.AFTER_LOSS, name="broken")(lambda state: state.replace(loss=state.loss * math.nan))
    assert found(model(), [PAIR], algorithms=[broken])[0] == "algorithm"
    error = error_of(nn.Linear(4, 3), [(1e4 * INPUTS, TARGETS)], optimizer=pl.optim.sgd(lr=3e38))
    assert (error.kind, error.index) == ("step", 0)


def test_a_gradient() -> None:
    """Of a norm of 0, which has no derivative; and before a norm made all gradients NaN."""
    norm = Made(lambda x: x.square().sum(1, keepdim=True).sqrt() * torch.ones(3))
    for donate in ("auto", False):
        net = nn.Sequential(nn.Linear(4, 8, bias=False), norm)
        error = error_of(net, [with_row(3, 0.0, slice(None))], donate=donate)
        assert (error.kind, error.name) == ("gradient", "0.weight")
        # A step that was written in place has no parameters from before it.
        assert (error.state is None) == (donate == "auto")
    net = nn.Sequential(nn.Linear(4, 8), Made(lambda x: x + (x * 0).abs().sqrt()), nn.Linear(8, 3))
    for options in ({}, {"clip_grad": 1.0}):
        assert found(net, [PAIR], **options)[1] == "0.bias"


def test_a_forward_that_raises_when_repeated() -> None:
    calls: list[int] = []

    def once(inputs: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("called twice")
        return inputs.log()

    error = error_of(nn.Sequential(nn.Linear(4, 3), Made(once)), [PAIR])
    assert error.kind is None
    assert "RuntimeError: called twice" in str(error)


def test_batches_of_a_step_count_their_rows_together_and_a_compiled_step_names_its_batch() -> None:
    data = [PAIR, with_row(5, math.nan)]
    assert found(model(), data, batches_per_step=2)[2] == (37,)
    with interpreted():
        error = error_of(model(), data, compile=True, watch=set())
    assert (error.index, error.kind, error.rows) == (1, "batch", (5,))


def test_the_line_that_rewinds_is_of_the_run_that_failed(tmp_path: Path) -> None:
    """A run that is started where the error of another one is handled adds no line of its own to it."""
    data = [PAIR, with_row(5, math.nan)]
    recording = partial(pl.fit, model(), **SETTINGS)
    caught: list[pl.errors.NonFiniteError] = []
    try:
        pl.run(recording(data, callbacks=[pl.callbacks.FlightRecorder(tmp_path / "a")]))
    except pl.errors.NonFiniteError as error:
        caught.append(error)
        pl.run(recording(data[:1], callbacks=[pl.callbacks.FlightRecorder(tmp_path / "b")]))
    (note,) = caught[0].__notes__
    assert f'recipe.rewind(model, {str(tmp_path / "a")!r}, "1ba", "batch_start")' in note
    event, state = next(pl.Recipe(data, **SETTINGS).rewind(model(), tmp_path / "a", "1ba", "batch_start"))
    assert event is pl.Event.BATCH_START
    assert state.batch is data[1]
