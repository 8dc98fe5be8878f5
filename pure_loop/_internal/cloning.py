"""Copies of many tensors at once: the call of an operation costs as much as the copy of a small tensor."""

from __future__ import annotations

from torch import Tensor

from pure_loop._internal.torch_private import foreach_clone, transforms

__all__ = ["clone_all", "in_transform"]


def clone_all(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in the layout of the originals.

    >>> import torch
    >>> clone_all([torch.ones(2), torch.tensor(3)])
    [tensor([1., 1.]), tensor(3)]
    """
    if tensors and foreach_clone is not None and not in_transform():
        return list(foreach_clone(tensors))
    return [tensor.clone() for tensor in tensors]


def in_transform() -> bool:
    """Whether this runs inside a transform of ``torch.func``, whose tensors have no memory of their own."""
    return transforms() is not None
