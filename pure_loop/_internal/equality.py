"""Whether two settings are equal: by value where both were built from equal parts, by identity where nothing is known.

Two calls of ``pl.algorithms.sam(rho=0.05)`` make other functions, which have equal code and close over equal values.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import TypeGuard

import attrs
import torch
from torch import Tensor

# Whose objects are what their attributes are.
_TRANSPARENT = ("pure_loop", "torch.utils.data", "torch.nn.modules.loss")
_BY_VALUE = (bool, int, str, bytes, complex, set, frozenset, CodeType, torch.device, torch.dtype)


def equal(a: object, b: object) -> bool:
    """Whether two values were built alike: numbers, containers, tensors, functions, records, and objects of them.

    >>> equal([1, "a"], [1, "a"]), equal(1, True), equal(object(), object())
    (True, False, False)
    """
    pairs, seen = [(a, b)], dict[tuple[int, int], object]()
    while pairs:
        x, y = pairs.pop()
        if x is y or (id(x), id(y)) in seen:
            continue
        seen[id(x), id(y)] = x, y  # so that their ids stay theirs
        if type(x) is not type(y):
            return False
        parts_x, parts_y = _parts(x), _parts(y)
        if parts_x is None or parts_y is None:
            if not _has_value(x, y):
                return False
            continue
        if len(parts_x) != len(parts_y):
            return False
        pairs += zip(parts_x, parts_y, strict=True)
    return True


def _has_value(x: object, y: object) -> bool:
    """Whether two values of one type, of which no parts are known, are equal."""
    kind: type = type(x)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        alike = (x.shape, x.dtype, x.device, x.layout) == (y.shape, y.dtype, y.device, y.layout)
        return alike and x.layout is torch.strided and not x.is_meta and torch.equal(_bits(x), _bits(y))
    if isinstance(x, float) and isinstance(y, float):
        return x.hex() == y.hex()
    array = getattr(x, "tobytes", None), getattr(y, "tobytes", None)
    if kind.__module__ == "numpy" and callable(array[0]) and callable(array[1]):
        described = [(getattr(item, "dtype", None), getattr(item, "shape", None)) for item in (x, y)]
        return described[0] == described[1] and bool(array[0]() == array[1]())
    if kind in (list, tuple):
        return _is_plain(x) and _is_plain(y) and type(x[0]) is type(y[0]) and x == y
    by_value = kind in _BY_VALUE or (kind.__hash__ is not None and "__eq__" in _methods(kind))
    return by_value and bool(x == y)


def _methods(kind: type) -> set[str]:
    """The names that a class has beyond those of every object."""
    return {name for parent in kind.__mro__[:-1] for name in vars(parent)}


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, by which NaN is equal to itself."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _parts(value: object) -> Sequence[object] | None:
    """What a value is made of; None: nothing is known of it, or it is a value by itself."""
    kind: type = type(value)
    if isinstance(value, list | tuple) and kind in (list, tuple):
        return None if _is_plain(value) else value
    if isinstance(value, dict) and (kind in (dict, OrderedDict) or _is_of("pure_loop", kind)):
        # Evaluators run in the order of theirs.
        names = sorted(value, key=str) if kind is dict else list(value)
        return [*names, *(value[name] for name in names)]
    if isinstance(value, functools.partial) and kind is functools.partial:
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        code = value.__code__
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        read = [value.__globals__.get(name) for name in code.co_names]
        return [code, value.__defaults__, value.__kwdefaults__, vars(value), *cells, *read]
    if isinstance(value, torch.Generator):
        return value.device, value.get_state()
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    arguments = getattr(value, "made_with", None) if _is_of("pure_loop", kind) else None  # of a callback or logger
    if arguments is not None:
        return [arguments]
    state = getattr(value, "__dict__", {})
    if attrs.has(kind):
        return [*(getattr(value, field.name) for field in attrs.fields(kind)), dict(state)]
    return [dict(state)] if state and any(_is_of(package, kind) for package in _TRANSPARENT) else None


def _is_plain(value: object) -> TypeGuard[Sequence[object]]:
    """Whether it holds numbers or texts of one type, such as the indices of a subset, which Python compares at once."""
    kinds = set(map(type, value)) if isinstance(value, list | tuple) else set()
    return len(kinds) == 1 and kinds <= {int, str}


def _is_of(package: str, kind: type) -> bool:
    return kind.__module__ == package or kind.__module__.startswith(f"{package}.")


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None
