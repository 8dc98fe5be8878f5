"""The leaves of two States compared bit by bit."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.bits import same, tensors_differ
from pure_loop.data.batch import leaves, tensors_in
from pure_loop.state import State
from pure_loop.verify.leaves import leaves_of

Pair = tuple[int, int]
# Values of which `==` says whether they are equal.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), frozenset, torch.dtype, torch.device)


def unequal_leaves(a: State, b: State, equal: Collection[Pair] = ()) -> tuple[list[str], set[Pair]]:
    """The names of leaves of which a bit differs between two States; NaN equals NaN. Of shards those of this rank.

    Numbers of a device are waited for once.

    Args:
        a, b: the States.
        equal: the addresses of pairs of leaves that are known to be equal.

    Returns:
        The names in the order of the State's fields, and the pairs that are equal.
    """
    first, second = leaves_of(a), leaves_of(b)
    unequal: set[str] = set(first.keys() ^ second.keys())
    same_now: set[Pair] = set()  # of tensors alone: other leaves may be made for the moment
    waiting: list[tuple[str, Pair, Tensor]] = []
    for name in first.keys() & second.keys():
        leaf_a, leaf_b = first[name], second[name]
        pair = id(leaf_a), id(leaf_b)
        if leaf_a is leaf_b:
            continue
        if pair in equal:
            same_now.add(pair)
            continue
        result = _are_unequal(leaf_a, leaf_b)
        if isinstance(result, Tensor):
            waiting.append((name, pair, result))
        elif result:
            unequal.add(name)
        elif isinstance(leaf_a, Tensor):
            same_now.add(pair)
    by_device: dict[torch.device, list[tuple[str, Pair, Tensor]]] = {}
    for item in waiting:
        by_device.setdefault(item[2].device, []).append(item)
    for items in by_device.values():
        for (name, pair, _), result in zip(items, torch.stack([item[2] for item in items]).tolist(), strict=True):
            if result:
                unequal.add(name)
            else:
                same_now.add(pair)
    return [name for name in {**first, **second} if name in unequal], same_now


def _are_unequal(a: Any, b: Any) -> bool | Tensor:
    """Whether two leaves differ; a tensor, shape (), bool, where only their device knows."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return tensors_differ(a, b)
    if type(a) is not type(b):
        return True
    if isinstance(a, _PLAIN):
        return not bool(a == b or (a != a and b != b))
    if hasattr(a, "__array__"):
        return not same(a, b)
    if isinstance(a, SimpleNamespace):  # its `==` takes the truth of tensors, which they don't have
        items, others = dict(leaves(vars(a))), dict(leaves(vars(b)))
        return items.keys() != others.keys() or any(bool(_are_unequal(items[name], others[name])) for name in items)
    # An object of a user's class: by its tensors, or by an `==` of its own.
    tensors_a, tensors_b = tensors_in(a), tensors_in(b)
    if tensors_a or tensors_b:
        return len(tensors_a) != len(tensors_b) or any(
            bool(_are_unequal(x, y)) for x, y in zip(tensors_a, tensors_b, strict=True)
        )
    has_own = any("__eq__" in vars(base) for base in type(a).__mro__[:-1])
    return has_own and not bool(a == b)
