"""Reference counting: are parameters and optimizer state referenced only by the loop?

Python counts the references to a mapping or a tensor, torch those to what is behind a tensor (a graph or a DLPack
capsule adds one) and to a storage (a view or an array adds one). The loop's own references are known beforehand, so
one more is another holder's, whenever it was taken. What the counting itself adds is measured
(:mod:`pure_loop.donation.calibration`), and so is whether counts can be trusted at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import shared_cache

from pure_loop._internal.dtensor import local_tensor
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.scalars import is_plain
from pure_loop._internal.torch_private import storage_goes_back, storage_uses, tensor_uses, transforms
from pure_loop.donation.calibration import Calibration, Counter, calibrate, count_behind
from pure_loop.frozendict import FrozenDict
from pure_loop.state import State, raw_opt_state

__all__ = [
    "OwnedBuffers",
    "address_of",
    "can_count",
    "count_in",
    "has_tensors",
    "held_once",
    "holders_of",
    "measure",
    "storages_are_unshared",
    "were_sent",
]

Path: TypeAlias = tuple[str, ...]

address_of = torch.UntypedStorage.data_ptr
_OF_ONE_DTYPE = ({torch.float32}, {torch.float64})


class OwnedBuffers:
    """Parameters and an optimizer state that the loop has made, and whether they are aliased.

    Attributes:
        params: the parameters.
        trained: those that are trained, if not all are.
        leaves: the autograd leaves that share the parameters' memory, once there are some.
        bound_to: the module instance in which these stand, once they do.
        unread: what :func:`pure_loop.state.opt_state_read_marker` returned when the memory was last found unaliased;
            while that returns the same, and the optimizer stores nothing, it still is.
        overwrite_private: how the optimizer overwrites unaliased memory; None: it may itself have stored it.
        unhooked: what :func:`pure_loop.model.leaves.hook_counter` gave when no leaf had a hook.
        values: those that are trained, as a list.
        alike: whether these are on the CPU, and of one dtype, float32 or float64.
    """

    __slots__ = (
        *("bound_to", "_by", "_deep", "_mappings", "_of_memory", "_of_params", "_places"),
        *("alike", "leaves", "overwrite_private", "params", "trained", "unhooked", "unread", "values"),
    )

    def __init__(
        self,
        params: FrozenDict[str, Tensor],
        trained: FrozenDict[str, Tensor],
        memory: Any,
        *,
        overwrite_private: Callable[..., Any] | None = None,
        by: Calibration | None = None,
    ) -> None:
        self._by = by = MEASURED if by is None else by
        self.params, self.trained = params, trained
        self.overwrite_private = overwrite_private
        self._places = list(_tensor_mappings(memory))
        self._mappings = [mapping for _, mapping in self._places]
        self._deep = [path for path, _ in self._places if len(path) > 1]
        self._of_params = RefCounts(by)
        self._of_params.add(trained, in_mappings=1 if trained is params else 2)
        self._of_memory = RefCounts(by)
        for mapping in self._mappings:
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
        return sum(isinstance(leaf, Tensor) for leaf in leaves) > sum(map(len, self._mappings))

    def is_foreign(self) -> bool:
        """Whether others than torch may know the memory, which then doesn't count them.

        It is an array's, a file's, shared by processes, or that of a tensor without a storage of its own.
        """
        return self._of_params.are_foreign() or self._of_memory.are_foreign()

    def share_with_leaves(self, leaves: FrozenDict[str, Tensor]) -> None:
        """These leaves share the parameters' memory from now on; they are not aliased yet."""
        self.leaves = leaves
        self._of_params.share(len(self.trained))

    def bind(self, instance: Any) -> None:
        """The leaves stand in this module instance from now on."""
        assert self.leaves is not None
        self.bound_to = instance
        for name in self.trained:  # in the mapping of leaves, and in the module
            self._of_params.tensors.append(self.leaves[name])
            self._of_params.counts.append(self._by.listed + 1 + instance.places[name])

    def mappings_alone(self, state: State, params_holders: int, memory_holders: int, *, unread: bool = False) -> bool:
        """Whether only the loop refers to a State's mappings of parameters and optimizer state.

        Args:
            state: the State, which has the parameters that are held. No variable may have its mappings meanwhile.
            params_holders, memory_holders: how many States have its mappings.
            unread: no mapping in its optimizer state can be aliased.
        """
        by, leaves, memory = self._by, self.leaves, raw_opt_state(state)
        if by.count is None:
            return False
        whole, lent = self.trained is self.params, leaves is not None and leaves.origin is self.params
        # The parameters here, once more if all are trained, and as the leaves' origin; the memory as `memory`.
        mappings = [state.params, memory]
        counts = [by.listed + params_holders + 1 + whole + lent, by.listed + memory_holders + 1]
        if not whole:
            mappings.append(self.trained)
            counts.append(by.listed + 1)
        if list(map(by.count, mappings)) != counts:
            return False
        if unread:
            return True
        # In the memory, and twice here.
        return set(map(by.count, self._mappings)) <= {by.listed + 2} and all(
            _way_alone(memory, path, by) for path in self._deep
        )

    def tensors_alone(self, memory: Any, *, shared: bool = False, unread: bool = False) -> bool:
        """Whether the tensors are still in this memory, and neither they, a view of one nor its storage is aliased.

        ``shared`` says that one tensor more has the memory of each parameter, which is the loop's as well; ``unread``
        that no tensor of the optimizer state can be aliased.
        """
        leaves = self.leaves
        if leaves is not None:
            if self.bound_to is None or self.bound_to.params is not leaves:
                return False
            count = self._by.count
            if count is not None:
                (references,) = map(count, (leaves,))
                if references != self._by.listed + 3:  # here, in the instance, and `leaves`
                    return False
        for path, mapping in self._places:
            result = memory
            for key in path:
                result = result[key]
            if result is not mapping:
                return False
        return self._of_params.are_alone(len(self.trained) if shared else 0) and (unread or self._of_memory.are_alone())


