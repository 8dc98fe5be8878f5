"""Where a number of the step goes through Python's ``math``, or becomes a tensor: both look for a number's value.

``math.cos(math.pi * state.timestamp.elapsed)`` is another number of the step then, and
``torch.tensor(state.timestamp.batch)`` an input of the graph, neither of which anything was decided by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loop._replaced import replaced
from pure_loop.compile.numbers import Number, decided, stands_for_elements

__all__ = ["arithmetic"]


@contextmanager
def arithmetic() -> Iterator[None]:
    """Inside, functions of ``math`` give numbers of numbers, and torch's constructors tensors of them."""
    with ExitStack() as stack:
        for name, function in list(vars(math).items()):
            if callable(function):
                stack.enter_context(replaced(math, name, _of_numbers(function)))
        stack.enter_context(_Constructors())
        yield


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if function in _OF_MANY:
            # An iterator is gone through once.
            lists = [tuple(each) if _is_list(each) else (each,) for each in args]
            sizes = [len(found) if _is_list(each) else None for each, found in zip(args, lists, strict=True)]
            return _of_numbers(_of_lists(function, sizes))(*itertools.chain(*lists), **kwargs)
        number = next((each for each in args if isinstance(each, Number)), None)
        if number is None:
            return function(*args, **kwargs)
        if function in _OF_TWO:
            return tuple(Number.of(number.host, _nth(function, place), *args) for place in range(2))
        return Number.of(number.host, partial(function, **decided(kwargs)), *args)

    return call


_OF_TWO = frozenset({math.modf, math.frexp})
# Of lists of numbers; the last is of Python 3.12.
_OF_MANY = frozenset({math.fsum, math.prod, math.dist, getattr(math, "sumprod", None)})


def _is_list(given: Any) -> bool:
    return not isinstance(given, Number) and isinstance(given, Iterable)


def _of_lists(function: Callable[..., Any], sizes: list[int | None]) -> Callable[..., Any]:
    """The function of all that is in the lists that it takes, one after the other; None: it takes one as it is."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        given = [next(rest) if size is None else tuple(itertools.islice(rest, size)) for size in sizes]
        return function(*given, **kwargs)

    return call


def _nth(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    return lambda *args: function(*args)[place]


class _Constructors(TorchFunctionMode):
    """New tensors of numbers of the step."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, found = kwargs or {}, None
        if function in _FILLED:
            found = _filled(function, list(args), dict(kwargs))
        elif function in _OF_DATA:
            found = _of_data(function, list(args), dict(kwargs))
        elif not isinstance(function, FunctionType) and not stands_for_elements(function):
            # A size, or a dimension; what torch has in C++ takes nothing that stands for a number there.
            args, kwargs = decided(tuple(args)), decided(dict(kwargs))
        return function(*args, **kwargs) if found is None else found


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
    made = function(*decided(args), **decided(kwargs))
    return _leaf(made.fill_(_converted(number, made.dtype, made.device)), requires_grad)


def _of_data(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor | None:
    held, key = _place(_OF_DATA, function, args, kwargs)
    data = held[key] if held is args else held.get(key)
    found = _leaves(data)
    if found is None or not any(isinstance(each, Number) for each in found[0]):
        return None
    leaves, shape = found
    like = args[0] if function is Tensor.new_tensor else None
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if dtype is None:
        dtype = _inferred(leaves) if like is None else like.dtype
    if dtype is None:
        return function(*decided(args), **decided(kwargs))  # type: ignore[no-any-return]
    if device is None:
        device = torch.get_default_device() if like is None else like.device
    made = torch.empty(len(leaves), dtype=dtype, device=device)
    for i, each in enumerate(leaves):
        made[i] = _converted(each, dtype, made.device) if isinstance(each, Number) else each
    return _leaf(made.reshape(shape), kwargs.get("requires_grad", False))


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
    kinds = {each.kind() if isinstance(each, Number) else type(each) for each in leaves}
    if kinds <= {bool, int, float}:
        return torch.get_default_dtype() if float in kinds else torch.int64 if int in kinds else torch.bool
    (name,) = {str(getattr(kind, "__name__", "")).rstrip("_") for kind in kinds} if len(leaves) == 1 else ("",)
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _converted(number: Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number as torch takes one from Python into a tensor of this dtype."""
    if dtype is torch.bool:
        number = Number.of(number.host, bool, number)
    elif not (dtype.is_floating_point or dtype.is_complex):
        number = Number.of(number.host, int, number)
    return number.tensor(dtype, device, held=True)
