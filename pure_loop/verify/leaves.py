"""The leaves of a State by their paths, what the loop computes before each event, and how far two leaves are apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
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
