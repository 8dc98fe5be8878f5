"""The parameters of a forward: leaves of autograd, and marks on them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor

from pure_loop.frozendict import FrozenDict

__all__ = ["are_leaves", "are_marked"]


def are_leaves(params: Any) -> bool:
    """Whether parameters are leaves of autograd, which share the memory of others."""
    return hasattr(params, "origin")


_marks_of = attrgetter("_backward_hooks", "grad", "__dict__")
_UNMARKED: tuple[None, None, dict[str, Any]] = (None, None, {})


def are_marked(leaves: FrozenDict[str, Tensor]) -> bool:
    """Whether one of these leaves has a hook, a gradient or an attribute, which a next forward would use.

    It is looked at where code outside of the loop has read one (:func:`pure_loop.state.lend`).
    """
    if getattr(leaves, "lent", None) is None:
        return False
    marks = list(map(_marks_of, leaves.values()))
    if marks.count(_UNMARKED) == len(marks):
        return False
    # A hook that was taken off again leaves an empty dict. A parameter that the user declared has attributes.
    return any(
        hooks or gradient is not None or (attributes and type(leaf) is Tensor)
        for leaf, (hooks, gradient, attributes) in zip(leaves.values(), marks, strict=True)
    )
