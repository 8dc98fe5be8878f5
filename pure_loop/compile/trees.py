"""Taking a step's values apart into tensors, numbers and the rest, and putting them together again.

What lasts from batch to batch (*durable*: parameters, memory) is taken apart field by field, so that a field of which
nothing changed is never built again. What belongs to the batch may be of any kind that a batch may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias, cast

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal import pytree as _pytree
from pure_loop._internal.pytree import NAMESPACE, Batch, PyTree
from pure_loop.data.batch import map_tensors, open_node
from pure_loop.errors import PureLoopError
from pure_loop.frozendict import FrozenDict
from pure_loop.membership import field_of
from pure_loop.precision import LossScale
from pure_loop.stages.references import Tensors, can_count, count_in
from pure_loop.state import State

_OF_THE_STEP = frozenset(
    {
        *("model", "timestamp", "previous_timestamp", "seed", "data_seed", "data", "ensemble", "event"),
        *("position", "evaluator"),
        *("batch", "microbatch", "outputs", "loss", "_grads", "grad_norm"),
    }
)


def durable_fields(cls: type[State]) -> tuple[str, ...]:
    """The fields of a State (or a subclass of the user's) that a graph takes and gives."""
    return tuple(field.name for field in attrs.fields(cls) if field.name not in _OF_THE_STEP)


def _flatten(tree: PyTree) -> tuple[list[object], optree.PyTreeSpec]:
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def values_of(state: State, names: Sequence[str]) -> tuple[object, ...]:
    """The values of these fields."""
    return tuple([field_of(state, name) for name in names])


def reader_of(cls: type[State], names: Sequence[str]) -> Callable[[State], tuple[object, ...]]:
    """A function that gives the :func:`values_of` these names, of which there are at least two."""
    return attrgetter(*[cls._slots_behind.get(name, name) for name in names])


# Most fields are one of these, and optree takes longer to say so.
_NONE, _EMPTY, _LEAF = (_flatten(value)[1] for value in (None, FrozenDict[str, object](), 0))
_TYPES_OF_LEAVES = frozenset({Tensor, bool, int, float, frozenset})

_STRIDED = torch.strided  # to look it up in torch takes longer


class UnreadFieldError(PureLoopError):
    """Traced code looked at a field that its graph was thought not to need."""


class LazyField(FrozenDict[str, object]):
    """Stands in for a field that would cost something to take along, until traced code looks at it."""

    __slots__ = ()

    def _look(self, *_: object) -> NoReturn:
        raise UnreadFieldError("a field that no graph takes was read while a step was compiled")

    __getitem__ = __iter__ = __len__ = __contains__ = __eq__ = __or__ = __ror__ = _look
    get = keys = values = items = copy = __copy__ = __repr__ = _look
    __hash__ = None  # type: ignore[assignment]


# Mapping a function over it observes it, too.
_pytree.register(LazyField, LazyField._look, lambda _, children: LazyField(), attributes=False)


def describe(tensor: Tensor) -> tuple[object, ...]:
    """What a graph takes for granted about a tensor."""
    if tensor.layout is not _STRIDED:  # which has no strides, and which no graph takes
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

    values: tuple[object, ...]
    specs: tuple[optree.PyTreeSpec, ...]
    ends: tuple[int, ...]
    leaves: list[object]

    @classmethod
    def of(cls, values: tuple[object, ...]) -> DurableFields:
        leaves: list[object] = []
        specs, ends = [], []
        for value in values:
            kind = type(value)
            if value is None:
                spec = _NONE
            elif kind in _TYPES_OF_LEAVES:
                spec = _LEAF
                leaves.append(value)
            elif kind is FrozenDict and not value:
                spec = _EMPTY
            else:
                result, spec = _flatten(value)
                leaves += result
            specs.append(spec)
            ends.append(len(leaves))
        return cls(values, tuple(specs), tuple(ends), leaves)

    def key(self) -> object:
        """What a graph depends on; numbers go in as numbers, and are none of it."""
        return self.specs, tuple(map(_leaf_key, self.leaves))

    def names(self, fields: tuple[str, ...]) -> list[str]:
        """What each leaf is called, for errors."""
        result = []
        for field, spec in zip(fields, self.specs, strict=True):
            result += ["state." + field + "".join(f"[{part!r}]" for part in path) for path in spec.paths()]
        return result


def is_number(leaf: object) -> bool:
    """Whether it is a number of Python's or NumPy's, and no truth value."""
    return type(leaf) is int or type(leaf) is float or (isinstance(leaf, Real) and type(leaf).__module__ == "numpy")


def _paths(tree: PyTree) -> list[tuple[object, ...]]:
    return optree.tree_paths(tree, namespace=NAMESPACE)


def _leaf_key(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return describe(leaf)
    if is_number(leaf):
        return type(leaf)
    try:
        # By the hash, too: an object that was changed in place is still equal to itself.
        return type(leaf), hash(leaf), leaf
    except TypeError:
        return _This(leaf)


@attrs.frozen(eq=False)
class _This:
    """Equal to itself alone, by the object that it holds, so that no other object has its address meanwhile."""

    held: object

    def __eq__(self, value: object) -> bool:
        return isinstance(value, _This) and value.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def tensors_at(leaves: Sequence[object], positions: Iterable[int]) -> list[Tensor]:
    """The leaves at these positions, all of which are tensors."""
    return cast("list[Tensor]", [leaves[i] for i in positions])


def tensors_of(value: Batch) -> list[Tensor]:
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


def walk(value: Batch, *, by_value: bool = True) -> object:
    """What a graph depends on in a batch: its structure, its tensors' shapes, and all else by value, or by its type."""
    if isinstance(value, Tensor):
        return describe(value)
    if value is None or is_number(value):
        return type(value), value if by_value else None
    plain = _plain(value)
    if plain is not None:
        return _key_of_plain(value, plain)
    node = open_node(value)
    if node is None:
        return _leaf_key(value) if by_value else type(value)
    return type(value), tuple(node.names), tuple([walk(item, by_value=by_value) for item in node.children])


def tensors_and_key(per_batch: tuple[Batch, ...]) -> tuple[list[Tensor], object]:
    """The tensors in per-batch values, and what a graph depends on in these, as :func:`walk` says."""
    tensors: list[Tensor] = []
    key: list[object] = []
    for value in per_batch:
        plain = () if value is None else _plain(value)
        if plain is None:
            tensors += tensors_of(value)
            key.append(walk(value))
        else:
            tensors += plain
            key.append(_key_of_plain(value, plain))
    return tensors, tuple(key)


def _key_of_plain(value: Batch, tensors: Sequence[Tensor]) -> object:
    return type(value), tuple(value) if isinstance(value, dict) else (), tuple(map(describe, tensors))


def rebuild(template: Batch, tensors: Iterator[Tensor]) -> Batch:
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


# The memory that a segment writes to. A segment writes to whatever lasts, algorithms' memory included, and refers to it
# itself, from one call to the next; pure_loop.stages.ownership does the like for eager steps.

# What refers to a tensor besides mappings and what counts it: the list of what the graph writes to, and the leaves.
_OURS = 2


Path: TypeAlias = tuple[object, ...]


class Memory:
    """Tensors that a segment has made, unaliased then.

    Attributes:
        positions: of the durable leaves that they are.
    """

    __slots__ = (*("_containers", "_ends", "_fields", "_inner", "_tensors"), "positions")

    def __init__(self, positions: Sequence[int], durable: DurableFields) -> None:
        self.positions = frozenset(positions)
        self._ends = durable.ends
        self._tensors = Tensors(tensors_at(durable.leaves, positions))
        # Which fields they are in, and for each tensor the field and the path to what it is in; None: it is the field.
        self._fields: list[int] | None = []
        self._containers: list[tuple[int, Path | None]] = []
        # The mappings inside those fields on the way to them, once: field and path.
        self._inner: list[tuple[int, Path]] = []
        begin = 0
        for field, (value, end) in enumerate(zip(durable.values, durable.ends, strict=True)):
            chosen = [i - begin for i in positions if begin <= i < end]
            if chosen:
                paths = _paths(value)
                if not all(_in_ours(value, paths[i]) for i in chosen):
                    self._fields = None  # in containers that may be aliased
                    return
                self._fields.append(field)
                self._containers += [(field, paths[i][:-1] if paths[i] else None) for i in chosen]
                inner = {paths[i][:depth] for i in chosen for depth in range(1, len(paths[i]))}
                self._inner += [(field, path) for path in inner]
            begin = end

    def fields(self) -> list[int]:
        """The durable fields that they are in."""
        return self._fields or []

    def is_in(self, durable: DurableFields, values: Sequence[object], before: Sequence[object]) -> bool:
        """Whether these durable fields have it where the segment's last ones, ``before``, had it."""
        fields = range(len(values)) if self._fields is None else self._fields
        return durable.ends == self._ends and all(values[field] is before[field] for field in fields)

    def alone(self, names: Sequence[str], values: Sequence[object], holders: int, observed: State | None) -> bool:
        """Whether only the segment, one State, and the observed State refer to these tensors.

        Args:
            names, values: the durable fields.
            holders: how many tuples of the segment have the values.
            observed: the State that the consumer is about to give up, if that is alive.
        """
        if self._fields is None or not self.positions or not can_count():
            return False
        of_fields = {}
        for field in self._fields:
            has = observed is not None and field_of(observed, names[field]) is values[field]
            of_fields[field] = holders + has + 1  # the State has it, too
        mappings = [field for field in self._fields if not isinstance(values[field], Tensor)]
        if count_in([values[field] for field in mappings]) != [of_fields[field] for field in mappings]:
            return False
        inner = [_at(values, *key) for key in self._inner]
        if count_in(inner) != [1] * len(inner):  # in the mapping around it
            return False
        fields_of: dict[tuple[int, Path | None], int] = {(field, None): count for field, count in of_fields.items()}
        references = [_OURS + fields_of.get(key, 1) for key in self._containers]
        return self._tensors.holders() == references


def _at(values: Sequence[object], field: int, path: Path) -> object:
    value: Any = values[field]
    for key in path:
        value = value[key]
    return value


def _in_ours(value: object, path: Path) -> bool:
    """Whether a leaf is the field itself, in a loss scale, or in a mapping of ours, in one of ours, and so on."""
    if type(value) is LossScale:
        return True
    for key in path:
        if type(value) is not FrozenDict:
            return False
        value = value[key]
    return True
