"""The leaves of States by their paths: what computes them, how far two are apart, and which differ in a bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.bits import same, tensors_differ
from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop.data.batch import leaves, tensors_in
from pure_loop.event import Event
from pure_loop.state import State, with_fields

# What the loop computes before an event; before others it computes nothing.
LOOP = {
    Event.AFTER_DATALOADER: "data",
    Event.BEFORE_FORWARD: "split into microbatches",
    Event.AFTER_FORWARD: "forward",
    Event.AFTER_LOSS: "loss",
    Event.AFTER_BACKWARD: "backward",
    Event.AFTER_TRAIN_BATCH: "gradients: scale, clip",
    Event.BATCH_END: "optimizer",
    Event.EVAL_BATCH_START: "data of the evaluation",
    Event.EVAL_AFTER_FORWARD: "forward of the evaluation",
    Event.EVAL_END: "metrics",
}
# What every event changes, and what no two runs have in common.
_PASSING = frozenset({"event", "position", "timestamp", "previous_timestamp"})


def leaves_of(state: State) -> Mapping[str, object]:
    """The leaves of a State by their paths, as ``params/0.weight``, without what every event changes."""
    origin = getattr(state.params, "origin", None)
    if origin is not None:
        # Leaves of autograd, of the same numbers. Those of shards are gathered by all ranks where one is read.
        state = with_fields(state, params=origin)
    tree: PyTree = state
    paths, values, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE, none_is_leaf=True)
    named: dict[str, object] = {
        "/".join(map(str, path)): value
        for path, value in zip(paths, values, strict=True)
        if path[0] not in _PASSING and value is not None
    }
    if state.frozen:
        named["frozen"] = state.frozen
    return named


def copied(state: State) -> State:
    """A State with copies of all tensors, which keeps none of its own."""
    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, state)


def map_leaves(function: Callable[[object], object], state: State) -> State:
    """A State with what a function makes of each leaf."""
    tree: PyTree = state
    result: PyTree = optree.tree_map(function, tree, namespace=NAMESPACE)
    assert isinstance(result, State)
    return result


def distance(a: object, b: object) -> float | None:
    """The L2 norm of the difference of two leaves; None where they are not of one shape, or no numbers."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.is_complex() or b.is_complex():
            return None
        a, b = a.detach().to(torch.float64), b.detach().to(a.device, torch.float64)
        return float(torch.linalg.vector_norm(b - a))
    if isinstance(a, int | float) and isinstance(b, int | float) and not isinstance(a, bool):
        return float(abs(b - a))
    return None


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
