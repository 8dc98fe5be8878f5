"""``pl.gradients.per_sample``: gradients of samples by themselves, which add up to the gradient of their batch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError, LossError, ModelError
from pure_loop.random import seeded
from tests.support.problem import MODELS, convnet, fit, images, mlp, noisy, points
from tests.support.refused import Refusal, check, rows
from tests.support.tiers import examples

per_sample = pl.gradients.per_sample


class OwnLoss(nn.Module):
    """Its loss is a method, and its batch a mapping with a number for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.layer(batch["x"]) * batch["scale"]
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return {"total": cross_entropy(outputs, batch["y"]), "size": outputs.square().mean()}


class First(nn.Module):
    """The mean over time of what a recurrent layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0].mean(1)
        return out


def start(model: nn.Module, batch: Any, **more: Any) -> tuple[pl.State, Any]:
    """The State of the first BATCH_START in float64, and the gradient of its batch as the loop computes it."""
    events = {"batch_start", "after_train_batch"}
    stream = fit(model.double(), [batch], watch=events, donate=False, clip_grad=None, **more)
    (_, state), (_, after) = next(stream), next(stream)
    return state, after.grads


def doubles(batch: Any) -> Any:
    return tuple(part.double() if part.is_floating_point() else part for part in batch)


def close(gradient: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


WORDS = nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0, 0.7, 2.0], dtype=torch.float64), label_smoothing=0.1)
CLASSES = nn.CrossEntropyLoss(torch.tensor([0.2, 0.0, 3.0], dtype=torch.float64))  # its mean over class 1 is NaN
LOSSES = {
    "mean": cross_entropy,
    "ignoring": partial(cross_entropy, ignore_index=1),
    "weighted": None,
    "sum": partial(cross_entropy, reduction="sum"),
    "unknown": lambda outputs, targets: cross_entropy(outputs, targets),
}


def weights_of(kind: str, loss: Any, targets: Tensor) -> Tensor:
    """What the mean over the targets of each sample divides by, as torch's documentation has it."""
    counts = loss.weight[targets] if kind == "weighted" else (targets != (1 if kind == "ignoring" else -100)).double()
    weights: Tensor = counts.reshape(len(targets), -1).sum(1)
    return torch.ones_like(weights) if kind == "sum" else weights / weights.sum()


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 7), st.sampled_from([None, 1, 2, 3]), st.sampled_from([*LOSSES]))
@examples(30, 300)
def test_the_weighted_mean_is_the_gradient_of_the_batch(name: str, n: int, size: int | None, kind: str) -> None:
    """With the dropout masks of its step, and BatchNorm in eval mode; targets that are ignored weigh nothing."""
    make, data = MODELS[name]
    model, ((inputs, targets),) = make(), data(1, size=n, seed=n)
    targets[0] = 0  # one that counts, whatever is ignored
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eval()
    loss = LOSSES[kind] or (WORDS if name == "transformer" else CLASSES)
    state, expected = start(model, doubles((inputs, targets)), loss=loss, microbatch_size=size)
    grads = per_sample(state, loss=loss, microbatch_size=size)
    assert list(grads) == list(expected)
    weights = weights_of(kind, loss, targets)
    for key, gradient in grads.items():
        assert gradient.shape == (n, *state.params[key].shape)
        close(torch.tensordot(weights, gradient, dims=1), expected[key])


def test_a_mapping_a_loss_of_the_model_in_parts_and_frozen_parameters() -> None:
    batch = {"x": points(1)[0][0].double(), "y": points(1)[0][1], "scale": 0.5, "shift": torch.tensor(2.0)}
    state, expected = start(OwnLoss(), batch, loss=None)
    for size in (None, 1, 3):
        grads = per_sample(state.replace(frozen=frozenset({"layer.bias"})), loss=None, microbatch_size=size)
        assert list(grads) == ["layer.weight"]
        close(grads["layer.weight"].mean(0), expected["layer.weight"])
    several = pl.Batches([batch, batch])
    assert torch.equal(per_sample(state, several)["layer.bias"][4:], per_sample(state, batch)["layer.bias"])


TIME_FIRST = pl.Task(
    forward=lambda module, batch: module(batch[0]).mean(0),
    loss=lambda outputs, batch: cross_entropy(outputs, batch[1]),
    samples=lambda batch: len(batch[1]),
    split=lambda batch, size: list(zip(batch[0].split(size, dim=1), batch[1].split(size), strict=True)),
)


def test_samples_along_another_dimension() -> None:
    (inputs, targets) = doubles(points(1, size=6)[0])
    sequences = torch.stack([inputs, inputs + 1, inputs - 1])
    state, expected = start(mlp(), (sequences, targets), loss=TIME_FIRST)
    for name, gradient in per_sample(state, loss=TIME_FIRST).items():
        close(gradient.mean(0), expected[name])


def by_hand(state: pl.State, batch: Any) -> dict[str, list[Tensor]]:
    """A backward for each sample, in eval mode."""
    module = state.module(training=False)
    listed: dict[str, list[Tensor]] = {name: [] for name in state.params}
    for row in range(len(batch[0])):
        loss = cross_entropy(module(batch[0][row : row + 1]), batch[1][row : row + 1])
        for name, gradient in zip(listed, torch.autograd.grad(loss, list(module.parameters())), strict=True):
            listed[name].append(gradient)
    return listed


