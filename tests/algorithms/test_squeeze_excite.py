"""Squeeze-and-excitation, against its formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.algorithms import apply_squeeze_excite, squeeze_excite
from tests.support.runs import noise


@pytest.mark.parametrize(("init", "factor"), [("random", 0.5), ("identity", 1.0)])
def test_gates_of_a_second_matrix_of_zeros(init: str, factor: float) -> None:
    conv, x = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 5, 5, generator=noise())
    gated = apply_squeeze_excite(nn.Sequential(conv), 2, min_channels=1, init=init)
    nn.init.zeros_(gated[0].squeeze_excite.up.weight)
    torch.testing.assert_close(gated(x), factor * conv(x))


def test_the_formula() -> None:
    conv, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 5, generator=noise())
    gated = apply_squeeze_excite(nn.Sequential(conv), 3, min_channels=1)[0]
    down, up = gated.squeeze_excite.down.weight, gated.squeeze_excite.up.weight
    y = conv(x)
    gates = torch.sigmoid(torch.relu(y.mean((2, 3)) @ down.T) @ up.T)
    torch.testing.assert_close(gated(x), y * gates[:, :, None, None])


@pytest.mark.parametrize(("latent", "size"), [(3, 3), (0.5, 4), (0.01, 1), (64, 64)])
def test_the_number_of_values_between(latent: float, size: int) -> None:
    gated = apply_squeeze_excite(nn.Conv2d(8, 8, 1, dtype=torch.float64), latent, min_channels=8)
    assert gated.squeeze_excite.down.weight.shape == (size, 8)
    assert gated.squeeze_excite.down.weight.dtype is torch.float64


def test_narrow_convolutions_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 128, 3), nn.Conv2d(128, 128, 3), nn.Conv2d(128, 10, 3))
    gated = apply_squeeze_excite(model)
    assert [hasattr(layer, "squeeze_excite") for layer in gated] == [False, True, False]
    with pytest.raises(pl.ModelError, match=r"0 has 3 input and 128 output channels; .*min_channels=129"):
        apply_squeeze_excite(model, min_channels=129)
    with pytest.raises(pl.ArgumentError, match="latent"):
        squeeze_excite(0)
