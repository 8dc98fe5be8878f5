"""Marks on the leaves of autograd: hooks and gradients that a later forward would use."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pure_loop.frozendict import FrozenDict

__all__ = ["have_hooks_or_grads", "hook_counter"]

_marks_of, _UNMARKED = attrgetter("_backward_hooks", "grad"), (None, None)
_gradient_of = attrgetter("grad")


def hook_counter() -> int:
    """Another number after a hook was registered, on whichever tensor."""
    return RemovableHandle.next_id


def have_hooks_or_grads(leaves: FrozenDict[str, Tensor], *, unhooked: bool = False) -> bool:
    """Whether one of these leaves has a hook or a gradient, which a next forward would use.

    ``unhooked`` says that there can be no hook.
    """
    if unhooked:
        gradients = list(map(_gradient_of, leaves.values()))
        return gradients.count(None) != len(gradients)
    marks = list(map(_marks_of, leaves.values()))
    if marks.count(_UNMARKED) == len(marks):
        return False
    # A hook that was taken off again leaves an empty dict.
    return any(hooks or gradient is not None for hooks, gradient in marks)
