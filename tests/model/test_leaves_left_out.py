"""What algorithms do with leaves of every kind: complex ones, narrow ones, and buffers that come and change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.algorithms.ema import averaged, moving_average
from pure_loop.gradients import clip_by_value
from tests.support.holding import DATA, ends, fit, made
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
