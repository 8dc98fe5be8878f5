"""Batches as pytrees: what is in one, its leaves mapped, moved to a device and described.

A batch is any nesting of tuples, named tuples, lists, mappings, dataclasses, attrs classes and registered classes.
:mod:`pure_loop.data.samples` says which of its leaves hold samples.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast

import attrs
import optree
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pure_loop._internal.pytree import NAMESPACE, Batch
from pure_loop._internal.torch_private import registered_pytrees
from pure_loop.errors import DataError

T = TypeVar("T")

# What belongs to a batch as a whole: no container, and without samples.
INDIVISIBLE = (str, bytes, Number, Enum, type(None), torch.dtype, torch.device, torch.Size)

HOW_TO_COUNT = "loss=pl.Task(loss=..., samples=lambda batch: ..., split=lambda batch, size: [...])"
# Items of a container that are shown.
_SHOWN = 6


class Node(NamedTuple):
    """The children of a node, their names in an error's path, and the way back."""

    children: Sequence[object]
    names: Sequence[str]
    build: Callable[[Sequence[object]], object]


class Array(Protocol):
    """An array of NumPy's, which need not be installed."""

    @property
    def ndim(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    def tobytes(self) -> bytes: ...


class Movable(Protocol):
    """An object that moves itself to a device, or gives a copy there."""

    def to(self, device: torch.device) -> object: ...


class Graphs(Protocol):
    """A batch of graphs as torch_geometric collates it: one large graph, which knows its parts."""

    num_graphs: int

    @classmethod
    def from_data_list(cls, graphs: Sequence[object], follow_batch: Sequence[str]) -> object: ...
    def to_data_list(self) -> list[object]: ...
    def keys(self) -> Iterable[str]: ...


def to_device(batch: T, device: torch.device | str, *, stays: bool = False) -> T:
    """A batch with its tensors on ``device``, each moved once; the same object where nothing has to move.

    An object with a method ``to`` of its own (a ``TensorDict``, a ``PackedSequence``, a batch of graphs) is moved by
    it, as a copy, so that one that moves itself leaves the batch as it was.

    Args:
        batch: what to move.
        device: where to.
        stays: whether its pinned memory stays as it is until the device has read it: a copy from there isn't waited
            for then (``non_blocking``).

    >>> batch = (torch.zeros(2), "name")
    >>> to_device(batch, "cpu") is batch
    True
    """
    device = torch.device(device)
    items: Any = batch
    # By far the commonest batch: a tuple or list of tensors. One of a subclass may hold more than its items.
    if type(items) is tuple or type(items) is list:
        for item in items:
            if type(item) is not Tensor or item.device != device:
                break
        else:
            return batch
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            # A copy to the host must end before it is read, and nothing would wait for it. One from pinned memory is
            # still to come when this returns, while one from other memory has been read.
            apart = stays and device.type != "cpu" and tensor.device.type == "cpu" and tensor.is_pinned()
            moved[id(tensor)] = tensor.to(device, non_blocking=apart)
        return moved[id(tensor)]

    return map_tensors(move, batch, lambda value: _moved(value, device))


def _moved(value: Movable, device: torch.device) -> object:
    """An object on a device, by its own ``to``."""
    tensors = tensors_in(value)
    if tensors and all(tensor.device == device for tensor in tensors):
        return value
    copied = value if isinstance(value, tuple) else copy.copy(value)
    moved = copied.to(device)
    return copied if moved is None else moved


def map_tensors(
    function: Callable[[Tensor], Tensor], value: T, of_movable: Callable[[Movable], object] | None = None
) -> T:
    """A nesting with every tensor in it mapped; the same object where all stay the same.

    ``of_movable``, if it is given, maps objects with a method ``to``, instead of the tensors in them.
    """
    return cast("T", _mapped(function, value, of_movable))


def _mapped(
    function: Callable[[Tensor], Tensor], value: object, of_movable: Callable[[Movable], object] | None
) -> object:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, INDIVISIBLE) or is_texts(value):
        return value
    if of_movable is not None and _is_movable(value):
        return of_movable(value)
    node = open_node(value)
    if node is None:
        return value
    children = [_mapped(function, child, of_movable) for child in node.children]
    return value if all(a is b for a, b in zip(children, node.children, strict=True)) else node.build(children)


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of a nesting, in its order."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def describe(value: object) -> str:
    """What a batch holds, for errors: shapes and types, no numbers.

    >>> describe((torch.zeros(8, 3), {"label": torch.arange(8), "name": ["a"] * 8}))
    "(tensor (8, 3) float32, {'label': tensor (8,) int64, 'name': 8 texts})"
    """
    if isinstance(value, Tensor) or is_array(value):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if is_texts(value):
        return f"{len(value)} texts"
    if isinstance(value, Mapping):
        return (
            f"{{{_some([f'{key!r}: {describe(child)}' for key, child in list(value.items())[:_SHOWN]], len(value))}}}"
        )
    names = _fields(value)
    if names is not None:
        inside = _some([f"{name}={describe(getattr(value, name))}" for name in names[:_SHOWN]], len(names))
        return f"{type(value).__name__}({inside})"
    if type(value) is tuple or type(value) is list:
        inside = _some([describe(child) for child in value[:_SHOWN]], len(value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return "None" if value is None else type(value).__name__


def _some(items: list[str], count: int) -> str:
    return ", ".join(items) + (f", ... {count - len(items)} more" if count > len(items) else "")


def open_node(value: Any) -> Node | None:
    """One level of a pytree, whichever engine knows its class, of a mapping or a record; None for a leaf."""
    if not optree.tree_is_leaf(value, none_is_leaf=True, namespace=NAMESPACE):
        level: Any = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=NAMESPACE)
        children, metadata, entries, unflatten = level
        attributes = not isinstance(value, (tuple, list, Mapping)) or hasattr(value, "_fields")
        entries = getattr(value, "_fields", entries)
        names = [f".{entry}" if attributes else f"[{entry!r}]" for entry in entries]
        return Node(children, names, lambda items: unflatten(metadata, tuple(items)))
    registered = registered_pytrees.get(type(value))
    if registered is not None:
        flat, context = registered.flatten_fn(value)
        names = [f"[{i}]" for i in range(len(flat))]
        return Node(flat, names, lambda items: registered.unflatten_fn(list(items), context))
    if isinstance(value, Mapping):
        names = [f"[{key!r}]" for key in value]
        return Node(list(value.values()), names, partial(_mapping_like, value, list(value)))
    fields = _fields(value)
    if fields is not None:
        names = [f".{name}" for name in fields]
        return Node([getattr(value, name) for name in fields], names, partial(_record_like, value, fields))
    return None


def _mapping_like(value: Mapping[object, object], keys: Sequence[object], children: Sequence[object]) -> object:
    items = dict(zip(keys, children, strict=True))
    if isinstance(value, UserDict):  # its subclasses may be made in other ways, and have attributes besides
        result = copy.copy(value)
        result.data = items
        return result
    make: Callable[[dict[object, object]], object] = type(value)
    try:
        return make(items)
    except TypeError as error:
        raise DataError(
            f"a {type(value).__name__} with other values can't be made from a dict of them: {error}. Register the "
            f"class with optree.register_pytree_node(..., namespace={NAMESPACE!r}), or say how to split: "
            f"{HOW_TO_COUNT}"
        ) from error


def _record_like(value: object, fields: Sequence[str], items: Sequence[object]) -> object:
    """A record with other values in its fields, made without calling its ``__init__``."""
    record = copy.copy(value)
    for name, item in zip(fields, items, strict=True):
        object.__setattr__(record, name, item)
    return record


def _fields(value: object) -> Sequence[str] | None:
    """The names of the fields of a dataclass or an attrs class; None for anything else."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif attrs.has(kind):
        names = [field.name for field in attrs.fields(kind)]
    else:
        return None
    return [name for name in names if hasattr(value, name)]


def _is_movable(value: object) -> TypeGuard[Movable]:
    return callable(getattr(type(value), "to", None)) and not isinstance(value, nn.Module)


def leaves(
    value: object, path: str = "batch", opening: Callable[[object], bool] | None = None
) -> Iterator[tuple[str, object]]:
    """What is in a batch; ``opening`` says of each node whether to go into it."""
    node = None if isinstance(value, Tensor) or is_texts(value) or _is_unit(value) else open_node(value)
    if node is None or (opening is not None and not opening(value)):
        yield path, value
    else:
        for child, name in zip(node.children, node.names, strict=True):
            yield from leaves(child, path + name, opening)


def is_array(value: object) -> TypeGuard[Array]:
    """Whether it is an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_texts(value: object) -> TypeGuard[Sequence[str | bytes]]:
    """Whether it is a list or tuple of texts, and not empty."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (str, bytes)) for item in value)


def is_graphs(value: object) -> TypeGuard[Graphs]:
    """Whether it is a batch of graphs."""
    made_of_graphs = callable(getattr(type(value), "from_data_list", None))
    return made_of_graphs and callable(getattr(type(value), "to_data_list", None)) and hasattr(value, "num_graphs")


def _is_unit(value: object) -> bool:
    """Whether an object can be cut as a whole."""
    return isinstance(value, PackedSequence) or is_graphs(value) or size_of_unit(value) is not None


def size_of_unit(value: object) -> int | None:
    """How many samples an object with a ``batch_size`` holds that is a ``torch.Size``; None of any other."""
    size = getattr(value, "batch_size", None) if hasattr(type(value), "__getitem__") else None
    return size[0] if isinstance(size, torch.Size) and size else None


def are_alike(first: Batch, second: Batch) -> bool:
    """Whether two batches are known to be equal."""
    (of_first, structure), (of_second, structure_of_second) = map(_flat, (first, second))
    return structure == structure_of_second and all(map(_equal, of_first, of_second))


def _flat(batch: Batch) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(batch, none_is_leaf=True, namespace=NAMESPACE)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "__array__") else bool(equal)
