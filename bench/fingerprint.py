"""What the bits of floats depend on: the versions, and the results of a few kernels of this processor."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

__all__ = ["fingerprint"]


def fingerprint() -> dict[str, str]:
    """The versions, what torch's kernels use of this processor, and a digest of what they compute."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": hashlib.blake2b(b"".join(_bits(result) for result in _results()), digest_size=8).hexdigest(),
    }


def _results() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, y, images, filters = randn(17, 33), randn(33, 9), randn(3, 1, 6, 6), randn(4, 1, 3, 3)
    param = randn(19).requires_grad_()
    param.grad = randn(19)
    torch.optim.AdamW([param]).step()
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
        return [
            x @ y,
            (x.bfloat16() @ y.bfloat16()).float(),
            (x.half() @ y.half()).float(),
            x.double() @ y.double(),
            torch.nn.functional.conv2d(images, filters, padding=1),
            torch.nn.functional.conv2d(images.bfloat16(), filters.bfloat16()).float(),
            x.exp(),
            x.tanh(),
            x.softmax(1),
            x.sum(),
            x.norm(),
            param.detach(),
            layer(randn(2, 5, 4)),
            torch.nn.functional.gelu(x),
        ]


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
