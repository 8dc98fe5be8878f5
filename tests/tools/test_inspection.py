"""``pl.inspect``: losses and gradients of samples, their indices, outputs of modules and updates of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import pure_loop as pl
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from tests.support.problem import mlp, noise, noisy, points
from tests.support.refused import Refusal, check

((INPUTS, TARGETS),) = points(1, size=60)
DATASET = TensorDataset(INPUTS, TARGETS)
IN_ORDER, SHUFFLED = (DataLoader(DATASET, batch_size=7, shuffle=shuffle) for shuffle in (False, True))
NEEDED: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
PLAIN: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=1e-2), "max_duration": "2ep"}


def state_at(event: Event, batch: int, data: Any = IN_ORDER, net: Any = None, **more: Any) -> pl.State:
    stream = pl.fit(net or mlp(), data, watch={event}, donate=False, **{**PLAIN, **more})
    return next(state for _, state in stream if state.timestamp.batch == batch)


def start(net: nn.Module, batch: Any, **more: Any) -> pl.State:
    """The State of the first BATCH_START."""
    return next(state for _, state in pl.fit(net, [batch], watch={Event.BATCH_START}, **{**NEEDED, **more}))


def norm_of(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double()))


def test_indices_are_those_of_the_dataset() -> None:
    for data in (
        SHUFFLED,
        IN_ORDER,
        DataLoader(DATASET, batch_size=7, sampler=WeightedRandomSampler(range(1, 61), 40)),
        DataLoader(DATASET, batch_sampler=BatchSampler(RandomSampler(DATASET), 7, drop_last=True)),
    ):
        for event, batch in ((Event.BATCH_START, 1), (Event.AFTER_TRAIN_BATCH, 7)):
            state = state_at(event, batch, data)
            report = pl.inspect(state, data, **PLAIN)
            assert len(report.samples) == len(state.batch[0])
            assert all(torch.equal(INPUTS[each.index], state.batch[0][each.row]) for each in report.samples)
    more = {**PLAIN, "batches_per_step": 2, "microbatch_size": 4}
    state = state_at(Event.AFTER_TRAIN_BATCH, 2, SHUFFLED, **more)
    report = pl.inspect(state, SHUFFLED, **more)
    inputs = torch.cat([part[0] for part in state.batch])
    assert all(torch.equal(INPUTS[sample.index], inputs[sample.row]) for sample in report.samples)
    assert sum(sample.loss or 0.0 for sample in report.samples) / 14 == pytest.approx(float(state.loss), rel=1e-5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="is 2 batches of the dataloader; pass batches_per_step="):
        pl.inspect(state, SHUFFLED, **PLAIN)


@given(st.sampled_from([None, 4]), st.sampled_from([mlp, noisy]), st.integers(0, 12))
@settings(max_examples=6)
def test_losses_and_gradients_of_samples_are_those_through_the_batch(size: int | None, make: Any, batch: int) -> None:
    """By a second way: backward of one sample's loss in the forward of its microbatch."""
    net = make()
    if make is noisy:
        net[3].p = 0.0
    state = state_at(Event.AFTER_TRAIN_BATCH, batch, SHUFFLED, net, microbatch_size=size)
    report = pl.inspect(state, **{**PLAIN, "microbatch_size": size})
    count = len(state.batch[0])
    losses = [sample.loss or 0.0 for sample in report.samples]
    assert losses == sorted(losses, reverse=True)
    assert sum(losses) / count == pytest.approx(float(state.loss), rel=1e-5)  # type: ignore[arg-type]
    for sample in report.samples:
        first = sample.row // (size or count) * (size or count)
        module = state.module()
        inputs, targets = (part[first : first + (size or count)] for part in state.batch)
        cross_entropy(module(inputs), targets, reduction="none")[sample.row - first].backward()  # type: ignore[no-untyped-call]
        norms = [norm_of(parameter.grad) for parameter in module.parameters()]  # type: ignore[arg-type]
        assert sample.gradient_norm == pytest.approx(math.hypot(*norms), rel=1e-4, abs=1e-6)
    assert pl.inspect(state, gradients=False, **PLAIN).samples[0].gradient_norm is None


