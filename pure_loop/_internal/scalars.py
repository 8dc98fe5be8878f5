"""The number in a tensor of the loop's own, read without an operation of torch's.

In the middle of a step an operation on a single number takes up to ten microseconds, ``.item()`` too, which is a
hundredth of a small model's step.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.torch_private import is_transformed

__all__ = ["KINDS", "cell_of", "is_plain", "is_transformed", "one_on"]

# Of the dtypes that C has a number of.
KINDS: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def is_plain(tensor: Any) -> bool:
    """Whether a tensor has a storage of numbers that can be written to, and no class that gives its address another
    meaning.

    >>> import torch
    >>> is_plain(torch.ones(2)), is_plain(torch.ones(2).to_sparse()), is_plain(torch.nn.Parameter(torch.ones(2)))
    (True, False, False)
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not is_transformed(tensor)
    )


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


# Ones that kernels read, made once: to make a tensor takes longer than many a kernel.
_ones: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}


def one_on(device: torch.device, *size: int) -> Tensor:
    """Ones of float32, to be read and not written to.

    Inside of a trace they have no numbers, and are not kept: the next caller would compute with them.

    >>> one_on(torch.device("cpu"), 1)
    tensor([1.])
    """
    result = _ones.get((device, size))
    if result is None:
        result = torch.ones(size, dtype=torch.float32, device=device)
        if type(result) is Tensor:
            _ones[device, size] = result
    return result
