"""Devices: reading ``device=`` of ``fit``, ``evaluate``, ``predict`` and ``load``, and runs on the meta device."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from pure_loop._internal.reprs import brief
from pure_loop.errors import ArgumentError, ArgumentTypeError


def read_device(value: object) -> torch.device | None:
    """
    Raises:
        ArgumentTypeError, ArgumentError: there is no such device here.
    """
    if value is None:
        return None
    if not isinstance(value, str | torch.device):
        raise ArgumentTypeError(f'device={brief(value)}: write "cpu", "cuda" or "cuda:0".')
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    # A kind unknown to torch, one that it was built without, one that can hold no tensors: each has its own class.
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines()[0]
        if text.startswith("Expected one of"):  # all kinds that torch knows, of which most are unknown here
            text = 'write "cpu", "cuda" or "cuda:0"'
        elif "not compiled" in text or "found no" in text.lower():
            text += '; write device="cpu"'
        raise ArgumentError(f"device={str(value)!r} can't be used here: {text}") from error
    return device


shapes_only: ContextVar[bool] = ContextVar("shapes_only", default=False)


def needs_numbers(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is that of code that reads numbers of a tensor on the meta device.

    >>> import torch
    >>> try:
    ...     torch.zeros((), device="meta").item()
    ... except RuntimeError as error:
    ...     needs_numbers(error)
    True
    """
    while error is not None:
        if isinstance(error, RuntimeError) and "meta" in str(error).lower():
            return True
        error = error.__cause__
    return False
