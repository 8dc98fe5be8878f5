"""Copies of many tensors at once: the call of an operation costs as much as the copy of a small tensor."""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.torch_private import foreach_clone, transforms

__all__ = ["clone_all", "in_transform", "unaliased"]


def clone_all(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in the layout of the originals.

    >>> import torch
    >>> clone_all([torch.ones(2), torch.tensor(3)])
    [tensor([1., 1.]), tensor(3)]
    """
    if tensors and foreach_clone is not None and not in_transform():
        return list(foreach_clone(tensors))
    return [tensor.clone() for tensor in tensors]


def unaliased(tree: Any, other: Any) -> Any:
    """A tree without the tensors of another one: copies in their places; the tree itself where it has none of them.

    >>> import torch
    >>> one, two = torch.ones(1), torch.ones(1)
    >>> copies = unaliased([one, two], {"weight": one})
    >>> copies[0] is one, copies[1] is two
    (False, True)
    """
    leaves: list[Any] = optree.tree_leaves(other, namespace=NAMESPACE)
    known = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    if known.isdisjoint(map(id, optree.tree_leaves(tree, namespace=NAMESPACE))):
        return tree
    copies: Any = optree.tree_map(lambda leaf: leaf.clone() if id(leaf) in known else leaf, tree, namespace=NAMESPACE)
    return copies


def in_transform() -> bool:
    """Whether this runs inside a transform of ``torch.func``, whose tensors have no memory of their own."""
    return transforms() is not None
