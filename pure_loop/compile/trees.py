"""Taking a step's values apart into tensors, numbers and the rest, and putting them together again.

What lasts from batch to batch (*durable*: parameters, memory) is taken apart field by field, so that a field of which
nothing changed is never built again. What belongs to the batch may be of any kind that a batch may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any, NoReturn

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal import pytree as _pytree
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.data.batch import map_tensors, open_node
from pure_loop.errors import PureLoopError
from pure_loop.frozendict import FrozenDict
from pure_loop.state import State

__all__ = [
    "DurableFields",
    "LazyField",
    "UnreadFieldError",
    "describe",
    "durable_fields",
    "field_of",
    "reader_of",
    "rebuild",
    "tensors_of",
    "walk",
]

_OF_THE_STEP = frozenset(
    {
        *("model", "timestamp", "previous_timestamp", "seed", "event", "position", "evaluator"),
        *("batch", "microbatch", "outputs", "loss", "_grads", "grad_norm"),
    }
)


def durable_fields(cls: type[State]) -> tuple[str, ...]:
    """The fields of a State (or a subclass of the user's) that a graph takes and gives."""
    return tuple(field.name for field in attrs.fields(cls) if field.name not in _OF_THE_STEP)


def field_of(state: State, name: str) -> Any:
    """A field of a State; that it was read is not noted on it, because it is kept by what counts references itself."""
    return getattr(state, state._slots_behind.get(name, name))


def reader_of(cls: type[State], names: Sequence[str]) -> Callable[[State], Any]:
    """Reads several fields, as :func:`field_of` does."""
    return attrgetter(*[cls._slots_behind.get(name, name) for name in names])


_nothing: Any = None
_no_items: Any = FrozenDict()
_NONE = optree.tree_structure(_nothing, namespace=NAMESPACE)
_EMPTY = optree.tree_structure(_no_items, namespace=NAMESPACE)


class UnreadFieldError(PureLoopError):
    """Traced code looked at a field that its graph was thought not to need."""


class LazyField(FrozenDict[str, Any]):
    """Stands in for a field that would cost something to take along, until traced code looks at it."""

    __slots__ = ()

    def _look(self, *_: Any) -> NoReturn:
        raise UnreadFieldError("a field that no graph takes was read while a step was compiled")

    __getitem__ = __iter__ = __len__ = __contains__ = __eq__ = __or__ = __ror__ = _look
    get = keys = values = items = copy = __copy__ = __repr__ = _look
    __hash__ = None  # type: ignore[assignment]


# Mapping a function over it observes it, too.
_pytree.register(LazyField, LazyField._look, lambda _, children: LazyField(), attributes=False)


def describe(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph takes for granted about a tensor."""
    if tensor.layout is not torch.strided:  # which has no strides, and which no graph takes
        return tensor.shape, tensor.layout, tensor.dtype, tensor.device
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg() or tensor.is_conj()


@attrs.define
class DurableFields:
    """The durable fields of a State, taken apart.

    Attributes:
        values: the fields' values.
        specs: the structure of each.
        ends: where the leaves of each end.
        leaves: those of all fields, in order: tensors and what else there is.
    """

    values: tuple[Any, ...]
    specs: tuple[Any, ...]
    ends: tuple[int, ...]
    leaves: list[Any]

    @classmethod
    def of(cls, state: State, names: tuple[str, ...]) -> DurableFields:
        values = tuple([field_of(state, name) for name in names])
        leaves: list[Any] = []
        specs, ends = [], []
        for value in values:
            # Most fields are one of these, and optree takes longer to say so.
            if value is None:
                spec = _NONE
            elif type(value) is FrozenDict and not value:
                spec = _EMPTY
            else:
                result, spec = optree.tree_flatten(value, namespace=NAMESPACE)
                leaves += result
            specs.append(spec)
            ends.append(len(leaves))
        return cls(values, tuple(specs), tuple(ends), leaves)

    def key(self) -> tuple[Any, ...]:
        """What a graph depends on; numbers go in as numbers, and are none of it."""
        return self.specs, tuple(map(_leaf_key, self.leaves))

    def names(self, fields: tuple[str, ...]) -> list[str]:
        """What each leaf is called, for errors."""
        result = []
        for field, value in zip(fields, self.values, strict=True):
            paths = optree.tree_paths(value, namespace=NAMESPACE)
            result += ["state." + field + "".join(f"[{part!r}]" for part in path) for path in paths]
        return result


def is_number(leaf: Any) -> bool:
    """Whether it is a number of Python's or NumPy's, and no truth value."""
    return type(leaf) is int or type(leaf) is float or (isinstance(leaf, Real) and type(leaf).__module__ == "numpy")


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return describe(leaf)
    if is_number(leaf):
        return type(leaf)
    try:
        hash(leaf)
    except TypeError:
        return _This(leaf)
    return type(leaf), leaf


@attrs.frozen(eq=False)
class _This:
    """Equal to itself alone, by the object that it holds, so that no other object has its address meanwhile."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _This) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a batch, or of anything of its kind."""
    plain = () if value is None or is_number(value) else _plain(value)
    if plain is not None:
        return list(plain)
    result: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        result.append(tensor)
        return tensor

    map_tensors(note, value)
    return result


def _plain(value: Any) -> Sequence[Tensor] | None:
    """The tensors of a tensor, or of a tuple or mapping of ours of such: opening anything else takes its time."""
    kind = type(value)
    if kind is Tensor:
        return (value,)
    if kind is FrozenDict:
        tensors: Sequence[Tensor] = list(value.values())
    elif kind is tuple:
        tensors = value
    else:
        return None
    for item in tensors:
        if type(item) is not Tensor:
            return None
    return tensors


def walk(value: Any, *, by_value: bool = True) -> Any:
    """What a graph depends on in a batch: its structure, its tensors' shapes, and all else by value, or by its type."""
    if isinstance(value, Tensor):
        return describe(value)
    if value is None or is_number(value):
        return type(value), value if by_value else None
    plain = _plain(value)
    if plain is not None:
        return type(value), tuple(value) if isinstance(value, dict) else (), tuple(map(describe, plain))
    node = open_node(value)
    if node is None:
        return _leaf_key(value) if by_value else type(value)
    return type(value), tuple(node.names), tuple([walk(item, by_value=by_value) for item in node.children])


def rebuild(template: Any, tensors: Iterator[Tensor]) -> Any:
    """A value like ``template`` with other tensors in it."""
    if template is None:
        return None
    if isinstance(template, Tensor):
        return next(tensors)
    if _plain(template) is not None:
        if type(template) is tuple:
            return tuple([next(tensors) for _ in template])
        return FrozenDict([(name, next(tensors)) for name in template])
    return map_tensors(lambda _: next(tensors), template)
