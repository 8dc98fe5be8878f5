"""What algorithms do with leaves of every kind: complex ones, narrow ones, and buffers that come and change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms.ema import averaged, moving_average
from pure_loop.gradients import clip_by_value
from pure_loop.random import seeded
from tests.support.problem import close, noise

A = pl.algorithms
LR = 0.1
mse = nn.functional.mse_loss


class Waves(nn.Module):
    """A complex matrix, and a real bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.phase = self.phase * 1j  # type: ignore[has-type]
        return (x.to(self.weight.dtype) @ self.weight).abs() + self.bias


def model() -> Any:
    with seeded(0):
        return Waves()


DATA = [tuple(torch.randn(4, n, dtype=torch.float64, generator=noise(10 * i + n)) for n in (3, 2)) for i in range(4)]


def trained(*algorithms: Any) -> pl.State:
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=LR), "max_duration": "1ep", "strict": True}
    return pl.run(pl.fit(model(), DATA, loss=mse, algorithms=algorithms, **settings))


def gradient(params: list[Tensor], batch: Any) -> list[Tensor]:
    params = [each.detach().clone().requires_grad_() for each in params]
    outputs = (batch[0].to(params[0].dtype) @ params[0]).abs() + params[1]
    return list(torch.autograd.grad(mse(outputs, batch[1]), params))


Find = Callable[[list[Tensor], list[Tensor], Any], list[Tensor]]
"""From the gradient, the parameters and the batch to what is stepped by."""


def by_hand(find: Find) -> list[dict[str, Tensor]]:
    """Parameters after each batch."""
    params, after = [each.detach() for each in model().parameters()], []
    for batch in DATA:
        found = find(gradient(params, batch), params, batch)
        params = [p - LR * each for p, each in zip(params, found, strict=True)]
        after.append(dict(zip(("weight", "bias"), params, strict=True)))
    return after


def norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([each.abs().square().sum() for each in tensors]).sum().sqrt()


def clamped(tensor: Tensor, most: float) -> Tensor:
    if tensor.is_complex():
        return torch.complex(tensor.real.clamp(-most, most), tensor.imag.clamp(-most, most))
    return tensor.clamp(-most, most)


def sharpened(found: list[Tensor], params: list[Tensor], batch: Any) -> list[Tensor]:
    size = norm(found) + 1e-12
    return gradient([each + 0.05 * g / size for each, g in zip(params, found, strict=True)], batch)


def weighed(found: list[Tensor], params: list[Tensor], batch: Any) -> list[Tensor]:
    """Adaptive sharpness weighs complex elements by their size."""
    scale = 0.5 / (norm([g * p.abs() for g, p in zip(found, params, strict=True)]) + 1e-12)
    return gradient([p + scale * g * p.abs().square() for g, p in zip(found, params, strict=True)], batch)


def adapted(found: list[Tensor], params: list[Tensor], batch: Any) -> list[Tensor]:
    def sizes(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].abs().square().sum(1, keepdim=True).sqrt(), tensors[1].square().sum().sqrt()]

    limits = zip(found, sizes(params), sizes(found), strict=True)
    return [g * (0.01 * s.clamp(min=1e-3) / n).clamp(max=1.0) for g, s, n in limits]


BY_HAND: dict[str, tuple[Any, Find]] = {
    "nothing": ((), lambda found, params, batch: found),
    "norm": (
        [A.gradient_clipping("norm", 0.1)],
        lambda found, params, batch: [g * (0.1 / norm(found)).clamp(max=1) for g in found],
    ),
    "value": (
        [A.gradient_clipping("value", 0.05)],
        lambda found, params, batch: [clamped(g, 0.05) for g in found],
    ),
    "adaptive": ([A.gradient_clipping("adaptive", 0.01)], adapted),
    "sam": ([A.sam(rho=0.05)], sharpened),
    "adaptive sam": ([A.sam(rho=0.5, adaptive=True)], weighed),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_complex_parameters_are_trained_as_by_hand(name: str) -> None:
    algorithms, find = BY_HAND[name]
    close(trained(*algorithms).params, by_hand(find)[-1], 1e-5)


def test_an_average_has_complex_parameters_and_buffers() -> None:
    """They were left out, and `averaged` gave those of training."""
    average = {"weight": model().weight.detach(), "bias": model().bias.detach()}
    phase = model().phase
    for turns, params in enumerate(by_hand(BY_HAND["nothing"][1]), start=1):
        average = {name: 0.75 * average[name] + 0.25 * params[name] for name in average}
        phase = 0.75 * phase + 0.25 * torch.ones(2) * 1j**turns
    state = averaged(trained(A.ema(smoothing=0.75, buffers="phase")))
    close(state.params, average)
    torch.testing.assert_close(state.buffers["phase"], phase)


def test_infinite_parts_become_nan_and_narrow_tensors_are_averaged_in_float32() -> None:
    clipped = clip_by_value({"w": torch.tensor([complex(torch.inf, 3.0), 0.25 - 4j])}, 1.0)["w"]
    assert clipped.real.isnan().tolist() == [True, False]
    torch.testing.assert_close(clipped.imag, torch.tensor([1.0, -1.0]))
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        found = moving_average({"w": torch.ones(2).to(dtype)}, {"w": torch.zeros(2).to(dtype)}, 0.75)["w"]
        torch.testing.assert_close(found, torch.tensor([0.75, 0.75]))


class Bank(nn.Module):
    """A buffer that grows until it has three rows, and is halved then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("bank", torch.zeros(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.bank = torch.cat([self.bank, x.detach()[:1]]) if len(self.bank) < 3 else 0.5 * self.bank
        out: Tensor = self.layer(x)
        return out


def test_the_average_of_a_buffer_that_takes_another_shape_begins_there() -> None:
    """(1, 2) and (2, 2) would be averaged by broadcasting."""
    inputs = [(torch.randn(2, 2, generator=noise(i)), torch.zeros(2, 1)) for i in range(5)]
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    stream = pl.fit(Bank(), inputs, loss=mse, algorithms=[A.ema(smoothing=0.5, buffers="bank")], **settings)
    shown = [averaged(state).buffers["bank"] for event, state in stream if event is Event.BATCH_END]
    full = torch.cat([torch.zeros(1, 2), inputs[0][0][:1], inputs[1][0][:1]])
    torch.testing.assert_close(shown[:3], [full[:2], full, 0.75 * full])
    for i, bank in ((3, 0.25 * full), (4, 0.125 * full)):
        torch.testing.assert_close(shown[i], 0.5 * shown[i - 1] + 0.5 * bank)
