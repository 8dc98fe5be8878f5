"""Parameters: as the user declared them, for copies and for tensors of a State, and as the leaves of a forward.

``Parameter.__deepcopy__`` drops attributes, and calls the class of a subclass with arguments that it may not take;
pickling drops the class.
"""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from pure_loop._internal.torch_private import subclass_of_tensor
from pure_loop.frozendict import FrozenDict

__all__ = ["are_leaves", "are_marked", "attributes_of", "copy_attributes", "declared_like", "is_declared"]


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """The user's attributes; none of a tensor of another kind, which has its own state there."""
    return vars(parameter) if nn.Parameter in type(parameter).__mro__ else {}


def is_declared(parameter: Tensor) -> bool:
    return bool(attributes_of(parameter)) or (
        type(parameter) is not nn.Parameter and nn.Parameter in type(parameter).__mro__
    )


def declared_like(parameter: Tensor, tensor: Tensor, requires_grad: bool, *, attributes: bool = False) -> Any:
    """This tensor as a parameter of the class of another one, with its attributes if that is said."""
    kind = type(parameter)
    if kind is nn.Parameter or nn.Parameter not in kind.__mro__:
        result: Any = nn.Parameter(tensor, requires_grad=requires_grad)
    else:
        result = subclass_of_tensor(kind, tensor, requires_grad)
    if attributes:
        vars(result).update(attributes_of(parameter))
    return result


def copy_attributes(module: nn.Module, memo: dict[int, Any]) -> None:
    """Give the copies of parameters, which stand in the memo of a deepcopy, copies of their attributes."""
    for parameter in module.parameters():
        if attributes := attributes_of(parameter):
            vars(memo[id(parameter)]).update(copy.deepcopy(attributes, memo))


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
