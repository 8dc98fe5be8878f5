"""Parameters of shape () and of a narrower dtype than others: products of two scalars would take the wider dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from tests.support.tiers import pairwise

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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Scaled(dtype, width)
    return module.to(dtype) if every else module


def batches(width: int = 4) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, width, generator=g), torch.randn(4, 3, generator=g)) for _ in range(4)]


def by_hand(module: nn.Module, make: Callable[[Any], torch.optim.Optimizer], **more: Any) -> nn.Module:
    """A plain loop with torch's clip_grad_norm_, or with a first step to where SAM takes the gradient."""
    module = copy.deepcopy(module)
    optimizer = make(module.parameters())
    for inputs, targets in batches(more.get("width", 4)):
        mse(module(inputs), targets).backward()
        if "clip" in more:
            nn.utils.clip_grad_norm_(module.parameters(), more["clip"], foreach=False)
        if "rho" in more:
            params = list(module.parameters())
            before = [p.detach().clone() for p in params]
            norm = torch.stack([p.grad.float().norm() for p in params]).norm()  # type: ignore[union-attr]
            with torch.no_grad():
                for p in params:
                    p += (p.grad * (more["rho"] / norm)).to(p.dtype)
            module.zero_grad()
            mse(module(inputs), targets).backward()
            with torch.no_grad():
                for p, old in zip(params, before, strict=True):
                    p.copy_(old)
        optimizer.step()
        module.zero_grad()
    return module


def assert_close(state: pl.State, module: nn.Module, **tolerance: Any) -> None:
    for name, param in module.named_parameters():
        assert state.params[name].dtype is param.dtype
        torch.testing.assert_close(state.params[name], param.detach(), **tolerance)


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda: pl.optim.adamw(lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
    "sgd": (lambda: pl.optim.sgd(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}
WAYS: dict[str, dict[str, Any]] = {
    "all watched": {},
    "one watched": {"watch": {Event.BATCH_END}},
    "strict": {"strict": True},
    "no donation": {"donate": False},
    "compiled": {"compile": True, "watch": {Event.BATCH_END}},
}


@pytest.mark.parametrize(
    ("optimizer", "way", "narrow"),
    pairwise(OPTIMIZERS.keys(), WAYS.keys(), {"bfloat16": torch.bfloat16, "float64": torch.float64}),
)
def test_clipped(optimizer: str, way: str, narrow: torch.dtype, interpreted: None) -> None:
    """As torch's clip_grad_norm_; float64 is the wider of both."""
    ours, theirs = OPTIMIZERS[optimizer]
    model = made(narrow)
    options = {"loss": mse, "optimizer": ours(), "max_duration": "1ep", "clip_grad": 0.1}
    assert_close(pl.run(pl.fit(model, batches(), **options, **WAYS[way])), by_hand(model, theirs, clip=0.1))


def test_clipped_where_gradients_are_large() -> None:
    """Large gradients are clipped where they are."""
    model, data = made(torch.bfloat16, width=2**17), batches(2**17)
    for size in (None, 2):
        state = pl.run(
            pl.fit(
                *(model, data),
                loss=mse,
                optimizer=pl.optim.sgd(lr=0.1),
                max_duration="1ep",
                clip_grad=0.1,
                watch={Event.BATCH_END},
                microbatch_size=size,
            )
        )
        expected = by_hand(model, lambda p: torch.optim.SGD(p, lr=0.1), clip=0.1, width=2**17)
        for name, param in expected.named_parameters():
            assert state.params[name].dtype is param.dtype
            torch.testing.assert_close(state.params[name], param.detach(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("way", ["all watched", "strict", "compiled"])
def test_with_sam(way: str, interpreted: None) -> None:
    model = made(torch.bfloat16)
    options = {"loss": mse, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    state = pl.run(pl.fit(model, batches(), algorithms=[pl.algorithms.sam(rho=0.1)], **options, **WAYS[way]))
    # Where bfloat16 is rounded, a graph may round the other way.
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if way == "compiled" else {}
    assert_close(state, by_hand(model, lambda p: torch.optim.SGD(p, lr=0.1), rho=0.1), **tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_a_loss_scale(dtype: torch.dtype, way: str, interpreted: None) -> None:
    """The loss scale is a float32 tensor of shape (), by which gradients are divided."""
    model = made(dtype, every=True)
    options = {"loss": mse, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "precision": "amp_fp16"}
    state = pl.run(pl.fit(model, batches(), microbatch_size=2, clip_grad=1.0, **options, **WAYS[way]))
    assert {param.dtype for param in state.params.values()} == {dtype}
    assert int(state.skipped) < 4
    moved = [name for name, param in model.named_parameters() if not torch.equal(param, state.params[name])]
    assert len(moved) == 5


@pytest.mark.parametrize("algorithm", ["norm", "value", "adaptive", "asam", "ema"])
def test_with_other_algorithms(algorithm: str) -> None:
    made_of: dict[str, Any] = {
        "asam": lambda: pl.algorithms.sam(adaptive=True),
        "ema": lambda: pl.algorithms.ema(half_life="2ba"),
    }
    make = made_of.get(algorithm, lambda: pl.algorithms.gradient_clipping(algorithm, 0.01))
    options = {"loss": mse, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "1ep", "strict": True}
    for every in (False, True):
        state = pl.run(pl.fit(made(torch.bfloat16, every), batches(), algorithms=[make()], **options))
        assert state.params["scale"].dtype is torch.bfloat16
