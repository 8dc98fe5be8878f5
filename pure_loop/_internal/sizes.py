"""Sizes of memory: counted in what a tree holds, and written with their unit."""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE

__all__ = ["bytes_of", "in_bytes"]


def bytes_of(tree: Any) -> int:
    """The bytes of the numbers of all tensors in a tree.

    >>> import torch
    >>> bytes_of({"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int64)]})
    28
    """
    leaves: list[Any] = optree.tree_leaves(tree, namespace=NAMESPACE)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def in_bytes(size: float) -> str:
    """A number of bytes with its unit, in three digits.

    >>> in_bytes(512), in_bytes(5_400_000)
    ('512 B', '5.15 MiB')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1024:.3g} TiB"
