"""The microbatch size that ``microbatch_size="auto"`` has found, and the errors that say that memory is exhausted."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import torch

__all__ = ["NAME", "FoundSize", "found_size", "free_memory", "is_out_of_memory"]

# Under which a State keeps the size, as algorithm state, so that training resumes with it.
NAME = "microbatch_size"

# What torch's allocators, and libraries on a GPU, say in a RuntimeError of no class of its own.
_OF_MEMORY = (
    *("out of memory", "not enough memory", "can't allocate memory", "Cannot allocate memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


@attrs.define
class FoundSize:
    """The microbatch size of the batch under way.

    Attributes:
        size: the samples of a forward, at most; None: the whole batch.
    """

    size: int | None = None


def found_size(state: Any) -> int | None:
    """The size that a State keeps; None: whole batches, or ``microbatch_size`` is not ``"auto"``."""
    size = state.algorithm_state.get(NAME)
    return size if type(size) is int else None  # it may be the memory of an algorithm of this name


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device, or of the host, is exhausted.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    True
    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."))
    True
    >>> is_out_of_memory(RuntimeError("size mismatch"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_MEMORY)


def free_memory(device: torch.device) -> None:
    """Collect what is in cycles, and give the device's cached blocks back."""
    gc.collect()
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
