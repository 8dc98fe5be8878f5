"""Who refers to parameters and an optimizer's memory: counted, by Python and by torch, against what the loop refers to.

Python counts the references to a mapping or a tensor, torch those to what is behind a tensor (a graph or a DLPack
capsule adds one) and to a storage (a view or an array adds one). What the loop itself has is known beforehand, so that
one reference more is somebody else's, whenever it was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import shared_cache

from pure_loop._cells import is_plain
from pure_loop._consumer import COUNTS_CAN_BE_TRUSTED
from pure_loop._internal.torch_private import storage_goes_back, storage_uses, tensor_uses, transforms
from pure_loop._parts import part_of
from pure_loop._pytree import NAMESPACE
from pure_loop.frozendict import FrozenDict
from pure_loop.state import State, memory_in

__all__ = [
    "CAN_COUNT",
    "LISTED",
    "ONCE",
    "Held",
    "address_of",
    "has_tensors",
    "held_once",
    "were_sent",
]

Path: TypeAlias = tuple[str, ...]

# What refers to a tensor besides the mappings and lists that it is in: the list of a Held, and whoever asks.
_OURS = 2
# And to its storage: the tensor, and a Held.
_OF_STORAGE = 2
ONCE = {1}
# A storage's Python object, of which there is one however often it is asked for: by torch, in a list, and asked about.
LISTED = {3}
address_of = torch.UntypedStorage.data_ptr
_OF_ONE_DTYPE = ({torch.float32}, {torch.float64})


class Held:
    """Parameters and an optimizer's memory that the loop has made, and whether anybody else refers to them.

    Attributes:
        params: the parameters.
        trained: those that are trained, if not all are.
        leaves: the autograd leaves that share the parameters' memory, once there are some.
        bound_to: the module instance in which these stand, once they do.
        unread: what :func:`pure_loop.state.last_reading` gave when the memory was last found to be nobody else's; it
            is still, while that gives the same, if the optimizer keeps nothing.
        overwrite_unread: how the optimizer overwrites a memory that is nobody else's; None: it may itself keep it.
        unhooked: what :func:`pure_loop.model.hooks_so_far` gave when no leaf had a hook.
        values: those that are trained, as a list.
        alike: whether these are on the CPU, and of one dtype, float32 or float64.
    """

    __slots__ = (
        *("bound_to", "_mappings", "_of_memory", "_of_params"),
        *("alike", "leaves", "overwrite_unread", "params", "trained", "unhooked", "unread", "values"),
    )

    def __init__(
        self,
        params: FrozenDict[str, Tensor],
        trained: FrozenDict[str, Tensor],
        memory: Any,
        *,
        overwrite_unread: Callable[..., Any] | None = None,
    ) -> None:
        self.params, self.trained = params, trained
        self.overwrite_unread = overwrite_unread
        self._mappings = list(_tensor_mappings(memory))
        self._of_params = _Counted()
        self._of_params.add(trained, in_mappings=1 if trained is params else 2)
        self._of_memory = _Counted()
        for _, mapping in self._mappings:
            self._of_memory.add(mapping)
        self.leaves: FrozenDict[str, Tensor] | None = None
        self.bound_to: Any = None
        self.unread: object = None
        self.unhooked: int | None = None
        self.values: list[Tensor] = trained._tensors
        self.alike = {tensor.dtype if tensor.is_cpu else None for tensor in self.values} in _OF_ONE_DTYPE

    def has_others(self, memory: Any) -> bool:
        """Whether the memory holds tensors that aren't in its mappings."""
        leaves: list[Any] = optree.tree_leaves(memory, namespace=NAMESPACE)
        return sum(isinstance(leaf, Tensor) for leaf in leaves) > sum(len(mapping) for _, mapping in self._mappings)

    def is_foreign(self) -> bool:
        """Whether others than torch may know the memory, which then doesn't count them.

        It is an array's, a file's, shared by processes, or that of a tensor without a storage of its own.
        """
        return self._of_params.are_foreign() or self._of_memory.are_foreign()

    def lend(self, leaves: FrozenDict[str, Tensor]) -> None:
        """These leaves share the parameters' memory from now on; nobody else has seen them yet."""
        self.leaves = leaves
        self._of_params.share(len(self.trained))

    def bind(self, instance: Any) -> None:
        """The leaves stand in this module instance from now on."""
        assert self.leaves is not None
        self.bound_to = instance
        for name in self.trained:  # in the mapping of leaves, and in the module
            self._of_params.tensors.append(self.leaves[name])
            self._of_params.counts.append(_OURS + 1 + instance.places[name])

    def mappings_alone(self, state: State, params_holders: int, memory_holders: int, *, unread: bool = False) -> bool:
        """Whether nobody but the loop has a State's mappings of parameters and memory.

        Args:
            state: the State, which has the parameters that are held. No variable may have its mappings meanwhile.
            params_holders, memory_holders: how many States have its mappings.
            unread: nobody can have a mapping that is in its memory.
        """
        leaves = self.leaves
        whole, lent = self.trained is self.params, leaves is not None and leaves.origin is self.params
        # Here and asked about; here once more, if all are trained; and in the leaves.
        if getrefcount(state.params) != params_holders + 2 + whole + lent or not (
            whole or getrefcount(self.trained) == 2
        ):
            return False
        if getrefcount(memory_in(state)) != memory_holders + 1:
            return False
        for path, mapping in () if unread else self._mappings:
            if len(path) > 1 and not _way_alone(memory_in(state), path):
                return False
            # In the memory, in the list of a Held, as `mapping`, and asked about.
            if getrefcount(mapping) != 4:
                return False
        return True

    def tensors_alone(self, memory: Any, *, shared: bool = False, unread: bool = False) -> bool:
        """Whether the tensors are in this memory still, and nobody has one of them, a view of one or its storage.

        ``shared`` says that one tensor more has the memory of each parameter, which is the loop's as well; ``unread``
        that nobody can have a tensor of the optimizer's memory.
        """
        leaves = self.leaves
        if leaves is not None and (
            self.bound_to is None
            or self.bound_to.params is not leaves
            or getrefcount(leaves) != 4  # here, in the instance, `leaves`, and asked about
        ):
            return False
        for path, mapping in self._mappings:
            found = memory
            for key in path:
                found = found[key]
            if found is not mapping:
                return False
        return self._of_params.are_alone(len(self.trained) if shared else 0) and (unread or self._of_memory.are_alone())


