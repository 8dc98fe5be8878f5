"""Reading numbers from a device without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Reading", "on_cpu"]


def on_cpu(value: Any) -> bool:
    """Whether a value can be read at once."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


class Reading:
    """Some values, on their way from the device.

    What is on the CPU is read at once. The rest is copied behind what the device was given so far
    (to pinned memory, where torch has it for the device), and an event on the device says when that is done.
    """

    __slots__ = ("_copies", "_marks", "_read")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._read = {name: float(value) if on_cpu(value) else None for name, value in values.items()}
        self._copies = {
            name: value.detach().to("cpu", non_blocking=True) for name, value in values.items() if not on_cpu(value)
        }
        self._marks = []
        for device in {value.device for value in values.values() if not on_cpu(value)}:
            mark = torch.Event(device)
            mark.record(torch.accelerator.current_stream(device))
            self._marks.append(mark)

    @property
    def ready(self) -> bool:
        """Whether the values are here; asks, and doesn't wait."""
        return all(mark.query() for mark in self._marks)

    def values(self) -> dict[str, float]:
        """The values; waits for the device unless they are ``ready``."""
        for mark in self._marks:
            mark.synchronize()
        read = self._read | {name: float(copy) for name, copy in self._copies.items()}
        return {name: value for name, value in read.items() if value is not None}