class Branching(nn.Module):
    """Computes by the value of a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x[-1, 0] > 0 else 2 * x


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Rooted(nn.Module):
    """Of a number below 0 it is 0, and its derivative NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x.sqrt(), 0.0)


def of_layer(layer: nn.Module, features: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, features), layer, nn.Linear(features, 3))


BY_ROWS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (mlp, True),
    "dropout": (lambda: of_layer(nn.Dropout()), True),
    "half precision": (mlp, True),
    "BatchNorm": (noisy, False),
    "a mean over the batch": (lambda: of_layer(Centred()), False),
    "other masks": (lambda: of_layer(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)), False),
    "not mapped": (lambda: of_layer(Branching()), False),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_gradients_are_mapped_where_they_are_those_of_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are those of a backward for each row, and take so many only where samples by themselves are others."""
    make, is_mapped = BY_ROWS[name]
    more = {**PLAIN, "precision": "amp_bf16" if name == "half precision" else "fp32"}
    state = start(make(), (INPUTS[:20], TARGETS[:20]), **more)
    backwards: list[object] = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kw: backwards.append(None) or grad(*args, **kw))
    report, count = pl.inspect(state, **more), len(backwards)
    assert (count < 20) is is_mapped
    monkeypatch.setattr("pure_loop.tools.samples.of_samples", lambda *_: 1 / 0)
    by_rows = pl.inspect(state, **more)
    assert len(backwards) - count >= 20
    for sample, row in zip(report.samples, by_rows.samples, strict=True):
        assert sample.row == row.row
        assert sample.loss == row.loss
        assert sample.gradient_norm == pytest.approx(row.gradient_norm, rel=0.02 if name == "half precision" else 1e-4)


SEEN = ("batch_start", "after_forward", "after_loss", "after_backward", "after_train_batch", "batch_end")


def test_the_step_is_that_of_the_run() -> None:
    """Clipped as there, of whole batches where the State has sums of microbatches, and unscaled."""
    by_value = partial(pl.gradients.clip_by_value, max_value=1e-3)
    for precision, clip in (("fp32", 1e-3), ("amp_fp16", lambda grads, params: by_value(grads))):
        more: dict[str, Any] = {"clip_grad": clip, "microbatch_size": 4, "precision": precision, "loss": cross_entropy}
        more |= NEEDED
        kept = [s for event, s in pl.fit(mlp(), [(INPUTS[:10], TARGETS[:10])], donate=False, **more) if event in SEEN]
        end = kept.pop()
        assert [state.event for state in kept].count(Event.AFTER_BACKWARD) == 3
        for state in kept:
            for row in pl.inspect(state, **more).parameters:
                update = norm_of(end.params[row.name] - state.params[row.name])
                assert row.update == pytest.approx(update, rel=1e-3)
                assert row.gradient == pytest.approx(10 * update, rel=1e-3)
                assert row.norm == pytest.approx(norm_of(state.params[row.name]))
    # Of parameters that are not trained there is none.
    net = mlp()
    net[0].requires_grad_(False)  # type: ignore[index]
    report = pl.inspect(state_at(Event.BATCH_START, 3, net=net), **PLAIN)
    assert {row.name for row in report.parameters if row.gradient and row.update} == {"2.weight", "2.bias"}
    report = pl.inspect(state_at(Event.BATCH_START, 3).replace(frozen=frozenset({"0.weight", "0.bias"})), **PLAIN)
    assert {row.name for row in report.parameters if row.gradient == row.update == 0} == {"0.weight", "0.bias"}


def test_modules_and_what_is_shown() -> None:
    state = state_at(Event.BATCH_START, 3, net=noisy())
    report = pl.inspect(state, **PLAIN)
    assert [(row.name, row.kind) for row in report.modules][1:3] == [("1", "BatchNorm1d"), ("2", "ReLU")]
    outputs = torch.relu(state.module()[:2](state.batch[0])).detach()  # type: ignore[index]
    assert report.modules[2].zeros == pytest.approx(float((outputs == 0).double().mean()))
    assert report.modules[2].largest == pytest.approx(float(outputs.max()))
    ratios = [row.update / row.norm for row in report.parameters if row.update is not None and row.norm]
    assert ratios == sorted(ratios, reverse=True)
    assert report.origin is None
    assert "batch 3: 7 of 7 samples, by loss" in str(report)
    assert "<table>" in report._repr_html_()
    without = pl.inspect(state, loss=cross_entropy)
    assert all(row.update is None for row in without.parameters)
    assert without.samples == report.samples
    # A batch of one's own, at a boundary; and the microbatches that "auto" has found.
    boundary = state_at(Event.BATCH_CHECKPOINT, 4)
    assert [each.index for each in pl.inspect(boundary, (INPUTS[:2], TARGETS[:2]), **PLAIN).samples] == [None] * 2
    found = state.remember("microbatch_size", 4)
    halves, whole = (pl.inspect(found, **PLAIN, microbatch_size=size).samples for size in (4, None))
    assert pl.inspect(found, **PLAIN, microbatch_size="auto").samples == halves != whole


def test_a_sample_that_is_not_finite_comes_first_and_one_without_a_target_last() -> None:
    inputs, targets = INPUTS.clone(), TARGETS[:6].clone()
    inputs[9, 1] = math.nan
    data = DataLoader(TensorDataset(inputs, TARGETS), batch_size=7)
    state = state_at(Event.BATCH_START, 1, data, nonfinite="skip")
    report = pl.inspect(state, data, **PLAIN)
    assert report.samples[0].index == 9
    assert report.origin == "the batch itself is NaN, at '0', in row 2 of the batch"
    assert str(report).startswith("not finite: the batch itself")
    assert math.isnan(report.samples[0].gradient_norm or 0.0)
    # Gradients of the others are as without it, or unknown where a backward goes through the whole microbatch.
    finite = state.replace(batch=(state.batch[0].nan_to_num(), state.batch[1]))
    norms = {sample.row: sample.gradient_norm for sample in pl.inspect(finite, **PLAIN).samples}
    assert all(sample.gradient_norm == pytest.approx(norms[sample.row]) for sample in report.samples[1:])
    branching = nn.Sequential(Branching(), mlp())
    report = pl.inspect(start(branching, state.batch, **PLAIN), **PLAIN)
    assert all(math.isfinite(each.loss or 0.0) and each.gradient_norm is None for each in report.samples[1:])
    # A NaN of the gradient alone belongs to its sample, beside another one's.
    rooted = nn.Sequential(nn.Linear(4, 3), Rooted())
    with torch.no_grad():
        rooted[0].bias.fill_(100.0)  # type: ignore[union-attr]
    batch = (torch.tensor([[0.0], [math.nan], [-1e6], [0.0]]) * torch.ones(4), TARGETS[:4])
    report = pl.inspect(start(rooted, batch, **PLAIN), **PLAIN)
    norms = {sample.row: sample.gradient_norm for sample in report.samples}
    assert [row for row, norm in sorted(norms.items()) if not math.isfinite(norm or 0.0)] == [1, 2]
    targets[:2] = -100
    # Their mean is over nothing; of a loss that is none of torch's it is not known that they weigh nothing.
    for loss, weightless in ((cross_entropy, True), (lambda a, b: cross_entropy(a, b), False)):
        report = pl.inspect(start(nn.Linear(4, 3), (INPUTS[:6], targets), loss=loss), loss=loss, **NEEDED)
        assert sorted((each.row, each.loss is None) for each in report.samples[-2:]) == [
            (0, weightless),
            (1, weightless),
        ]
        assert all(math.isfinite(each.gradient_norm or math.nan) for each in report.samples[:4])


class OwnLoss(nn.Module):
    """Its outputs are as those of a library: no pytree, with the loss of the whole batch."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any, y: Any) -> Any:
        logits = self.layers(x)
        return SimpleNamespace(loss=cross_entropy(logits, y), logits=logits)


