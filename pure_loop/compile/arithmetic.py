"""Numbers of the step that become tensors: ``torch.tensor(state.timestamp.batch)`` is an input of the graph.

Functions of Python's ``math`` read the number instead (``__float__``), which leaves a guard.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loop.compile.numbers import Number, decided, stands_for_elements

__all__ = ["Constructors"]


class Constructors(TorchFunctionMode):
    """New tensors of numbers of the step."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        if function in _FILLED:
            result = _filled(function, list(args), dict(kwargs))
        elif function in _OF_DATA:
            result = _of_data(function, list(args), dict(kwargs))
        elif not isinstance(function, FunctionType) and not stands_for_elements(function):
            # A size, or a dimension; what torch has in C++ takes nothing that stands for a number there.
            args, kwargs = decided(tuple(args)), decided(dict(kwargs))
        return function(*args, **kwargs) if result is None else result


# At which place each of them takes the number, and under which name.
_FILLED: dict[Any, tuple[int, str]] = {
    torch.full: (1, "fill_value"),
    torch.full_like: (1, "fill_value"),
    Tensor.new_full: (2, "fill_value"),
    torch.scalar_tensor: (0, "s"),
}
_OF_DATA: dict[Any, tuple[int, str]] = {
    torch.tensor: (0, "data"),
    torch.as_tensor: (0, "data"),
    torch.asarray: (0, "obj"),
    Tensor.new_tensor: (1, "data"),
}


def _place(table: dict[Any, tuple[int, str]], function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What holds the argument, and where in it."""
    position, name = table[function]
    return (args, position) if len(args) > position else (kwargs, name)


def _filled(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor | None:
    held, key = _place(_FILLED, function, args, kwargs)
    number = held[key] if held is args else held.get(key)
    if not isinstance(number, Number) or "out" in kwargs:
        return None
    number.kind()
    held[key] = number.value
    requires_grad = kwargs.pop("requires_grad", False)
    result = function(*decided(args), **decided(kwargs))
    return _leaf(result.fill_(_converted(number, result.dtype, result.device)), requires_grad)


def _of_data(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor | None:
    held, key = _place(_OF_DATA, function, args, kwargs)
    data = held[key] if held is args else held.get(key)
    result = _leaves(data)
    if result is None or not any(isinstance(item, Number) for item in result[0]):
        return None
    leaves, shape = result
    like = args[0] if function is Tensor.new_tensor else None
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if dtype is None:
        dtype = _inferred(leaves) if like is None else like.dtype
    if dtype is None:
        return function(*decided(args), **decided(kwargs))  # type: ignore[no-any-return]
    if device is None:
        device = torch.get_default_device() if like is None else like.device
    instance = torch.empty(len(leaves), dtype=dtype, device=device)
    for i, each in enumerate(leaves):
        instance[i] = _converted(each, dtype, instance.device) if isinstance(each, Number) else each
    return _leaf(instance.reshape(shape), kwargs.get("requires_grad", False))


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.requires_grad_() if requires_grad else tensor  # inside torch.func's transforms nothing may ask


def _leaves(data: Any) -> tuple[list[Any], tuple[int, ...]] | None:
    """The numbers in lists of lists, and the shape of a tensor of them; None where they make none."""
    if type(data) not in (list, tuple):
        return [data], ()
    parts = list(map(_leaves, data))
    shapes = {None if part is None else part[1] for part in parts}
    if len(shapes) != 1 or None in shapes:
        return None
    return [leaf for part in parts if part is not None for leaf in part[0]], (len(parts), *(shapes.pop() or ()))


def _inferred(leaves: list[Any]) -> torch.dtype | None:
    """The dtype that torch takes for these numbers; None where it is neither Python's nor one number of NumPy's."""
    kinds = {leaf.kind() if isinstance(leaf, Number) else type(leaf) for leaf in leaves}
    if kinds <= {bool, int, float}:
        return torch.get_default_dtype() if float in kinds else torch.int64 if int in kinds else torch.bool
    (name,) = {str(getattr(kind, "__name__", "")).rstrip("_") for kind in kinds} if len(leaves) == 1 else ("",)
    result = getattr(torch, name, None)
    return result if isinstance(result, torch.dtype) else None


def _converted(number: Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number as torch takes one from Python into a tensor of this dtype."""
    if dtype is torch.bool:
        number = Number.of(number.context, bool, number)
    elif not (dtype.is_floating_point or dtype.is_complex):
        number = Number.of(number.context, int, number)
    return number.tensor(dtype, device, held=True)
