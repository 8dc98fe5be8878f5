"""The memory that a segment writes to: which of it the segment has made, and whether other references to it exist.

It is what :mod:`pure_loop.stages.ownership` does for eager steps. A segment writes to whatever lasts, algorithms'
memory included, and refers to it itself, from one call to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop.compile.trees import DurableFields, field_of
from pure_loop.frozendict import FrozenDict
from pure_loop.precision import LossScale
from pure_loop.stages.references import can_count, count_in, storages_are_unshared
from pure_loop.state import State

__all__ = ["Memory"]

# What refers to a tensor besides mappings and the list here: the list of what the graph writes to, and the leaves.
_OURS = 2


class Memory:
    """Tensors that a segment has made, unaliased then.

    Attributes:
        positions: of the durable leaves that they are.
    """

    __slots__ = (
        *("_containers", "_ends", "_fields", "_inner", "_tensors"),
        "positions",
    )

    def __init__(self, positions: Sequence[int], durable: DurableFields) -> None:
        self.positions = frozenset(positions)
        self._ends = durable.ends
        self._tensors: list[Tensor] = [durable.leaves[i] for i in positions]
        # Which fields they are in, and for each tensor the field and the path to what it is in; None: it is the field.
        self._fields: list[int] | None = []
        self._containers: list[tuple[int, tuple[Any, ...] | None]] = []
        # The mappings inside those fields on the way to them, once: field and path.
        self._inner: list[tuple[int, tuple[Any, ...]]] = []
        begin = 0
        for field, (value, end) in enumerate(zip(durable.values, durable.ends, strict=True)):
            chosen = [i - begin for i in positions if begin <= i < end]
            if chosen:
                paths = optree.tree_paths(value, namespace=NAMESPACE)
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

    def is_in(self, durable: DurableFields, values: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
        """Whether these durable fields have it where the segment's last ones, ``before``, had it."""
        fields = range(len(values)) if self._fields is None else self._fields
        return durable.ends == self._ends and all(values[field] is before[field] for field in fields)

    def alone(self, names: Sequence[str], values: tuple[Any, ...], holders: int, shown: State | None) -> bool:
        """Whether only the segment, one State, and the observed State refer to these tensors.

        Args:
            names, values: the durable fields.
            holders: how many tuples of the segment have the values.
            shown: the State that the consumer is about to give up, if that is alive.
        """
        if self._fields is None or not self._tensors or not can_count():
            return False
        of_fields = {}
        for field in self._fields:
            has = shown is not None and field_of(shown, names[field]) is values[field]
            of_fields[field] = holders + has + 1  # the State has it, too
        mappings = [field for field in self._fields if not isinstance(values[field], Tensor)]
        if count_in([values[field] for field in mappings]) != [of_fields[field] for field in mappings]:
            return False
        inner = [_at(values, *key) for key in self._inner]
        if count_in(inner) != [1] * len(inner):  # in the mapping around it
            return False
        in_mappings: dict[Any, int] = {(field, path): 1 for field, path in set(self._containers) if path is not None}
        references = [_OURS + in_mappings.get(key, of_fields[key[0]]) for key in self._containers]
        return count_in(self._tensors) == references and storages_are_unshared(self._tensors)


def _at(values: Sequence[Any], field: int, path: tuple[Any, ...]) -> Any:
    value = values[field]
    for key in path:
        value = value[key]
    return value


def _in_ours(value: Any, path: tuple[Any, ...]) -> bool:
    """Whether a leaf is the field itself, in a loss scale, or in a mapping of ours, in one of ours, and so on."""
    if type(value) is LossScale:
        return True
    for key in path:
        if type(value) is not FrozenDict:
            return False
        value = value[key]
    return True
