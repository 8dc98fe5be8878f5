"""Parameters of shape () and of a narrower dtype than others: products of two scalars would take the wider dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from tests.support.holding import DATA, LR, WAYS, fit, last, made


class Scaled(nn.Module):
    """A linear layer with scalars and a vector of this dtype, and others of this one."""

    def __init__(self, dtype: torch.dtype, others: torch.dtype = torch.float32, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2, dtype=others)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=dtype))
        self.shift = nn.Parameter(torch.tensor(0.5, dtype=others))
        self.vector = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x.to(self.layer.weight.dtype)) * self.scale * self.vector + self.shift).float()


class Clipping(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=LR)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1, foreach=False)
        super().step()


def assert_close(state: pl.State, module: nn.Module, **tolerance: Any) -> None:
    for name, param in module.named_parameters():
        assert state.params[name].dtype is param.dtype
        torch.testing.assert_close(state.params[name], param.detach(), **tolerance)


COMPILED = {"compile": True, "watch": {Event.BATCH_END}}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("way", [*WAYS[:4], COMPILED])
def test_they_are_clipped_and_scaled_as_by_hand(way: dict[str, Any]) -> None:
    """Float64 is the wider of both; where bfloat16 is rounded, a graph may round the other way."""
    narrow = torch.float64 if way is COMPILED or "strict" in way else torch.bfloat16
    clipped = last(made(Scaled, narrow), optimizer=Clipping)
    assert_close(pl.run(fit(made(Scaled, narrow), clip_grad=0.1, **way)), clipped)
    # The loss scale is a float32 tensor of shape (), by which gradients are divided.
    model = made(Scaled, torch.float16, torch.float16)
    settings: dict[str, Any] = {"precision": "amp_fp16", "microbatch_size": 4, "clip_grad": 1.0}
    state = pl.run(fit(model, optimizer=pl.optim.sgd(lr=0.1), **settings, **way))
    assert {param.dtype for param in state.params.values()} == {torch.float16}
    assert int(state.skipped) < 6
    assert not any(torch.equal(param, state.params[name]) for name, param in model.named_parameters())


def test_large_gradients_are_clipped_where_they_are() -> None:
    data = [(x.repeat(1, 2**15), y) for x, y in DATA[:1]]
    hand = last(made(Scaled, torch.bfloat16, torch.float32, 2**17), data, Clipping, steps=2)
    for size in (None, 4):
        options = {"clip_grad": 0.1, "watch": {Event.BATCH_END}, "microbatch_size": size}
        state = pl.run(fit(made(Scaled, torch.bfloat16, torch.float32, 2**17), data, **options))
        assert_close(state, hand, rtol=1e-2, atol=1e-3)


def test_algorithms_keep_their_dtype() -> None:
    A = pl.algorithms
    clipping = [A.gradient_clipping(kind, 0.01) for kind in ("norm", "value", "adaptive")]  # type: ignore[arg-type]
    for algorithm in (*clipping, A.sam(adaptive=True), A.ema(half_life="2ba")):
        for others in (torch.float32, torch.bfloat16):
            state = pl.run(fit(made(Scaled, torch.bfloat16, others), DATA, [algorithm], strict=True))
            assert state.params["scale"].dtype is torch.bfloat16
