"""What an optimizer or a metric of others holds, as values: compared with before, and with what a State holds."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop.frozendict import FrozenDict

# What a State, and so a checkpoint, can hold of an optimizer.
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
_LISTS = frozenset({list, tuple, deque, set, frozenset})
_MAPPINGS = frozenset({dict, OrderedDict, FrozenDict})
COMMON = ATOMS | {Tensor}


@attrs.frozen(eq=False)
class Kept:
    """What a mapping held before a step, to be compared with what it holds after it."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any], params: Iterable[Tensor]) -> Kept:
        numbers = _numbered(params)
        return cls({key: _snapshot(value, numbers) for key, value in values.items()})

    def changed(self, after: Mapping[str, Any], params: Iterable[Tensor]) -> list[str]:
        """The keys that are new, or have another value."""
        numbers = _numbered(params)
        before = self.values
        return [
            key
            for key, value in after.items()
            if key not in before
            or not ((value is before[key] and _is_atom(value)) or _same(_snapshot(value, numbers), before[key]))
        ]

    def carried(self, after: Mapping[str, Any], earlier: Mapping[str, Any], params: Iterable[Tensor]) -> dict[str, Any]:
        """What differs from a newly built optimizer, and what did so before."""
        keys = [key for key in self.changed(after, params) if key not in earlier]
        return {key: after[key] for key in (*(key for key in earlier if key in after), *keys)}

    def removed(self, after: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys of a newly built optimizer that are gone."""
        return tuple(key for key in self.values if key not in after)


def _is_atom(value: Any) -> bool:
    """Whether a value never changes, which most options are."""
    kind = type(value)
    return kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, value)))


def _numbered(params: Iterable[Tensor]) -> dict[int, int]:
    return {id(param): number for number, param in enumerate(params)}


@attrs.frozen
class _Parameter:
    """Stands for a reference to a parameter, which a newly built optimizer has by itself."""

    number: int


def _snapshot(value: Any, params: Mapping[int, int], within: tuple[int, ...] = ()) -> Any:
    """A value that compares by :func:`_same` and doesn't change with the original."""
    kind = type(value)
    if _is_atom(value):
        return value
    if isinstance(value, Tensor):
        number = params.get(id(value))
        return value.detach().clone() if number is None else _Parameter(number)
    if id(value) in within or len(within) > 20:
        return kind
    inside = (*within, id(value))
    if isinstance(value, Mapping):
        return kind, [(_snapshot(k, params, inside), _snapshot(v, params, inside)) for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return kind, copy.copy(value)
    if isinstance(value, list | tuple | deque):
        return kind, [_snapshot(item, params, inside) for item in value]
    if isinstance(value, Iterator):
        return object()  # nothing says how far it is, so it counts as changed
    package = kind.__module__.partition(".")[0]
    if package in ("torch", "random", "numpy"):  # generators of random numbers, and arrays
        state = next((getattr(value, name) for name in ("get_state", "getstate") if hasattr(value, name)), None)
        if state is not None:
            return kind, _snapshot(state(), params, inside)
    if package == "numpy":
        return kind, copy.deepcopy(getattr(getattr(value, "bit_generator", value), "state", value))
    if callable(value) or package in sys.stdlib_module_names or not hasattr(value, "__dict__"):
        return value
    return kind, id(value), [(name, _snapshot(attribute, params, inside)) for name, attribute in vars(value).items()]


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a).__module__ == "numpy" and hasattr(a, "__array__"):
        return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return a is b or bool(a == b)


def unholdable(value: Any, where: str, params: set[int]) -> Iterator[tuple[str, str]]:
    """(place, what is wrong) for each value that no State can hold."""
    kind = type(value)
    if kind in ATOMS:
        return
    if isinstance(value, Tensor):
        if id(value) in params:
            yield where, "is a parameter of the model itself"
        elif kind not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            yield where, f"is a {kind.__name__} of layout {value.layout}, where a State holds plain tensors"
    elif kind in _MAPPINGS:
        for key, item in value.items():
            if isinstance(key, Tensor) or (type(key) is int and key in params):
                yield where, "has parameters, or their id(), as keys"
            else:
                yield from unholdable(key, where, params)
                yield from unholdable(item, f"{where}[{key!r}]" if where else f"self.{key}", params)
    elif kind in _LISTS:
        for index, item in enumerate(value):
            yield from unholdable(item, f"{where}[{index}]", params)
    elif not (kind.__module__ == "numpy" and hasattr(value, "__array__")) and not _is_registered(kind):
        yield where, f"is a {kind.__module__}.{kind.__qualname__}"


def _is_registered(kind: type) -> bool:
    from pure_loop._internal.registry import registered

    return registered(kind) is not None


def tensors_in(value: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor in lists and mappings, and where it is."""
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple | deque):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{where}[{index}]")


Range: TypeAlias = tuple[torch.device, int, int]


def range_of(tensor: Tensor) -> Range:
    """Where a tensor, which isn't empty, lies in memory."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, start, start + (last + 1) * tensor.element_size()


def overlap(a: Range, b: Range) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]
