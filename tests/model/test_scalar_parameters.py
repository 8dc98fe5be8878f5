"""Parameters of shape () and of a narrower dtype than others: products of two scalars would take the wider dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from tests.support.problem import noise

mse = nn.functional.mse_loss


class Scaled(nn.Module):
    """A linear layer with scalars and a vector of this dtype."""

    def __init__(self, dtype: torch.dtype, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=dtype))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.vector = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x.to(self.layer.weight.dtype)) * self.scale * self.vector + self.shift).float()


def made(dtype: torch.dtype, every: bool = False, width: int = 4) -> nn.Module:
    with seeded(0):
        module = Scaled(dtype, width)
    return module.to(dtype) if every else module


def batches(width: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, width, generator=noise(i)), torch.randn(4, 3, generator=noise(i + 9))) for i in range(4)]


def fit(model: nn.Module, width: int = 4, **options: Any) -> pl.State:
    settings: dict[str, Any] = {"loss": mse, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    return pl.run(pl.fit(model, batches(width), **settings | options))


def by_hand(module: nn.Module, clip: float | None = None, rho: float | None = None, width: int = 4) -> nn.Module:
    """A plain loop with torch's clip_grad_norm_, or with a first step to where SAM takes the gradient."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    params: list[Any] = list(module.parameters())
    for inputs, targets in batches(width):
        mse(module(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip, foreach=False)
        if rho is not None:
            before = [p.detach().clone() for p in params]
            norm = torch.stack([p.grad.float().norm() for p in params]).norm()
            for p in params:
                p.data += (p.grad * (rho / norm)).to(p.dtype)
            module.zero_grad()
            mse(module(inputs), targets).backward()
            for p, old in zip(params, before, strict=True):
                p.data.copy_(old)
        optimizer.step()
        module.zero_grad()
    return module


def assert_close(state: pl.State, module: nn.Module, **tolerance: Any) -> None:
    for name, param in module.named_parameters():
        assert state.params[name].dtype is param.dtype
        torch.testing.assert_close(state.params[name], param.detach(), **tolerance)


WAYS: dict[str, dict[str, Any]] = {
    "all watched": {},
    "one watched": {"watch": {Event.BATCH_END}},
    "strict": {"strict": True},
    "no donation": {"donate": False},
    "compiled": {"compile": True, "watch": {Event.BATCH_END}},
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("way", WAYS)
def test_they_are_clipped_moved_and_scaled_as_by_hand(way: str) -> None:
    """Float64 is the wider of both; where bfloat16 is rounded, a graph may round the other way."""
    options, loose = WAYS[way], {"rtol": 1e-2, "atol": 1e-3} if way == "compiled" else {}
    narrow = torch.float64 if way in ("strict", "compiled") else torch.bfloat16
    assert_close(fit(made(narrow), clip_grad=0.1, **options), by_hand(made(narrow), clip=0.1))
    sam = fit(made(torch.bfloat16), algorithms=[pl.algorithms.sam(rho=0.1)], **options)
    assert_close(sam, by_hand(made(torch.bfloat16), rho=0.1), **loose)
    # The loss scale is a float32 tensor of shape (), by which gradients are divided.
    for dtype in (torch.bfloat16, torch.float16) if way != "compiled" else (torch.float16,):
        model = made(dtype, every=True)
        state = fit(model, precision="amp_fp16", microbatch_size=2, clip_grad=1.0, **options)
        assert {param.dtype for param in state.params.values()} == {dtype}
        assert int(state.skipped) < 4
        assert not any(torch.equal(param, state.params[name]) for name, param in model.named_parameters())


def test_large_gradients_are_clipped_where_they_are() -> None:
    for size in (None, 2):
        options = {"clip_grad": 0.1, "watch": {Event.BATCH_END}, "microbatch_size": size}
        state = fit(made(torch.bfloat16, width=2**17), width=2**17, **options)
        expected = by_hand(made(torch.bfloat16, width=2**17), clip=0.1, width=2**17)
        assert_close(state, expected, rtol=1e-2, atol=1e-3)


def test_algorithms_keep_their_dtype() -> None:
    A = pl.algorithms
    clipping = [A.gradient_clipping(kind, 0.01) for kind in ("norm", "value", "adaptive")]  # type: ignore[arg-type]
    for algorithm in (*clipping, A.sam(adaptive=True), A.ema(half_life="2ba")):
        for every in (False, True):
            state = fit(made(torch.bfloat16, every), algorithms=[algorithm], strict=True)
            assert state.params["scale"].dtype is torch.bfloat16
