"""Reading recorded values from their device, in groups."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["read_numbers"]


def read_numbers(values: Sequence[Any]) -> list[int | float]:
    """The values as Python numbers, with one transfer for all tensors of a kind instead of one for each.

    Args:
        values: real numbers, and tensors of one element, on any device.

    >>> read_numbers([1, torch.tensor(0.5), torch.tensor([3]), True])
    [1, 0.5, 3, 1]
    """
    read = list(values)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            alike.setdefault((value.device, value.dtype), []).append(index)
    for indices in alike.values():
        group = torch.stack([values[index].detach().reshape(()) for index in indices]).tolist()
        for index, number in zip(indices, group, strict=True):
            read[index] = number
    return [int(value) if isinstance(value, numbers.Integral) else float(value) for value in read]
