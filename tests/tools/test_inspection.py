"""``pl.inspect``: losses and gradients of samples, their indices, outputs of modules and updates of parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
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


def test_parameters_that_are_not_trained() -> None:
    net = model(norm=False)
    net[0].requires_grad_(False)  # type: ignore[index]
    data = DataLoader(DATASET, batch_size=7)
    (state, *_) = states(Event.BATCH_START, 3, data=data, net=net)
    report = pl.inspect(state, **PLAIN)
    assert {row.name for row in report.parameters} == {"4.weight", "4.bias"}
    assert all(row.gradient and row.update for row in report.parameters)

    (state, *_) = states(Event.BATCH_START, 3, data=data, net=model(norm=False))
    report = pl.inspect(state.replace(frozen={"0.weight", "0.bias"}), **PLAIN)
    frozen = {row.name for row in report.parameters if row.gradient == 0 and row.update == 0}
    assert frozen == {"0.weight", "0.bias"}
    whole = {sample.row: sample for sample in pl.inspect(state, **PLAIN).samples}
    for sample in report.samples:
        assert sample.gradient_norm is not None
        assert 0 < sample.gradient_norm < whole[sample.row].gradient_norm  # type: ignore[operator]


@dataclass
class Outputs:
    """As those of a library: no pytree, with the loss of the whole batch."""

    loss: Any
    logits: Any


class OwnLoss(nn.Module):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.layers = model(dropout=0.0, norm=norm)

    def forward(self, x: Any, y: Any) -> Outputs:
        logits = self.layers(x)
        return Outputs(cross_entropy(logits, y), logits)


OF_ITSELF = pl.Task(forward=lambda module, batch: module(**batch), loss=lambda outputs, batch: outputs.loss)
ITS_LOGITS = pl.Task(
    forward=lambda module, batch: module(**batch).logits, loss=lambda logits, batch: cross_entropy(logits, batch["y"])
)


def start(net: nn.Module, batch: Any, **settings: Any) -> pl.State:
    """The State of the first BATCH_START."""
    stream = pl.fit(net, [batch], watch={Event.BATCH_START}, **{**NEEDED, **settings})
    return next(state for _, state in stream)


NEEDED: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}


def test_a_loss_of_the_whole_batch_in_the_outputs() -> None:
    batch = {"x": INPUTS[:6], "y": DATASET.tensors[1][:6]}
    state = start(OwnLoss(), batch, task=OF_ITSELF)
    report = pl.inspect(state, task=OF_ITSELF, **NEEDED)
    assert report.alone
    assert "6 of 6 samples, by loss, each in a forward of its own" in str(report)
    by_rows = pl.inspect(state, task=ITS_LOGITS, **NEEDED)
    assert not by_rows.alone
    assert [sample.row for sample in report.samples] == [sample.row for sample in by_rows.samples]
    for one, other in zip(report.samples, by_rows.samples, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-5)

    state = start(OwnLoss(norm=True), batch, task=OF_ITSELF)
    with pytest.raises(pl.ArgumentError, match=r"'layers.1' \(BatchNorm1d\) normalises over the microbatch.*pl.Task"):
        pl.inspect(state, task=OF_ITSELF, **NEEDED)
    assert not pl.inspect(state, task=ITS_LOGITS, **NEEDED).alone


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with pl.random.seeded(0):
            self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Any) -> Any:
        return self.lstm(x.transpose(0, 1))[0]


@pytest.mark.parametrize("time", [5, 8])
def test_outputs_with_time_first(time: int) -> None:
    """With as many times as samples, too."""
    x = torch.randn(8, time, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(8) % 3
    task = pl.Task(loss=lambda outputs, batch: cross_entropy(outputs.mean(0), batch[1]))
    state = start(TimeFirst(), (x, y), task=task)
    report = pl.inspect(state, task=task, **NEEDED)
    assert report.alone
    losses = cross_entropy(state.module()(x).mean(0), y, reduction="none").detach()
    for sample in report.samples:
        assert sample.loss == pytest.approx(float(losses[sample.row]), rel=1e-5)


def test_two_samples_with_a_batch_norm() -> None:
    batch = (INPUTS[:2], DATASET.tensors[1][:2])
    state = start(model(), batch, loss=cross_entropy)
    assert not pl.inspect(state, loss=cross_entropy, **NEEDED).alone


def test_gradients_beside_a_sample_that_is_not_finite() -> None:
    inputs = INPUTS[:6].clone()
    inputs[2] = math.nan
    state = start(nn.Linear(4, 3), (inputs, DATASET.tensors[1][:6]), loss=cross_entropy, nonfinite="skip")
    report = pl.inspect(state, loss=cross_entropy, **NEEDED)
    assert report.samples[0].row == 2
    assert math.isnan(report.samples[0].gradient_norm or 0.0)
    assert all(math.isfinite(sample.loss or 0.0) for sample in report.samples[1:])
    assert all(sample.gradient_norm is None for sample in report.samples[1:])
    # In another microbatch nothing is lost.
    halves = pl.inspect(state, loss=cross_entropy, microbatch_size=3, **NEEDED)
    assert {sample.row for sample in halves.samples if sample.gradient_norm is None} == {0, 1}


@pytest.mark.parametrize("clip", [1e-3, partial(pl.gradients.clip_by_value, max_value=1e-3)])
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_the_step_is_that_of_the_run(clip: Any, precision: str) -> None:
    """Clipped as there, of whole batches where the State has sums of microbatches, and unscaled."""
    if not isinstance(clip, float):
        value = clip

        def clip(grads: Any, params: Any) -> Any:
            return value(grads)

    settings = {**PLAIN, "optimizer": pl.optim.sgd(lr=0.1), "clip_grad": clip, "microbatch_size": 4}
    settings["precision"] = precision
    data = [(INPUTS[:10], DATASET.tensors[1][:10])]
    stream = pl.fit(model(norm=False), data, donate=False, **{**settings, "max_duration": "1ba"})
    kept = [state for event, state in stream if event.value in SEEN]
    end = kept.pop()
    assert [state.event for state in kept].count(Event.AFTER_BACKWARD) == 3
    for state in kept:
        report = pl.inspect(state, **settings)
        for row in report.parameters:
            update = (end.params[row.name] - state.params[row.name]).double()
            assert row.update == pytest.approx(float(torch.linalg.vector_norm(update.detach())), rel=1e-3)
            assert row.gradient == pytest.approx(10 * (row.update or 0.0), rel=1e-3)


SEEN = ("batch_start", "after_forward", "after_loss", "after_backward", "after_train_batch", "batch_end")


def test_after_the_step_it_is_refused() -> None:
    (state, *_) = states(Event.BATCH_END, 3, data=DataLoader(DATASET, batch_size=7))
    with pytest.raises(
        pl.ArgumentError, match=r'of BATCH_END, and its parameters are those after the step.*"batch_sta'
    ):
        pl.inspect(state, **PLAIN)


def test_several_batches_a_step() -> None:
    data = DataLoader(DATASET, batch_size=7, shuffle=True)
    settings = {**PLAIN, "batches_per_step": 2, "microbatch_size": 4}
    (state, *_) = states(Event.AFTER_TRAIN_BATCH, 2, data=data, **settings)
    report = pl.inspect(state, data, **settings)
    assert len(report.samples) == 14
    inputs = torch.cat([part[0] for part in state.batch])
    assert all(torch.equal(INPUTS[sample.index], inputs[sample.row]) for sample in report.samples)  # type: ignore[index]
    assert sum(sample.loss or 0.0 for sample in report.samples) / 14 == pytest.approx(float(state.loss), rel=1e-5)
    with pytest.raises(pl.ArgumentError, match="is 2 batches of the dataloader; pass batches_per_step="):
        pl.inspect(state, data, **PLAIN)


def test_arguments_and_losses_that_are_refused() -> None:
    state = start(nn.Linear(4, 3), (INPUTS[:6], torch.arange(6)), loss=lambda outputs, targets: outputs.sum())
    with pytest.raises(pl.ArgumentTypeError, match=r"optimizer='adam': give one of pl\.optim"):
        pl.inspect(state, loss=mse_loss, optimizer="adam")
    with pytest.raises(pl.ArgumentTypeError, match="microbatch_size"):
        pl.inspect(state, loss=mse_loss, microbatch_size="large")

    def contrastive(outputs: Any, targets: Any) -> Any:
        return cross_entropy(outputs @ outputs.T, targets)

    with pytest.raises(
        pl.ArgumentError, match=r"one sample at a time, and .*contrastive.* failed on one: IndexError"
    ) as e:
        pl.inspect(state, loss=contrastive, **NEEDED)
    assert isinstance(e.value.__cause__, IndexError)

    def of_six(module: Any, batch: Any) -> Any:
        return module(batch[0].reshape(6, 4))

    task = pl.Task(forward=of_six, loss=lambda outputs, batch: outputs.sum())
    with pytest.raises(pl.ArgumentError, match="forward of 2 of the 6 samples of a microbatch failed: RuntimeError"):
        pl.inspect(state, task=task, **NEEDED)

    def total(module: Any, batch: Any) -> Any:
        return of_six(module, batch).sum()

    task = pl.Task(forward=total, loss=lambda outputs, batch: outputs)
    with pytest.raises(
        pl.ArgumentError, match=r"can't split the outputs of the forward, tensor \(\) float32.*of one fa"
    ):
        pl.inspect(state, task=task, **NEEDED)


@pytest.mark.parametrize("weighs", [True, False])
def test_samples_without_targets_come_last(weighs: bool) -> None:
    """Their mean is over nothing; of a loss that is none of torch's it is not known that they weigh nothing."""
    targets = DATASET.tensors[1][:6].clone()
    targets[:2] = -100
    loss = cross_entropy if weighs else lambda outputs, targets: cross_entropy(outputs, targets)
    state = start(nn.Linear(4, 3), (INPUTS[:6], targets), loss=loss)
    report = pl.inspect(state, loss=loss, **NEEDED)
    assert report.origin is None
    assert {sample.row for sample in report.samples[-2:]} == {0, 1}
    if weighs:
        assert [(sample.loss, sample.gradient_norm) for sample in report.samples[-2:]] == [(None, None)] * 2
    else:
        assert all(math.isnan(sample.loss or 0.0) for sample in report.samples[-2:])
    assert all(math.isfinite(sample.gradient_norm or math.nan) for sample in report.samples[:4])


def test_the_microbatches_that_auto_has_found() -> None:
    (state, *_) = states(Event.BATCH_START, 3, data=DataLoader(DATASET, batch_size=7))
    found = state.remember("microbatch_size", 4)
    halves, whole = (pl.inspect(found, **PLAIN, microbatch_size=size).samples for size in (4, None))
    assert pl.inspect(found, **PLAIN, microbatch_size="auto").samples == halves != whole
