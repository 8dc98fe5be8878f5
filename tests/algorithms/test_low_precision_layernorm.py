"""Layer norms in the precision of autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pure_loop.algorithms import apply_low_precision_layernorm


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.LayerNorm(4, bias=False), nn.RMSNorm(4), nn.RMSNorm(4, 1e-5)])
def test_under_autocast_and_without(layer: nn.Module) -> None:
    low, x = apply_low_precision_layernorm(layer), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert torch.equal(low(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.float32
        assert low(x).dtype is torch.bfloat16
        torch.testing.assert_close(low(x).float(), layer(x), atol=0.01, rtol=0.01)


def test_four_numbers_in_bfloat16() -> None:
    low = apply_low_precision_layernorm(nn.LayerNorm(4))
    with torch.autocast("cpu", torch.bfloat16):
        result = low(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert result.tolist() == [-1.34375, -0.447265625, 0.447265625, 1.34375]
