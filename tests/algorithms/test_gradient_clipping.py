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


def test_each_parameter_alone_and_some_left_out() -> None:
    state = pl.State.create(nn.Linear(2, 1)).replace(
        grads={"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([0.5])}
    )
    alone = gradient_clipping("parameter", 1.0)(state).grads
    torch.testing.assert_close(alone["weight"], torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(alone["bias"], torch.tensor([0.5]))
    for kind in ("norm", "value", "adaptive", "parameter"):
        clipped = gradient_clipping(kind, 0.01, exclude=lambda name: name == "weight")(state)
        assert torch.equal(clipped.grads["weight"], torch.tensor([[3.0, 4.0]]))
        assert clipped.grads["bias"] < 0.5
    assert gradient_clipping("norm", 0.1, exclude=lambda name: name == "weight")(state).grad_norm == 0.5


def test_a_quantile_of_the_norms() -> None:
    algorithm = gradient_clipping("quantile", 0.5)
    state = pl.State.create(nn.Linear(1, 1, bias=False))
    norms: list[float] = []
    for number in range(1200):
        norm = float("nan") if number == 7 else 1.0 + (number * 37) % 100
        state = state.replace(grads={"weight": torch.tensor([[norm]])}, grad_norm=None)
        if not number:
            state = state.remember("gradient_clipping", algorithm.init(state))
        state = algorithm(state)
        if number != 7:
            norms = [*norms, norm][-1000:]
            limit = torch.tensor(norms).quantile(0.5)
            torch.testing.assert_close(state.grads["weight"][0, 0], torch.minimum(torch.tensor(norm), limit))


def test_a_quantile_resumes() -> None:
    whole = train(mlp(), points(), [gradient_clipping("quantile", 0.3)])
    half = train(mlp(), points(), [gradient_clipping("quantile", 0.3)], max_duration="1ep")
    equal(train(half, points(), [gradient_clipping("quantile", 0.3)]).params, whole.params)
    assert not torch.equal(whole.params["0.weight"], train(mlp(), points()).params["0.weight"])


def test_a_quantile_is_below_1() -> None:
    with pytest.raises(pl.ArgumentError, match="the part of the norms that lies below"):
        gradient_clipping("quantile", 1.0)
    with pytest.raises(pl.ArgumentError, match="the part of the norms that lies below"):
        train(mlp(), points(), [gradient_clipping("quantile", pl.schedules.constant(2.0))])
    with pytest.raises(pl.ArgumentTypeError, match="is not a function of a parameter's name"):
        gradient_clipping("norm", 1.0, exclude="head")  # type: ignore[arg-type]
