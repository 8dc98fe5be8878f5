"""Gradient noise, in real training loops, against its formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import gradient_noise
from tests.support.runs import equal, mlp, points, stream, train


@pytest.mark.parametrize(("eta", "gamma"), [(0.01, 0.55), (1.0, 0.0), (0.3, 1.0)])
def test_the_noise_has_the_variance_of_the_paper(eta: float, gamma: float) -> None:
    model, data = nn.Linear(200, 200, bias=False), [(torch.zeros(1, 200), torch.zeros(1, 200))] * 4
    algorithm = gradient_noise(eta, gamma)
    # The inputs are 0, and with them the gradients.
    pairs = list(stream(model, data, [algorithm], loss=nn.functional.mse_loss, max_duration="1ep"))
    noises = [state.grads["weight"] for event, state in pairs if event is Event.AFTER_TRAIN_BATCH]
    for number, noise in enumerate(noises):
        variance = eta / (1 + number) ** gamma
        # Of 40,000 numbers the variance is off by 3.5% in one case of a million.
        assert float(noise.var()) == pytest.approx(variance, rel=0.035)
        assert abs(float(noise.mean())) < 5 * (variance / noise.numel()) ** 0.5
    assert not torch.equal(noises[0] / noises[0].std(), noises[1] / noises[1].std())


def test_it_is_a_function_of_seed_and_name() -> None:
    def trained(seed: int = 0, name: str = "gradient_noise") -> pl.State:
        return train(mlp(), points(), [gradient_noise(name=name)], seed=seed)

    equal(trained().params, trained().params)
    for other in (trained(seed=1), trained(name="other")):
        assert not torch.equal(other.params["0.weight"], trained().params["0.weight"])


def test_a_parameter_without_a_gradient_stays_without() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    trained = train(model, points(), [gradient_noise()])
    equal(trained.params["0.bias"], model[0].bias.detach())
