"""The parameters of a forward: leaves of autograd, and marks on them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor

from pure_loop.frozendict import FrozenDict

__all__ = ["are_leaves", "have_hooks_or_grads"]


def are_leaves(params: Any) -> bool:
    """Whether parameters are leaves of autograd, which share the memory of others."""
    return hasattr(params, "origin")


_marks_of, _UNMARKED = attrgetter("_backward_hooks", "grad"), (None, None)


def have_hooks_or_grads(leaves: FrozenDict[str, Tensor]) -> bool:
    """Whether one of these leaves has a hook or a gradient, which a next forward would use."""
    marks = list(map(_marks_of, leaves.values()))
    if marks.count(_UNMARKED) == len(marks):
        return False
    # A hook that was taken off again leaves an empty dict.
    return any(hooks or gradient is not None for hooks, gradient in marks)
