"""Numbers on a device, read without waiting for it; and the mean loss of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.recordable import is_scalar

__all__ = ["MeanLoss", "Reading", "on_cpu"]


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


# One sum of so many losses costs as much as two operations on the device.
_TOGETHER = 64


class MeanLoss:
    """The mean of losses, each weighed by the samples of its batch.

    Losses are collected, and summed up on their device a number at a time.

    Args:
        skips: leave out losses that are not finite, as training does.

    >>> mean = MeanLoss()
    >>> mean.add(torch.tensor(1.0), 4)
    >>> mean.add(torch.tensor(4.0), 2)
    >>> mean.take(), mean.take()
    (tensor(2., dtype=torch.float64), None)
    """

    __slots__ = ("_left_out", "_losses", "_samples", "_skips", "_sum", "_weight")

    def __init__(self, *, skips: bool = False) -> None:
        self._skips = skips
        self._losses: list[Any] = []
        self._samples = 0
        self._sum: Any = 0.0
        self._weight = 0
        # The samples of losses that are left out; on the device.
        self._left_out: Any = 0

    @property
    def count(self) -> int:
        """The samples since the last mean."""
        return self._weight + self._samples * len(self._losses)

    def add(self, loss: Any, samples: int) -> None:
        """Count the loss of a batch of so many samples; nothing, if it is no number."""
        if (type(loss) is not Tensor or loss.ndim) and not is_scalar(loss):
            return
        if samples != self._samples or len(self._losses) >= _TOGETHER:
            self._fold()
            self._samples = samples
        self._losses.append(loss)

    def take(self) -> Any:
        """The mean of those that were added, on their device; None if there are none. It begins anew."""
        self._fold()
        mean = self._sum / (self._weight - self._left_out) if self._weight else None
        self._sum, self._weight, self._left_out = 0.0, 0, 0
        return mean

    def _fold(self) -> None:
        losses = [
            torch.as_tensor(loss).reshape(()) if type(loss) is not Tensor or loss.ndim else loss
            for loss in self._losses
        ]
        self._losses.clear()
        if losses:
            with torch.no_grad():
                values = torch.stack(losses)
                if self._skips:
                    finite = torch.isfinite(values)
                    self._left_out = self._left_out + self._samples * (~finite).sum()
                    values = torch.where(finite, values, 0.0)
                self._sum = self._sum + self._samples * _summed(values)
            self._weight += self._samples * len(losses)


def _summed(values: Tensor) -> Tensor:
    # Not every device has float64.
    return values.sum(dtype=torch.float64 if values.device.type == "cpu" else torch.float32)
