"""Gradient clipping, in real training loops, against torch's own and loops written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event, State
from pure_loop.algorithms import gradient_clipping
from tests.support.runs import by_hand, close, cross_entropy, equal, mlp, points, train


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    cross_entropy(model(inputs), targets).backward()


def clip_adaptively_by_hand(module: nn.Module, clipping: float) -> None:
    for parameter in module.parameters():
        for unit, gradient in (
            zip(parameter, parameter.grad, strict=True) if parameter.ndim > 1 else ((parameter, parameter.grad),)
        ):
            limit = clipping * max(unit.norm().item(), 1e-3)
            if gradient.norm() > limit:
                gradient.mul_(limit / gradient.norm())


@pytest.mark.parametrize(
    ("kind", "threshold", "reference"),
    [
        ("norm", 0.1, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
        ("norm", 1e6, lambda m: None),
        ("value", 0.01, lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)),
        ("adaptive", 0.02, lambda m: clip_adaptively_by_hand(m, 0.02)),
    ],
)
def test_gradient_clipping_is_torchs(kind, threshold, reference):
    def gradient(model, inputs, targets):
        backward(model, inputs, targets)
        with torch.no_grad():
            reference(model)

    clipped = train(mlp(), points(), [gradient_clipping(kind, threshold)]).params
    close(clipped, by_hand(mlp(), points(), gradient))
    if threshold < 1:
        assert not torch.allclose(clipped["0.weight"], train(mlp(), points()).params["0.weight"], atol=1e-4)


def test_clipping_knows_parameters_without_a_gradient():
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    for kind in ("norm", "value", "adaptive"):
        state = train(Part(), points(), [gradient_clipping(kind, 0.1)])
        assert torch.equal(state.params["unused"], torch.ones(2))


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_clipping_does_not_hide_a_gradient_that_is_not_finite(kind, bad):
    @pl.algorithm(Event.AFTER_BACKWARD)
    def spoil(state):
        weight = state.grads["0.weight"].clone()
        weight[0, 0] = bad
        return state.replace(grads={**state.grads, "0.weight": weight})

    with pytest.raises(pl.NonFiniteError):
        train(mlp(), points(), [spoil, gradient_clipping(kind, 1.0)])
    state = train(mlp(), points(), [spoil, gradient_clipping(kind, 1.0)], nonfinite="skip")
    equal(state.params, State.create(mlp()).params)
    assert state.skipped == 6