OF_ITSELF = pl.Task(forward=lambda module, batch: module(**batch), loss=lambda outputs, batch: outputs.loss)
ITS_LOGITS = pl.Task(
    forward=lambda module, batch: module(**batch).logits, loss=lambda logits, batch: cross_entropy(logits, batch["y"])
)
TIME_FIRST = pl.Task(
    forward=lambda module, batch: module(batch[0].transpose(0, 1))[0],
    loss=lambda outputs, batch: cross_entropy(outputs.mean(0), batch[1]),
)


def test_a_loss_of_the_whole_batch_in_the_outputs_and_time_first() -> None:
    batch = {"x": INPUTS[:6], "y": TARGETS[:6]}
    state = start(OwnLoss(mlp()), batch, loss=OF_ITSELF)
    report, by_rows = (pl.inspect(state, loss=task, **NEEDED) for task in (OF_ITSELF, ITS_LOGITS))
    assert report.alone > by_rows.alone
    assert "6 of 6 samples, by loss, each in a forward of its own" in str(report)
    for one, other in zip(report.samples, by_rows.samples, strict=True):
        assert (one.row, one.loss) == (other.row, pytest.approx(other.loss, rel=1e-5))
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-5)
    state = start(OwnLoss(noisy()), batch, loss=OF_ITSELF)
    with pytest.raises(ArgumentError, match=r"'layers.1' \(BatchNorm1d\) normalises over the microbatch.*pl.Task"):
        pl.inspect(state, loss=OF_ITSELF, **NEEDED)
    for time in (5, 8):  # as many times as samples, too
        x, y = torch.randn(8, time, 4, generator=noise()), torch.arange(8) % 3
        state = start(nn.LSTM(4, 3), (x, y), loss=TIME_FIRST)
        losses = cross_entropy(state.module()(x.transpose(0, 1))[0].mean(0), y, reduction="none")
        for sample in pl.inspect(state, loss=TIME_FIRST, **NEEDED).samples:
            assert sample.loss == pytest.approx(float(losses[sample.row].detach()), rel=1e-5)