class RefCounts:
    """Tensors of the loop's own, and how many references to them and to their storages the loop has itself."""

    __slots__ = (
        *("_addresses", "_count", "_listed", "_of_storage", "_once", "_plain", "_pointers", "_storage_counts"),
        *("_storage_once", "_storages", "_there", "counts", "tensors"),
    )

    def __init__(self, by: Calibration) -> None:
        self._count, self._listed, self._of_storage = by.count, by.listed, by.storage_uses
        self._once, self._storage_once = {by.tensor_uses}, {by.storages}
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
        self.counts += [self._listed + in_mappings + 1] * len(tensors)
        held = list(map(local_tensor, tensors))
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
        self._storage_counts += [self._of_storage] * len(storages)
        # A part is a tensor of its own, which is in the whole.
        parts = [part for part, tensor in zip(held, tensors, strict=True) if part is not tensor]
        self.tensors += parts
        self.counts += [self._listed + 1] * len(parts)

    def share(self, count: int) -> None:
        """One tensor more has the memory of each of the first ones."""
        self._storage_counts[:count] = [uses + 1 for uses in self._storage_counts[:count]]

    def are_foreign(self) -> bool:
        return not self._plain or not all(map(torch.UntypedStorage.resizable, self._storages))

    def are_alone(self, shared: int = 0) -> bool:
        """Whether no other reference to one exists; one tensor more may have the memory of as many as are ``shared``.

        Where Python's counts, or torch's, can't be trusted, those aren't asked.
        """
        storage_counts, count = self._storage_counts, self._count
        if shared:
            storage_counts = [uses + 1 for uses in storage_counts[:shared]] + storage_counts[shared:]
        return (
            (
                count is None
                or (
                    list(map(count, self.tensors)) == self.counts
                    and set(map(count, self._storages)) <= self._storage_once
                )
            )
            and (
                None in self._once
                or (
                    set(map(tensor_uses, self.tensors)) <= self._once
                    and list(map(storage_uses, self._pointers)) == storage_counts
                )
            )
            and list(map(address_of, self._storages)) == self._addresses
            and not (self._there and were_sent(self._there))
        )


def can_count() -> bool:
    """Whether references are counted on this interpreter; if not, ``MEASURED.doubt`` says why."""
    return MEASURED.is_trusted


