"""Comparing States bit by bit."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

import pure_loop as pl


def leaves(state: pl.State) -> dict[str, Any]:
    """Everything in a State by path (a State is a pytree), but for the times that the clock gave."""
    tree: Any = state
    paths, values, _ = optree.tree_flatten_with_path(tree, namespace="pure_loop")
    named = {".".join(map(str, path)): value for path, value in zip(paths, values, strict=True)}
    return {path: value for path, value in named.items() if not path.endswith("_seconds")}


def copied(state: pl.State) -> dict[str, Any]:
    return {path: leaf.clone() if isinstance(leaf, Tensor) else leaf for path, leaf in leaves(state).items()}


def differences(a: pl.State | dict[str, Any], b: pl.State | dict[str, Any]) -> list[str]:
    """The paths at which two States, or what :func:`copied` made of them, are not bitwise equal."""
    one, other = (x if isinstance(x, dict) else leaves(x) for x in (a, b))
    both = one.keys() & other.keys()
    different = {
        path
        for path in both
        if not (torch.equal(one[path], other[path]) if isinstance(one[path], Tensor) else one[path] == other[path])
    }
    return sorted(different | (one.keys() ^ other.keys()))
