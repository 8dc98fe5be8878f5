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

A = pl.algorithms
LR = 0.1


class Waves(nn.Module):
    """A complex matrix, and a real bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.phase.mul_(1j)
        return (x.to(self.weight.dtype) @ self.weight).abs() + self.bias


def model() -> Any:
    torch.manual_seed(0)
    return Waves()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(4, 3, dtype=torch.float64, generator=generator),
            torch.randn(4, 2, dtype=torch.float64, generator=generator),
        )
        for _ in range(4)
    ]


def trained(*algorithms: Any) -> pl.State:
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=LR), "max_duration": "1ep", "strict": True}
    return pl.run(pl.fit(model(), data(), loss=nn.functional.mse_loss, algorithms=algorithms, **settings))


def gradient(module: Any, batch: Any, at: list[Tensor] | None = None) -> list[Tensor]:
    """The gradient of a batch at the module's parameters, or at others."""
    params = [each.detach().clone().requires_grad_() for each in (at or [module.weight, module.bias])]
    outputs = (batch[0].to(params[0].dtype) @ params[0]).abs() + params[1]
    return list(torch.autograd.grad(nn.functional.mse_loss(outputs, batch[1]), params))


def by_hand(
    find: Callable[[Any, Any], list[Tensor]], after: Callable[[Any], None] = lambda module: None
) -> dict[str, Tensor]:
    module = model()
    for batch in data():
        found = find(module, batch)
        with torch.no_grad():
            for parameter, each in zip(module.parameters(), found, strict=True):
                parameter -= LR * each
        after(module)
    return {name: each.detach() for name, each in module.named_parameters()}


def norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([each.abs().square().sum() for each in tensors]).sum().sqrt()


def clamped(tensor: Tensor, most: float) -> Tensor:
    if tensor.is_complex():
        return torch.complex(tensor.real.clamp(-most, most), tensor.imag.clamp(-most, most))
    return tensor.clamp(-most, most)


def sharpened(module: Any, batch: Any) -> list[Tensor]:
    found, params = gradient(module, batch), [module.weight, module.bias]
    size = norm(found) + 1e-12
    moved = [each + 0.05 * g / size for each, g in zip(params, found, strict=True)]
    return gradient(module, batch, moved)


def adapted(module: Any, batch: Any) -> list[Tensor]:
    (weight, bias), found = (module.weight, module.bias), gradient(module, batch)
    sizes = [weight.abs().square().sum(1, keepdim=True).sqrt(), bias.square().sum().sqrt()]
    norms = [found[0].abs().square().sum(1, keepdim=True).sqrt(), found[1].square().sum().sqrt()]
    return [g * (0.01 * s.clamp(min=1e-3) / n).clamp(max=1.0) for g, s, n in zip(found, sizes, norms, strict=True)]


BY_HAND: dict[str, tuple[Any, Callable[[Any, Any], list[Tensor]]]] = {
    "nothing": ((), gradient),
    "norm": (
        [A.gradient_clipping("norm", 0.1)],
        lambda module, batch: [g * (0.1 / norm(gradient(module, batch))).clamp(max=1) for g in gradient(module, batch)],
    ),
    "value": (
        [A.gradient_clipping("value", 0.05)],
        lambda module, batch: [clamped(g, 0.05) for g in gradient(module, batch)],
    ),
    "adaptive": ([A.gradient_clipping("adaptive", 0.01)], adapted),
    "sam": ([A.sam(rho=0.05)], sharpened),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_complex_parameters_are_trained_as_by_hand(name: str) -> None:
    algorithms, find = BY_HAND[name]
    found = trained(*algorithms).params
    for key, wanted in by_hand(find).items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-5, atol=1e-6)


def test_adaptive_sharpness_weighs_complex_elements_by_their_size() -> None:
    def find(module: Any, batch: Any) -> list[Tensor]:
        found, params = gradient(module, batch), [module.weight, module.bias]
        sized = [g * p.abs() for g, p in zip(found, params, strict=True)]
        scale = 0.5 / (norm(sized) + 1e-12)
        moved = [p + scale * g * p.abs().square() for g, p in zip(found, params, strict=True)]
        return gradient(module, batch, moved)

    found = trained(A.sam(rho=0.5, adaptive=True)).params
    for key, wanted in by_hand(find).items():
        torch.testing.assert_close(found[key], wanted)


def test_an_average_has_complex_parameters_and_buffers() -> None:
    """They were left out, and `averaged` gave those of training."""
    first = model()
    average = {"weight": first.weight.detach(), "bias": first.bias.detach()}
    phase = first.phase.clone()
    turns = [0]

    def after(module: Any) -> None:
        nonlocal phase
        turns[0] += 1
        for name in average:
            average[name] = 0.75 * average[name] + 0.25 * getattr(module, name).detach()
        phase = 0.75 * phase + 0.25 * torch.ones(2) * 1j ** turns[0]

    by_hand(gradient, after)
    state = averaged(trained(A.ema(smoothing=0.75, buffers="phase")))
    torch.testing.assert_close(dict(state.params), average)
    torch.testing.assert_close(state.buffers["phase"], phase)


def test_real_and_imaginary_parts_that_are_infinite_become_nan() -> None:
    clipped = clip_by_value({"w": torch.tensor([complex(torch.inf, 3.0), 0.25 - 4j])}, 1.0)["w"]
    assert clipped.real.isnan().tolist() == [True, False]
    torch.testing.assert_close(clipped.imag, torch.tensor([1.0, -1.0]))


NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_tensors_are_averaged_in_float32(dtype: torch.dtype) -> None:
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
    torch.manual_seed(0)
    inputs = [(torch.randn(2, 2), torch.zeros(2, 1)) for _ in range(5)]
    stream = pl.fit(
        Bank(), inputs, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
        algorithms=[A.ema(smoothing=0.5, buffers="bank")],
    )  # fmt: skip
    shown = [averaged(state).buffers["bank"] for event, state in stream if event is Event.BATCH_END]
    full = torch.cat([torch.zeros(1, 2), inputs[0][0][:1], inputs[1][0][:1]])
    wanted = [full[:2], full, 0.75 * full]
    torch.testing.assert_close(shown[:3], wanted)
    for i, (found, bank) in enumerate(zip(shown[3:], (0.25 * full, 0.125 * full), strict=True), start=3):
        torch.testing.assert_close(found, 0.5 * shown[i - 1] + 0.5 * bank)
