"""``pl.inspect``: losses and gradients of samples, their indices, outputs of modules and updates of parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import pure_loop as pl
from pure_loop.event import Event

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
DATASET = TensorDataset(INPUTS, INPUTS[:, :3].argmax(1))
PLAIN: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=1e-2), "max_duration": "2ep"}


def model(*, dropout: float = 0.2, norm: bool = True) -> nn.Module:
    with pl.random.seeded(0):
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        return nn.Sequential(nn.Linear(4, 8), middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def loaders() -> dict[str, DataLoader[Any]]:
    return {
        "shuffled": DataLoader(DATASET, batch_size=7, shuffle=True),
        "in order": DataLoader(DATASET, batch_size=7),
        "weighted": DataLoader(DATASET, batch_size=7, sampler=WeightedRandomSampler(range(1, 61), 40)),
        "batch sampler": DataLoader(DATASET, batch_sampler=BatchSampler(RandomSampler(DATASET), 7, drop_last=True)),
    }


def states(event: Event, *batches: int, data: Any, net: nn.Module | None = None, **settings: Any) -> list[pl.State]:
    stream = pl.fit(net or model(), data, watch={event}, donate=False, **{**PLAIN, **settings})
    return [
        state for _, state in stream if state.previous_timestamp.batch in batches or state.timestamp.batch in batches
    ]


@pytest.mark.parametrize("kind", loaders())
@pytest.mark.parametrize("event", [Event.BATCH_START, Event.AFTER_TRAIN_BATCH])
def test_indices_are_those_of_the_dataset(kind: str, event: Event) -> None:
    data = loaders()[kind]
    for state in states(event, 1, 6, 11, data=data):
        report = pl.inspect(state, data, **PLAIN)
        assert len(report.samples) == len(state.batch[0])
        for sample in report.samples:
            assert sample.index is not None
            assert torch.equal(INPUTS[sample.index], state.batch[0][sample.row])


@given(st.sampled_from([None, 4]), st.booleans(), st.integers(0, 12))
@settings(max_examples=8, deadline=None)
def test_losses_add_up_to_that_of_the_step(size: int | None, norm: bool, batch: int) -> None:
    data = DataLoader(DATASET, batch_size=7, shuffle=True)
    options = {**PLAIN, "microbatch_size": size}
    (state, *_) = states(Event.AFTER_TRAIN_BATCH, batch, data=data, net=model(norm=norm), microbatch_size=size)
    report = pl.inspect(state, **options)
    mean = sum(sample.loss for sample in report.samples) / len(report.samples)
    assert mean == pytest.approx(float(state.loss), rel=1e-5)
    losses = [sample.loss for sample in report.samples]
    assert losses == sorted(losses, reverse=True)


@given(st.sampled_from([None, 4]), st.booleans(), st.integers(0, 12))
@settings(max_examples=8, deadline=None)
def test_gradients_of_samples_are_those_through_the_batch(size: int | None, norm: bool, batch: int) -> None:
    """By a second way: backward of one sample's loss in the forward of its microbatch, the same masks drawn."""
    data = DataLoader(DATASET, batch_size=7, shuffle=True)
    (state, *_) = states(
        Event.AFTER_TRAIN_BATCH, batch, data=data, net=model(norm=norm, dropout=0.0), microbatch_size=size
    )
    report = pl.inspect(state, **{**PLAIN, "microbatch_size": size})
    rows = len(state.batch[0])
    for sample in report.samples:
        first = sample.row // (size or rows) * (size or rows)
        module = state.module()
        inputs, targets = (part[first : first + (size or rows)] for part in state.batch)
        losses = cross_entropy(module(inputs), targets, reduction="none")
        losses[sample.row - first].backward()
        squares = [parameter.grad.double().square().sum() for parameter in module.parameters()]  # type: ignore[union-attr]
        assert sample.gradient_norm == pytest.approx(math.sqrt(sum(map(float, squares))), rel=1e-4, abs=1e-6)
    assert pl.inspect(state, gradients=False, **PLAIN).samples[0].gradient_norm is None


def test_updates_are_those_of_the_step() -> None:
    data = DataLoader(DATASET, batch_size=7)
    # Without BatchNorm, before which gradients of biases are nothing but rounding.
    (start,) = (at for at in states(Event.BATCH_START, 4, data=data, net=model(norm=False)) if at.timestamp.batch == 4)
    (end,) = (at for at in states(Event.BATCH_END, 5, data=data, net=model(norm=False)) if at.timestamp.batch == 5)
    report = pl.inspect(start, **PLAIN)
    for row in report.parameters:
        update = (end.params[row.name] - start.params[row.name]).double()
        assert row.update == pytest.approx(float(torch.linalg.vector_norm(update)), rel=1e-3, abs=1e-6)
        assert row.norm == pytest.approx(float(torch.linalg.vector_norm(start.params[row.name].double())))
    ratios = [row.update / row.norm for row in report.parameters if row.update is not None and row.norm]
    assert ratios == sorted(ratios, reverse=True)


def test_modules_and_what_is_shown() -> None:
    (state, *_) = states(Event.BATCH_START, 3, data=DataLoader(DATASET, batch_size=7))
    report = pl.inspect(state, **PLAIN)
    assert [(row.name, row.kind) for row in report.modules][:3] == [
        ("0", "Linear"),
        ("1", "BatchNorm1d"),
        ("2", "ReLU"),
    ]
    outputs = torch.relu(state.module()[:2](state.batch[0])).detach()  # type: ignore[index]
    assert report.modules[2].zeros == pytest.approx(float((outputs == 0).double().mean()))
    assert report.modules[2].largest == pytest.approx(float(outputs.max()))
    assert report.origin is None
    assert "batch 3: 7 of 7 samples, by loss" in str(report)
    assert "<table>" in report._repr_html_()
    without = pl.inspect(state, loss=cross_entropy)
    assert all(row.update is None for row in without.parameters)
    assert pl.inspect(state, loss=cross_entropy).samples == without.samples


def test_a_sample_that_is_not_finite_comes_first() -> None:
    inputs = INPUTS.clone()
    inputs[9, 1] = math.nan
    data = DataLoader(TensorDataset(inputs, DATASET.tensors[1]), batch_size=7)
    (state, *_) = states(Event.BATCH_START, 1, data=data, net=model(norm=False), nonfinite="skip")
    state = state if state.timestamp.batch == 1 else states(Event.BATCH_START, 1, data=data, nonfinite="skip")[1]
    report = pl.inspect(state, data, **PLAIN)
    assert report.samples[0].index == 9
    assert report.origin == "the batch itself is NaN, at '0', in row 2 of the batch"
    assert str(report).startswith("not finite: the batch itself")


def test_a_batch_at_a_boundary() -> None:
    state = states(Event.BATCH_CHECKPOINT, 4, data=DataLoader(DATASET, batch_size=7))[0]
    report = pl.inspect(state, (INPUTS[:5], DATASET.tensors[1][:5]), **PLAIN)
    assert len(report.samples) == 5
    assert report.samples[0].index is None
    with pytest.raises(pl.ArgumentError, match="of a boundary, and has no batch"):
        pl.inspect(state, **PLAIN)


def test_what_is_refused() -> None:
    (state, *_) = states(Event.BATCH_START, 3, data=DataLoader(DATASET, batch_size=7))
    with pytest.raises(pl.ArgumentTypeError, match="give a State from inside a batch"):
        pl.inspect(model(), **PLAIN)  # type: ignore[arg-type]
    with pytest.raises(pl.ArgumentTypeError, match="no argument 'los'"):
        pl.inspect(state, los=cross_entropy)
