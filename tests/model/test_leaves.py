"""What training and algorithms do with leaves of every kind: complex, narrow, of shape (), and buffers that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms.ema import averaged, moving_average
from pure_loop.gradients.clipping import clip_by_value
from tests.support.holding import DATA, LR, WAYS, ends, fit, last, made, mse
from tests.support.problem import close

A = pl.algorithms


class Waves(nn.Module):
    """A complex matrix, or the same numbers as pairs of real ones, and a real bias."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        weight = torch.randn(4, 2, dtype=torch.complex128)
        self.pairs, self.weight = pairs, nn.Parameter(torch.view_as_real(weight).clone() if pairs else weight)
        self.bias = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.phase = self.phase * 1j  # type: ignore[has-type]
        weight = torch.view_as_complex(self.weight) if self.pairs else self.weight
        return (x.to(weight.dtype) @ weight).abs() + self.bias


DOUBLE = [(x.double(), y.double()) for x, y in DATA]


def test_complex_parameters_are_trained_and_averaged_as_pairs_of_real_ones() -> None:
    for algorithm in (
        *(A.gradient_clipping("norm", 0.1), A.gradient_clipping("value", 0.05), A.gradient_clipping("adaptive", 0.01)),
        *(A.sam(rho=0.05), A.ema(smoothing=0.75, buffers="phase")),
    ):
        options: dict[str, Any] = {"strict": True, "max_duration": "1ep"}
        plain, pairs = (pl.run(fit(made(Waves, each), DOUBLE, [algorithm], **options)) for each in (False, True))
        shown, wanted = (averaged(state) if "ema" in repr(algorithm) else state for state in (plain, pairs))
        for state, other in ((plain, pairs), (shown, wanted)):
            assert state.params["weight"].is_complex()
            parameters = {**state.params, "weight": torch.view_as_real(state.params["weight"])}
            close(parameters, dict(other.params), 1e-9)
            close(dict(state.buffers), dict(other.buffers))
    assert not torch.equal(shown.params["weight"], plain.params["weight"])
    phase = 0.421875 + sum(0.25 * 0.75 ** (3 - turns) * 1j**turns for turns in (1, 2, 3))
    torch.testing.assert_close(shown.buffers["phase"], torch.full((2,), phase, dtype=torch.complex128))


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
        self.layer = nn.Linear(4, 2)
        self.register_buffer("bank", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.bank = torch.cat([self.bank, x.detach()[:1]]) if len(self.bank) < 3 else 0.5 * self.bank
        return self.layer(x)


def test_the_average_of_a_buffer_that_takes_another_shape_begins_there() -> None:
    """(1, 4) and (2, 4) would be averaged by broadcasting."""
    states = ends(Bank(), algorithms=[A.ema(smoothing=0.5, buffers="bank")])
    shown = [averaged(state).buffers["bank"] for state in states]
    full = torch.cat([torch.zeros(1, 4), DATA[0][0][:1], DATA[1][0][:1]])
    torch.testing.assert_close(shown[:3], [full[:2], full, 0.75 * full])
    for i, bank in ((3, 0.25 * full), (4, 0.125 * full)):
        torch.testing.assert_close(shown[i], 0.5 * shown[i - 1] + 0.5 * bank)


# Products of two parameters of shape () and of two dtypes would take the wider one.


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


def sharp(module: nn.Module, batch: Any) -> Tensor:
    """The loss where the gradient leads to, each parameter moved in its own dtype."""
    params = dict(module.named_parameters())
    grads = torch.autograd.grad(mse(module(batch[0]), batch[1]), list(params.values()))
    size = torch.stack([each.float().norm() for each in grads]).norm()
    moved = {n: p + (g * (0.1 / size)).to(p.dtype) for (n, p), g in zip(params.items(), grads, strict=True)}
    return mse(torch.func.functional_call(module, moved, (batch[0],)), batch[1])


def assert_close(state: pl.State, module: nn.Module, **tolerance: Any) -> None:
    for name, param in module.named_parameters():
        assert state.params[name].dtype is param.dtype
        torch.testing.assert_close(state.params[name], param.detach(), **tolerance)


COMPILED = {"compile": True, "watch": {Event.BATCH_END}}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("way", [*WAYS[:4], COMPILED])
def test_they_are_clipped_moved_and_scaled_as_by_hand(way: dict[str, Any]) -> None:
    """Float64 is the wider of both; where bfloat16 is rounded, a graph may round the other way."""
    narrow = torch.float64 if way is COMPILED or "strict" in way else torch.bfloat16
    clipped = last(made(Scaled, narrow), optimizer=Clipping)
    assert_close(pl.run(fit(made(Scaled, narrow), clip_grad=0.1, **way)), clipped)
    loose = {"rtol": 1e-2, "atol": 1e-3} if way is COMPILED else {}
    sam = pl.run(fit(made(Scaled, torch.bfloat16), DATA, [A.sam(rho=0.1)], **way))
    assert_close(sam, last(made(Scaled, torch.bfloat16), loss=sharp), **loose)
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
    clipping = [A.gradient_clipping(kind, 0.01) for kind in ("norm", "value", "adaptive")]  # type: ignore[arg-type]
    for algorithm in (*clipping, A.sam(adaptive=True), A.ema(half_life="2ba")):
        for others in (torch.float32, torch.bfloat16):
            state = pl.run(fit(made(Scaled, torch.bfloat16, others), DATA, [algorithm], strict=True))
            assert state.params["scale"].dtype is torch.bfloat16
