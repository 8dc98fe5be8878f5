"""Ones that kernels read, made once: to make a tensor takes longer than many a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["one_on"]

_ones: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}


def one_on(device: torch.device, *size: int) -> Tensor:
    """Ones of float32, to be read and not written to.

    Inside of a trace they have no numbers, and are not kept: who came next would compute with them.

    >>> one_on(torch.device("cpu"), 1)
    tensor([1.])
    """
    found = _ones.get((device, size))
    if found is None:
        found = torch.ones(size, dtype=torch.float32, device=device)
        if type(found) is Tensor:
            _ones[device, size] = found
    return found
