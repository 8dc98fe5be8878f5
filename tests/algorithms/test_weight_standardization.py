"""Weight standardization, against its formula and torch's convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.algorithms import apply_weight_standardization, bake, standardized
from tests.support.runs import noise


def test_four_weights() -> None:
    wanted = torch.tensor([[-1.341641, -0.447214, 0.447214, 1.341641]])
    torch.testing.assert_close(standardized(torch.tensor([[1.0, 2.0, 3.0, 4.0]])), wanted)
    assert not standardized(torch.full((2, 5), 3.0)).any()


LAYERS: list[Any] = [
    nn.Conv1d(2, 4, 3, stride=2, padding=1),
    nn.Conv2d(2, 4, 3, padding="same", dilation=2, padding_mode="reflect"),
    nn.Conv2d(4, 4, (3, 2), padding=(2, 1), groups=2, padding_mode="circular"),
    nn.Conv2d(2, 4, 3, padding="valid", padding_mode="replicate", bias=False),
    nn.Conv3d(2, 2, 2, padding=1),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_it_is_the_convolution_with_other_weights(layer: Any) -> None:
    x = torch.randn(2, layer.in_channels, *(7, 8, 9)[: layer.weight.ndim - 2], generator=noise())
    changed = apply_weight_standardization(nn.Sequential(layer))
    weight = layer.weight.detach()
    dims = tuple(range(1, weight.ndim))
    wanted = (weight - weight.mean(dims, keepdim=True)) / weight.std(dims, unbiased=False, keepdim=True)
    plain = bake(changed)
    assert type(plain[0]) is type(layer)
    torch.testing.assert_close(plain[0].weight.detach(), wanted)
    torch.testing.assert_close(changed(x), plain(x))


def test_the_last_ones_and_single_weights_stay() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1, groups=2), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))
    changed = apply_weight_standardization(model, skip_last=1)
    assert [type(layer) is nn.Conv2d for layer in changed] == [False, True, False, True]
    with pytest.raises(pl.ModelError, match=r"each filter of 1 is one weight; 0 is one of the last 3"):
        apply_weight_standardization(model, skip_last=3)