def holders_of(weak: Callable[[], Any]) -> int:
    """How many references there are to the object behind a weak reference; a great many where they aren't counted.

    >>> class Named:
    ...     pass
    >>> from weakref import ref
    >>> one = Named()
    >>> two = [one]
    >>> holders_of(ref(one))
    2
    """
    if MEASURED.count is None:
        return sys.maxsize
    return count_behind(MEASURED.count, weak) - MEASURED.behind


def count_in(objects: Sequence[Any]) -> list[int]:
    """How many references there are to the objects, besides that of this list or tuple; counting must be trusted.

    >>> one = FrozenDict()
    >>> count_in([one, FrozenDict()])
    [1, 0]
    """
    assert MEASURED.count is not None
    listed = MEASURED.listed
    return [count - listed for count in map(MEASURED.count, objects)]


def storages_are_unshared(tensors: Sequence[Tensor], storages: Sequence[Any], pointers: Sequence[int]) -> bool:
    """Whether nothing but these tensors and these lists refers to their storages; counting must be trusted."""
    by = MEASURED
    assert by.count is not None
    return (
        set(map(tensor_uses, tensors)) == {by.tensor_uses}
        and set(map(by.count, storages)) == {by.storages}
        and set(map(storage_uses, pointers)) == {by.storage_uses}
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
        if value and all(isinstance(item, Tensor) for item in value.values()):
            yield (*path, key), value
        else:
            yield from _tensor_mappings(value, (*path, key))


def _way_alone(memory: Any, path: Path, by: Calibration) -> bool:
    """Whether no other reference exists to the mappings in this memory on the path to its end."""
    assert by.count is not None
    for key in path[:-1]:
        memory = memory[key]
        if [*map(by.count, [memory])] != [by.listed + 2]:  # in the mapping around it, and `memory`
            return False
    return True


def held_once(tensors: Sequence[Any], *, mappings: int = 0) -> bool:
    """Whether nothing but this tuple or list has these tensors, and nothing but them their memory, each its own.

    A view, as autograd passes on, may have one unaliased tensor more behind it. ``mappings`` says in how
    many mappings they stand besides.

    >>> import torch
    >>> weight = torch.ones(2)
    >>> held_once((torch.ones(2), torch.ones(3))), held_once((weight,)), held_once((weight[:1],))
    (True, False, False)
    """
    by = MEASURED
    if by.count is None or not all(map(is_plain, tensors)):
        return False
    storages = [tensor.untyped_storage() for tensor in tensors]
    bases = [tensor._base for tensor in tensors if tensor._is_view()]
    return (
        set(map(by.count, tensors)) == {by.listed + mappings}
        and set(map(tensor_uses, tensors)) == {by.tensor_uses}
        and set(map(by.count, storages)) == {by.storages}
        and set(map(by.count, bases)) <= {by.bases}
        and set(map(tensor_uses, bases)) <= {by.base_uses}
        and [storage_uses(storage._cdata) for storage in storages]
        == [by.storage_uses + tensor._is_view() for tensor in tensors]
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


def measure(count: Counter | None) -> Calibration:
    """Calibrate a counter, and try on a tensor what is made of it: one reference more, of any kind, has to show."""
    by = calibrate(count)
    if by.count is None:
        return by
    params = FrozenDict({"": torch.zeros(2, device="cpu")})
    memory: FrozenDict[str, Any] = FrozenDict()
    buffers = OwnedBuffers(params, params, memory, by=by)
    if not buffers.tensors_alone(memory):
        return by.without_counter("tensors seem to have references that none made")
    for kind, take in _KINDS.items():
        kept = take(params[""])
        if buffers.tensors_alone(memory):
            return by.without_counter(f"{kind} does not show in a count of references")
        kept = None  # noqa: F841
    if not buffers.tensors_alone(memory):
        return by.without_counter("the end of a reference does not show in a count of references")
    return by


# What refers to a tensor or to its memory.
_KINDS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor in a variable": lambda tensor: tensor,
    "a tensor in a list": lambda tensor: [tensor],
    "a view": lambda tensor: tensor[:1],
    "a tensor on the same memory": Tensor.detach,
    "a storage": Tensor.untyped_storage,
    "a DLPack capsule": Tensor.__dlpack__,
}

MEASURED = measure(getattr(sys, "getrefcount", None))