def recurrent() -> nn.Module:
    with seeded(0):
        return First(nn.GRU(4, 3, batch_first=True))


@pytest.mark.parametrize("make", [noisy, convnet, recurrent])
def test_each_is_that_of_a_backward_of_its_own(make: Any) -> None:
    """In eval mode; a NaN stays in its sample, and torch's generator and the State are as before."""
    ((inputs, targets),) = images(1, size=5) if make is convnet else points(1, size=5)
    if make is recurrent:
        inputs = torch.stack([inputs, inputs + 1], dim=1)
    batch, state = (inputs.clone(), targets), pl.State.create(make())
    batch[0][3] = math.nan
    expected, before = by_hand(state, (inputs, targets)), torch.get_rng_state()
    for size in (1,) if make is recurrent else (None, 1):
        grads = per_sample(state, batch, loss=cross_entropy, training=False, microbatch_size=size)
        for name, gradient in grads.items():
            assert gradient[3].isnan().any()
            rows_left = [0, 1, 2, 4]
            torch.testing.assert_close(gradient[rows_left], torch.stack(expected[name])[rows_left])
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(tensor.requires_grad for tensor in state.params.values())


class Branching(nn.Module):
    """Computes by the value of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def branching() -> nn.Module:
    return nn.Sequential(mlp(), Branching())


def of(model: nn.Module | None = None, batch: Any = None, **more: Any) -> Any:
    ((inputs, targets),) = points(1)
    settings = {"loss": cross_entropy, **more}
    return per_sample(pl.State.create(model or mlp()), batch or (inputs, targets), **settings)


X, Y = points(1)[0]
OF_MAPPINGS = pl.Task(
    forward=lambda module, batch: module(batch["x"]), loss=lambda outputs, batch: cross_entropy(outputs, batch["y"])
)
NAMED: dict[str, Any] = {"x": X, "y": Y, "ids": [7, 7, 7, 7]}

NAMES = frozenset(mlp().state_dict())


@rows(
    [
        Refusal("a module", lambda: per_sample(mlp(), (X, Y)), ArgumentTypeError, ("pl.State.create(module)",)),  # type: ignore[arg-type]
        Refusal(
            "members",
            lambda: per_sample(pl.stack([pl.State.create(mlp()) for _ in range(2)]), (X, Y), loss=cross_entropy),
            ArgumentError,
            ("per_sample takes one model", "state.member(0)"),
        ),
        Refusal("a name", lambda: of(los=1), ArgumentTypeError, ("has no argument 'los'; did you mean loss=",)),
        Refusal(
            "no batch", lambda: per_sample(pl.State.create(mlp())), ArgumentError, ("the State has no batch, and none",)
        ),
        Refusal("no loss", lambda: of(loss=None), ArgumentError, ("no loss: give",)),
        Refusal("size", lambda: of(microbatch_size="auto"), ArgumentTypeError, ("got 'auto'",)),
        Refusal("a mode", lambda: of(training=1), ArgumentTypeError, ("training must be True or False, got 1",)),
        Refusal("BatchNorm", lambda: of(noisy()), ModelError, ("'1' (BatchNorm1d) normalises", "training=False")),
        Refusal("BatchNorm alone", lambda: of(noisy(), microbatch_size=1), ModelError, ("'1' (BatchNorm1d)",)),
        Refusal(
            "a branch", lambda: of(branching()), ModelError, ("'1', Branching failed under it", "microbatch_size=1")
        ),
        Refusal("a layer", lambda: of(recurrent(), (torch.stack([X, X]), Y[:2])), ModelError, ("'layer', GRU(4, 3",)),
        Refusal("a list", lambda: of(batch=NAMED, loss=OF_MAPPINGS), DataError, ("batch['ids'][1] is no tensor",)),
        Refusal(
            "texts", lambda: of(batch={**NAMED, "ids": [*"abcd"]}, loss=OF_MAPPINGS), DataError, ("batch['ids'] is no",)
        ),
        Refusal("no reduction", lambda: of(loss=lambda a, b: a.sum(1)), LossError, ("has shape (1,)",)),
        Refusal("detached", lambda: of(loss=lambda a, b: a.detach().sum()), LossError, ("depends on no parameter",)),
        Refusal(
            "detached, alone",
            lambda: of(loss=lambda a, b: a.detach().sum(), microbatch_size=1),
            LossError,
            ("depends on no parameter",),
        ),
        Refusal("sizes", lambda: of(batch=(X, Y[:3])), DataError, ("different first dimensions",)),
        Refusal(
            "frozen",
            lambda: per_sample(pl.State.create(mlp()).replace(frozen=NAMES), (X, Y), loss=cross_entropy),
            ArgumentError,
            ("no parameter is trained",),
        ),
    ]
)
def test_what_has_no_gradients_of_samples_is_refused(refusal: Refusal) -> None:
    check(refusal)


def test_what_can_not_be_mapped_is_taken_one_by_one() -> None:
    assert len(of(branching(), microbatch_size=1)["0.0.weight"]) == 4
    assert len(of(batch=NAMED, loss=OF_MAPPINGS, microbatch_size=1)["0.weight"]) == 4
