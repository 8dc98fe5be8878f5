"""A double of CUDA graphs for machines without a GPU: it knows what it records by its addresses, as they do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[list[Tensor]], Sequence[Any]]


class Double:
    """Records calls, and counts: what was recorded, and how often it was replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def of(self, device: torch.device | None) -> Double | None:
        """In the place of what records on a device."""
        return None if device is None else self

    def __call__(self, call: Call, tensors: list[Tensor]) -> tuple[Callable[[], None], Sequence[Any]]:
        there = list(map(at_its_address, tensors))
        before = [tensor.clone() for tensor in there]
        outputs = call(there.copy())
        for tensor, numbers in zip(there, before, strict=True):
            tensor.copy_(numbers)  # what is recorded has not run
        for each in outputs:
            each.zero_()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for given, found in zip(outputs, call(there.copy()), strict=True):
                given.copy_(found)

        return replay, outputs


def at_its_address(tensor: Tensor) -> Tensor:
    """The memory of a tensor, to which nothing refers by this."""
    assert tensor.is_cpu, "nothing records what is on several devices"
    if not tensor.numel():
        return tensor.clone()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * ((last + 1) * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