class _Counted:
    """Tensors of the loop's own, and what refers to them and to their storages, if nobody else does."""

    __slots__ = ("_addresses", "_plain", "_pointers", "_storage_counts", "_storages", "_there", "counts", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.counts: list[int] = []
        self._plain = True
        self._storages: list[Any] = []
        self._pointers: list[int] = []
        self._addresses: list[int] = []
        self._there: list[int] = []
        self._storage_counts: list[int] = []

    def add(self, mapping: FrozenDict[str, Tensor], in_mappings: int = 1) -> None:
        if not hasattr(mapping, "_tensors"):  # which an update reads, and would make anew at each step
            mapping._tensors = list(mapping.values())
        tensors = mapping._tensors
        self.tensors += tensors
        self.counts += [_OURS + in_mappings + 1] * len(tensors)
        held = list(map(part_of, tensors))
        self._plain = self._plain and have_storages(held)
        if not self._plain:
            return
        # The storages themselves are held too, so that their addresses stay theirs.
        storages = [tensor.untyped_storage() for tensor in held]
        self._storages += storages
        self._pointers += [storage._cdata for storage in storages]
        # Handing one to another process moves it, and leaves no reference here. On a GPU it doesn't even move.
        self._addresses += map(address_of, storages)
        self._there += [storage._cdata for storage, tensor in zip(storages, held, strict=True) if not tensor.is_cpu]
        self._storage_counts += [_OF_STORAGE] * len(storages)
        # A part is a tensor of its own, which is in the whole.
        parts = [part for part, tensor in zip(held, tensors, strict=True) if part is not tensor]
        self.tensors += parts
        self.counts += [_OURS + 1] * len(parts)

    def share(self, count: int) -> None:
        """One tensor more has the memory of each of the first ones."""
        self._storage_counts[:count] = [uses + 1 for uses in self._storage_counts[:count]]

    def are_foreign(self) -> bool:
        return not self._plain or not all(map(torch.UntypedStorage.resizable, self._storages))

    def are_alone(self, shared: int = 0) -> bool:
        """Whether nobody else has one; one tensor more may have the memory of as many as are ``shared``."""
        storage_counts = self._storage_counts
        if shared:
            storage_counts = [uses + 1 for uses in storage_counts[:shared]] + storage_counts[shared:]
        return (
            list(map(getrefcount, self.tensors)) == self.counts
            and set(map(tensor_uses, self.tensors)) <= ONCE
            and set(map(getrefcount, self._storages)) <= LISTED
            and list(map(address_of, self._storages)) == self._addresses
            and list(map(storage_uses, self._pointers)) == storage_counts
            and not (self._there and were_sent(self._there))
        )


def have_storages(tensors: Sequence[Any]) -> bool:
    """Whether each of these has a storage whose address and use count say something.

    A wrapper subclass, a sparse tensor and a tensor inside torch.func's transforms have none.
    """
    return set(map(type, tensors)) <= _PLAIN and set(map(_layout, tensors)) <= _STRIDED and transforms() is None


_PLAIN, _STRIDED = {Tensor}, {torch.strided}
_layout = attrgetter("layout")


def were_sent(there: Iterable[int]) -> bool:
    """Whether one of these storages, by their pointers and not on the CPU, was handed to another process.

    Torch lists what was handed over, in both directions and of the CPU too, by the allocation that it is in: of several
    storages in one allocation the last is there. But it also sees to it that memory which another process may have
    doesn't go straight back to its allocator, and that tells of each.
    """
    if not shared_cache:
        return False
    if storage_goes_back is not None:
        return not all(map(storage_goes_back, there))
    return not {weak.cdata for weak in list(shared_cache.values())}.isdisjoint(there)


def _tensor_mappings(memory: Any, path: Path = ()) -> Iterator[tuple[Path, FrozenDict[str, Tensor]]]:
    """The mappings in a memory that hold nothing but tensors, which are what a step overwrites, and their paths."""
    if type(memory) is not FrozenDict:
        return
    for key, value in memory.items():
        if type(value) is not FrozenDict:
            continue
        if value and all(isinstance(each, Tensor) for each in value.values()):
            yield (*path, key), value
        else:
            yield from _tensor_mappings(value, (*path, key))


def _way_alone(memory: Any, path: Path) -> bool:
    """Whether nobody else has one of the mappings in this memory on the path to its end."""
    for key in path[:-1]:
        memory = memory[key]
        if getrefcount(memory) != 3:  # in the mapping around it, `memory`, and asked about
            return False
    return True


def held_once(tensors: Sequence[Any], *, mappings: int = 0) -> bool:
    """Whether nothing but this tuple or list has these tensors, and nothing but them their memory, each its own.

    A view, as autograd passes on, may have one tensor more, which nobody else has, behind it. ``mappings`` says in how
    many mappings they stand besides.

    >>> import torch
    >>> weight = torch.ones(2)
    >>> held_once((torch.ones(2), torch.ones(3))), held_once((weight,)), held_once((weight[:1],))
    (True, False, False)
    """
    if not CAN_COUNT or not all(map(is_plain, tensors)):
        return False
    storages = [tensor.untyped_storage() for tensor in tensors]
    bases = [tensor._base for tensor in tensors if tensor._is_view()]
    return (
        set(map(getrefcount, tensors)) == {2 + mappings}  # in the tuple, and asked about
        and set(map(tensor_uses, tensors)) == ONCE
        and set(map(getrefcount, storages)) == LISTED
        and set(map(getrefcount, bases)) <= LISTED  # as with storages
        and set(map(tensor_uses, bases)) <= {2}  # the view, and the list
        and [storage_uses(storage._cdata) for storage in storages]
        == [_OF_STORAGE + tensor._is_view() for tensor in tensors]
        and all(map(torch.UntypedStorage.resizable, storages))  # else it is another library's
        and all(map(_is_contiguous, tensors))
        and not were_sent(storage._cdata for storage in storages if storage.device.type != "cpu")
    )


def _is_contiguous(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def has_tensors(memory: FrozenDict[str, Any]) -> bool:
    """Whether there is a tensor in a mapping or in the mappings in it."""
    return any(
        isinstance(value, Tensor) or (type(value) is FrozenDict and has_tensors(value)) for value in memory.values()
    )


def _counts_are_right() -> bool:
    """Whether this interpreter and this torch count as they are expected to: one reference more has to show."""
    if not COUNTS_CAN_BE_TRUSTED or tensor_uses is None or storage_uses is None:
        return False
    params = FrozenDict({"": torch.zeros(2)})
    held = Held(params, params, FrozenDict())
    if not held.tensors_alone(FrozenDict()):
        return False
    for keep in (params.__getitem__, lambda _: params[""][:1], lambda _: params[""].untyped_storage()):
        kept: Any = keep("")
        if held.tensors_alone(FrozenDict()):
            return False
        del kept
    return held.tensors_alone(FrozenDict())


CAN_COUNT = _counts_are_right()
