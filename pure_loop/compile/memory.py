"""The memory that a stretch writes to: which of it is of its own making, and who else refers to it.

It is what :mod:`pure_loop._ownership` does for eager steps. A stretch writes to whatever lasts, algorithms' memory
included, and refers to it itself, from one call to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import optree
from torch import Tensor

from pure_loop._internal.torch_private import storage_uses, tensor_uses
from pure_loop._ownership import LISTED, ONCE, address_of, were_sent
from pure_loop._pytree import NAMESPACE
from pure_loop.compile.trees import Durable
from pure_loop.frozendict import FrozenDict
from pure_loop.precision import LossScale
from pure_loop.state import State

__all__ = ["Memory"]

# What refers to a tensor besides mappings: the list here, whoever asks, the list that is asked about, and the leaves.
_OURS = 4
# And to its storage: the tensor, and the list here.
_OF_STORAGE = 2


class Memory:
    """Tensors that a stretch has made, which nobody else had seen then.

    Attributes:
        positions: of the durable leaves that they are.
    """

    __slots__ = (
        *("_addresses", "_containers", "_ends", "_fields", "_pointers", "_storages", "_tensors", "_there"),
        "positions",
    )

    def __init__(self, positions: Sequence[int], durable: Durable) -> None:
        self.positions = frozenset(positions)
        self._ends = durable.ends
        self._tensors: list[Tensor] = [durable.leaves[i] for i in positions]
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._pointers = [storage._cdata for storage in self._storages]
        self._addresses = list(map(address_of, self._storages))
        self._there = [at for at, tensor in zip(self._pointers, self._tensors, strict=True) if not tensor.is_cpu]
        # Which fields they are in, and for each tensor the field and the path to what it is in; None: it is the field.
        self._fields: list[int] | None = []
        self._containers: list[tuple[int, tuple[Any, ...] | None]] = []
        begin = 0
        for field, (value, end) in enumerate(zip(durable.values, durable.ends, strict=True)):
            chosen = [i - begin for i in positions if begin <= i < end]
            if chosen:
                paths = optree.tree_paths(value, namespace=NAMESPACE)
                if not all(_in_ours(value, paths[i]) for i in chosen):
                    self._fields = None  # in containers that may be anybody's
                    return
                self._fields.append(field)
                self._containers += [(field, paths[i][:-1] if paths[i] else None) for i in chosen]
            begin = end

    def fields(self) -> list[int]:
        """The durable fields that they are in."""
        return self._fields or []

    def is_in(self, durable: Durable, values: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
        """Whether these durable fields have it where the stretch's last ones, ``before``, had it."""
        fields = range(len(values)) if self._fields is None else self._fields
        return durable.ends == self._ends and all(values[field] is before[field] for field in fields)

    def alone(self, names: Sequence[str], values: tuple[Any, ...], holders: int, shown: State | None) -> bool:
        """Whether nobody refers to these tensors but the stretch, one State, and the State that is shown.

        Args:
            names, values: the durable fields.
            holders: how many tuples of the stretch have the values.
            shown: the State that the consumer is about to give up, if that is alive.
        """
        if self._fields is None:
            return False
        of_fields = {}
        for field in self._fields:
            has = shown is not None and getattr(shown, names[field]) is values[field]
            of_fields[field] = holders + has + 1  # the State has it, too
            # And here it is asked about.
            if not isinstance(values[field], Tensor) and getrefcount(values[field]) != of_fields[field] + 1:
                return False
        counts = []
        for field, path in self._containers:
            if path is None:
                counts.append(_OURS + of_fields[field])
                continue
            container = values[field]
            for key in path:
                container = container[key]
                if getrefcount(container) != 3:  # in the mapping around it, `container`, and asked about
                    return False
            counts.append(_OURS + 1 + hasattr(container, "_tensors"))
        return (
            list(map(getrefcount, self._tensors)) == counts
            and set(map(tensor_uses, self._tensors)) == ONCE
            and set(map(getrefcount, self._storages)) == LISTED
            and list(map(address_of, self._storages)) == self._addresses
            and all(uses == _OF_STORAGE for uses in map(storage_uses, self._pointers))
            and not (self._there and were_sent(self._there))
        )


def _in_ours(value: Any, path: tuple[Any, ...]) -> bool:
    """Whether a leaf is the field itself, in a loss scale, or in a mapping of ours, in one of ours, and so on."""
    if type(value) is LossScale:
        return True
    for key in path:
        if type(value) is not FrozenDict:
            return False
        value = value[key]
    return True
