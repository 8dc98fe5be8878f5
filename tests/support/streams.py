"""States and streams that have to be bitwise equal."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop.testing import differences

Pairs = list[tuple[Event, pl.State]]
WALL_CLOCK = ("total_seconds", "epoch_seconds", "batch_seconds")


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, wall-clock times excepted."""
    paths, values, _ = optree.tree_flatten_with_path(tree, namespace="pure_loop")
    named = {".".join(map(str, path)): value for path, value in zip(paths, values, strict=True)}
    return {path: value for path, value in named.items() if not path.endswith(WALL_CLOCK)}


def frozen_copy(state: pl.State) -> dict[str, Any]:
    return {path: leaf.clone() if isinstance(leaf, Tensor) else leaf for path, leaf in leaves(state).items()}


def assert_same(given: Any, wanted: Any, where: str) -> None:
    """Bitwise equality of two States, or of two dicts of leaves."""
    a, b = (x if isinstance(x, dict) else leaves(x) for x in (given, wanted))
    found = differences(a, b, name="")
    assert not found, f"{where}: {found[0]}"


def assert_same_stream(given: Pairs, wanted: Pairs, where: str) -> None:
    assert [event for event, _ in given] == [event for event, _ in wanted], f"{where}: other events"
    for index, ((event, a), (_, b)) in enumerate(zip(given, wanted, strict=True)):
        assert_same(a, b, f"{where}, {event.name} at position {index}")


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or (x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all()))


def equal(a: Any, b: Any) -> None:
    """Bitwise, leaf by leaf; NaN equals NaN."""
    paths, left, spec = optree.tree_flatten_with_path(a, none_is_leaf=True, namespace="pure_loop")
    right, other = optree.tree_flatten(b, none_is_leaf=True, namespace="pure_loop")
    assert spec == other
    for path, x, y in zip(paths, left, right, strict=True):
        same = _equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        assert same, f"{path}: {x} != {y}"
