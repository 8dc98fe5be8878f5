"""Whether two settings are equal: by value where both were built from equal parts, by identity where nothing is known.

Two calls of ``pl.algorithms.sam(rho=0.05)`` make other functions, which have equal code and close over equal values.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

Pairs: TypeAlias = frozenset[tuple[int, int]]

# Whose objects are what their attributes are.
_TRANSPARENT = ("pure_loop.", "torch.utils.data", "torch.nn.modules.loss")
_BY_VALUE = (bool, int, float, complex, str, bytes, torch.device, torch.dtype, CodeType)


def equal(a: object, b: object, seen: Pairs = frozenset()) -> bool:
    """Whether two values were built alike: numbers, containers, tensors, functions, records, and objects of them.

    >>> equal([1, "a"], [1, "a"]), equal(1, True), equal(object(), object())
    (True, False, False)
    """
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _BY_VALUE):
        return a == b or (a != a and b != b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.layout == b.layout
        return same and a.layout is torch.strided and not a.is_meta and torch.equal(a, b)
    parts_a, parts_b = _parts(a), _parts(b)
    if parts_a is None or parts_b is None or len(parts_a) != len(parts_b):
        return False
    seen |= {(id(a), id(b))}
    return all(equal(x, y, seen) for x, y in zip(parts_a, parts_b, strict=True))


def _parts(value: object) -> Collection[object] | None:
    """What a value is made of; None: nothing is known of it."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *map(_contents, value.__closure__ or ())]
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    kind: type = type(value)
    if attrs.has(kind):
        return [getattr(value, field.name) for field in attrs.fields(kind)]
    if not kind.__module__.startswith(_TRANSPARENT):
        return None
    arguments = getattr(value, "made_with", None)  # of a callback or logger
    state = getattr(value, "__dict__", None) if arguments is None else arguments
    return None if state is None else _parts(state)


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None
