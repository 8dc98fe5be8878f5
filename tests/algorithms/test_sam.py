"""Sharpness-aware minimisation, in real training loops, against loops written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import gradient_clipping, label_smoothing, perturb, sam
from tests.support.runs import (
    LR,
    by_hand,
    close,
    convnet,
    cross_entropy,
    equal,
    images,
    mlp,
    noise,
    points,
    stream,
    train,
)


def norm(tensors: Any) -> Tensor:
    return torch.stack([t.norm() for t in tensors]).norm()


def sharp(rho: float, adaptive: bool = False, loss: Any = cross_entropy, every: int = 1) -> Any:
    """The gradient of the two-step implementation that goes with the paper."""
    count = 0

    def gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        nonlocal count
        parameters = list(model.parameters())
        grads = torch.autograd.grad(loss(model(inputs), targets), parameters)
        if count % every == 0:
            with torch.no_grad():
                scale = rho / (
                    norm([g * p.abs() if adaptive else g for g, p in zip(grads, parameters, strict=True)]) + 1e-12
                )
                steps = [scale * g * (p**2 if adaptive else 1) for g, p in zip(grads, parameters, strict=True)]
                before = [p.clone() for p in parameters]
                for p, step in zip(parameters, steps, strict=True):
                    p.add_(step)
            grads = torch.autograd.grad(loss(model(inputs), targets), parameters)
            with torch.no_grad():
                for p, old in zip(parameters, before, strict=True):
                    p.copy_(old)
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g
        count += 1

    return gradient


@pytest.mark.parametrize(
    ("rho", "adaptive", "interval"), [(0.05, False, 1), (0.5, False, 1), (0.5, True, 1), (0.5, False, 4)]
)
def test_sam_is_the_loop_written_by_hand(rho, adaptive, interval):
    wanted = by_hand(mlp(), points(), sharp(rho, adaptive, every=interval), momentum=0.9)
    optimizer = pl.optim.sgd(lr=LR, momentum=0.9)
    close(train(mlp(), points(), [sam(rho, adaptive=adaptive, interval=interval)], optimizer=optimizer).params, wanted)
    plain = train(mlp(), points(), optimizer=optimizer).params
    assert max((plain[name] - wanted[name]).abs().max() for name in wanted) > 1e-4


def test_sam_with_microbatches_is_sam_without():
    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01)}
    whole = train(mlp(), points(), [sam(0.5)], **options)
    for size in (1, 2, 4):
        close(train(mlp(), points(), [sam(0.5)], microbatch_size=size, **options).params, whole.params)


def test_sam_smooths_labels_in_the_second_gradient_too():
    def own(outputs, targets):
        return cross_entropy(outputs, targets, label_smoothing=0.3)

    wanted = by_hand(mlp(), points(), sharp(0.5, loss=own))
    for order in ([label_smoothing(0.3), sam(0.5)], [sam(0.5), label_smoothing(0.3)]):
        close(train(mlp(), points(), order).params, wanted)


class Root(nn.Module):
    """``w^2 - 2.25`` is exactly 0 where SAM looks from w = -1 with rho = 0.5, and its gradient there is -3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([-1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.square() * x - 2.25


def test_a_step_whose_sam_loss_is_zero_is_made():
    losses = []

    @pl.algorithm(Event.AFTER_LOSS)
    def look(state):
        losses.append(float(state.loss.detach()))
        return state

    data = [(torch.ones(1, 1), torch.zeros(1, 1))]
    state = train(Root(), data, [look, sam(rho=0.5)], loss=lambda outputs, _: outputs.mean(), max_duration="1ba")
    assert losses == [-1.25, 0.0]
    assert torch.equal(state.params["weight"], torch.tensor([-0.7]))


def test_sam_keeps_of_the_second_pass_the_gradient_only():
    @pl.algorithm(Event.AFTER_BACKWARD, init=lambda state: 0)
    def count(state):
        return state.remember("count", state.algorithm_state["count"] + 1)

    def batch(algorithms):
        for event, state in stream(convnet(), images(), algorithms, max_duration="1ba"):
            if event is Event.AFTER_TRAIN_BATCH:
                return state
        raise AssertionError

    sharpened, plain = batch([count, sam(0.5)]), batch([count])
    for field in ("params", "buffers", "loss", "outputs", "algorithm_state"):
        equal(getattr(sharpened, field), getattr(plain, field))
    assert not torch.equal(sharpened.grads["7.weight"], plain.grads["7.weight"])


def test_sam_draws_the_same_dropout_masks_twice():
    masks = []

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            mask = functional.dropout(torch.ones_like(x), 0.5, self.training)
            masks.append(mask)
            return self.linear(x * mask)

    train(Masked(), points(), [sam(0.5)], max_duration="2ba")
    assert len(masks) == 4
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_a_gradient_of_zero_and_parameters_without_one_stay_where_they_are():
    params = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    moved = perturb(params, {"a": torch.zeros(2), "b": None}, rho=1.0)
    equal(moved, pl.FrozenDict(params))
    assert list(perturb(params, {}, rho=1.0)) == ["a", "b", "c"]
    half = perturb({"a": torch.ones(2, dtype=torch.float16)}, {"a": torch.zeros(2, dtype=torch.float16)})
    assert torch.equal(half["a"], torch.ones(2, dtype=torch.float16))


@given(rho=st.floats(1e-3, 10.0), seed=st.integers(0, 99), adaptive=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_perturbation_has_length_rho_and_points_uphill(rho, seed, adaptive):
    g = noise(seed)
    params = {name: torch.randn(3, generator=g, dtype=torch.float64) for name in "ab"}
    grads = {name: torch.randn(3, generator=g, dtype=torch.float64) for name in "ab"}
    moved = perturb(params, grads, rho, adaptive=adaptive)
    steps = {name: moved[name] - params[name] for name in params}
    length = norm([steps[n] / params[n].abs() if adaptive else steps[n] for n in steps])
    assert math.isclose(length.item(), rho, rel_tol=1e-6)
    assert sum((steps[n] * grads[n]).sum() for n in steps) > 0


def test_clipping_before_sam_in_the_list_clips_what_sam_found():
    def gradient(model, inputs, targets):
        sharp(0.5)(model, inputs, targets)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    close(train(mlp(), points(), [gradient_clipping("norm", 0.1), sam(0.5)]).params, by_hand(mlp(), points(), gradient))
    # By its norm alone, a gradient that SAM starts from makes no difference: it only gives the direction.
    close(
        train(mlp(), points(), [sam(0.5), gradient_clipping("norm", 0.1)]).params,
        train(mlp(), points(), [sam(0.5)]).params,
    )
