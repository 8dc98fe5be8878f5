"""Reading ``device=`` of ``fit``, ``evaluate``, ``predict`` and ``load``."""

from __future__ import annotations

from typing import Any

import torch

from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["read_device"]


def read_device(value: Any) -> torch.device | None:
    """
    Raises:
        ArgumentTypeError, ArgumentError: there is no such device here.
    """
    if value is None:
        return None
    if not isinstance(value, str | torch.device):
        raise ArgumentTypeError(f'device={value!r}: write "cpu", "cuda" or "cuda:0".')
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    # A kind unknown to torch, one that it was built without, one that can hold no tensors: each has its own class.
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device={str(value)!r} can't be used here: {str(error).splitlines()[0]}") from error
    return device
