"""Group norms in the precision of autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pure_loop.algorithms import apply_low_precision_groupnorm


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.GroupNorm(2, 4, affine=False)])
def test_under_autocast_and_without(layer: nn.Module) -> None:
    low, x = apply_low_precision_groupnorm(layer), torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(low(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.float32
        assert low(x).dtype is torch.bfloat16
        torch.testing.assert_close(low(x).float(), layer(x), atol=0.02, rtol=0.02)