def in_a_batch(**more: Any) -> Any:
    state = start(nn.Linear(4, 3), (INPUTS[:6], torch.arange(6)), loss=lambda outputs, targets: outputs.sum())
    return pl.inspect(state, **{**NEEDED, **more})


def contrastive(outputs: Any, targets: Any) -> Any:
    return cross_entropy(outputs @ outputs.T, targets)


def six(module: Any, batch: Any) -> Any:
    return module(batch[0].reshape(6, 4))


SIX = pl.Task(forward=six, loss=lambda outputs, batch: outputs.sum())
TOTAL = pl.Task(forward=lambda module, batch: six(module, batch).sum(), loss=lambda outputs, batch: outputs)


def test_what_can_not_be_inspected_is_refused() -> None:
    for says, call in (
        ("give a State from inside a batch", lambda: pl.inspect(mlp(), **PLAIN)),  # type: ignore[arg-type]
        ("of a boundary, and has no batch", lambda: pl.inspect(state_at(Event.BATCH_CHECKPOINT, 4), **PLAIN)),
        ("and its parameters are those after the step", lambda: pl.inspect(state_at(Event.BATCH_END, 4), **PLAIN)),
        ("no argument 'los'", lambda: in_a_batch(los=mse_loss)),
        ("optimizer='adam': give one of pl.optim", lambda: in_a_batch(loss=mse_loss, optimizer="adam")),
        ("failed on one: IndexError", lambda: in_a_batch(loss=contrastive)),
        ("of 2 of the 6 samples of a microbatch failed", lambda: in_a_batch(loss=SIX)),
        ("can't split the outputs of the forward, tensor ()", lambda: in_a_batch(loss=TOTAL)),
    ):
        check(Refusal(says, call, pl.PureLoopError, (says,)))
