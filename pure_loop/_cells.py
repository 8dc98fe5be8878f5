"""The number in a tensor of the loop's own, read without an operation of torch's.

In the middle of a step an operation on a single number takes up to ten microseconds, ``.item()`` too, which is a
hundredth of a small model's step.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

__all__ = ["KINDS", "cell_of"]

# Of the dtypes that C has a number of.
KINDS: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def cell_of(tensor: Tensor) -> Any:
    """What has the tensor's first number as ``value``, now and after it was written to.

    Args:
        tensor: a plain one on the CPU, not empty, of a dtype in ``KINDS``. It has to stay alive, and its memory where
            it is: ``share_memory_`` and ``set_`` move it, which ``ctypes.addressof`` of what this gives shows.

    Returns:
        A ctypes number in that memory.

    >>> one = torch.ones(())
    >>> cell = cell_of(one)
    >>> _ = one.add_(2)
    >>> cell.value
    3.0
    """
    return KINDS[tensor.dtype].from_address(tensor.data_ptr())
