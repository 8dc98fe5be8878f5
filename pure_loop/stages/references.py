"""What refers to tensors: variables, torch, views, other processes; whether a mapping alone has those in it.

No number of references is written down. Each was counted once, on this interpreter and with this torch, where nothing
was kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any
from weakref import getweakrefcount, ref

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import shared_cache

from pure_loop._internal.frames import count
from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.torch_private import storage_goes_back, storage_uses, tensor_uses, transforms
from pure_loop._internal.tree_ops import are_sharded, local_tensor
from pure_loop.frozendict import FrozenDict

# Numbers in gradients from which a look at references is cheaper than a copy.
LARGE = 2**18


class Tensors:
    """Tensors in a mapping, of which references are counted.

    Args:
        tensors: those that are counted; nothing else refers to the mapping meanwhile.

    Attributes:
        are_plain: whether counts say something of each: no wrapper, sparse one, or one of a transform.
    """

    __slots__ = ("_bases", "_pointers", "_storages", "_tensors", "_wrappers", "are_plain")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        listed, self._wrappers = list(tensors), list[Tensor]()
        if are_sharded(listed):  # a shard is in its DTensor as another tensor is in its mapping
            self._wrappers, listed = listed, list(map(local_tensor, listed))
        self._tensors = listed
        plain = set(map(type, listed)) <= {Tensor} and set(map(_layout, listed)) <= {torch.strided}
        self.are_plain = plain and transforms() is None
        self._storages = list(map(Tensor.untyped_storage, listed)) if self.are_plain else []
        self._pointers = [storage._cdata for storage in self._storages]
        self._bases = list(map(_base, listed)) if self.are_plain else []

    def uses(self) -> list[tuple[Any, ...]]:
        """What refers to each: variables, torch, weak references; to its storage: variables, tensors; whether another
        process has it; and, where it is a view, what refers to the tensor behind it: variables, torch.
        """
        tensors, storages = self._tensors, self._storages
        # Handing one to another process moves it to memory that processes share; on an accelerator it stays.
        sent = [
            storage.is_shared() if tensor.is_cpu else was_sent(pointer)
            for tensor, storage, pointer in zip(tensors, storages, self._pointers, strict=True)
        ]
        behind = [None if base is None else (count(base), tensor_uses(base)) for base in self._bases]
        of_tensors = map(count, tensors), map(tensor_uses, tensors), map(getweakrefcount, tensors)
        of_storages = map(count, storages), map(storage_uses, self._pointers), sent
        return list(zip(*of_tensors, *of_storages, behind, strict=True))

    def holders(self) -> list[int]:
        """How many objects refer to each, but for this one; empty where something else has the memory of one."""
        alone = expected_uses()["alone"]
        if not self.are_plain or self._wrappers:
            return []
        uses = self.uses()
        # What is expected has one in a mapping.
        return [use[0] - alone[0] + 1 for use in uses] if {use[1:] for use in uses} <= {alone[1:]} else []

    def have_uses(self, *expected: tuple[Any, ...]) -> bool:
        """Whether what refers to each is one of these."""
        if not self.are_plain or set(map(count, self._wrappers)) - {use[0] for use in expected}:
            return False
        return set(self.uses()) <= set(expected)


_layout, _base = attrgetter("layout"), attrgetter("_base")


@cache
def expected_uses() -> dict[str, tuple[Any, ...]]:
    """What refers to a tensor in a mapping to which nothing else does; if its memory is ``shared`` with one more; and
    if it is a ``view``, as autograd may give it.
    """
    mapping = FrozenDict(one=torch.zeros(2, 3, device="cpu"))
    tensors = Tensors(mapping.values())
    (alone,) = tensors.uses()
    leaf = mapping["one"].detach()
    (shared,) = tensors.uses()
    del leaf
    transposed = FrozenDict(one=torch.zeros(2, 3, device="cpu").t())
    (view,) = Tensors(transposed.values()).uses()
    return {"alone": alone, "shared": shared, "view": view}


def is_private(memory: PyTree) -> bool:
    """Whether nothing but this mapping, and the mappings in it, has the tensors in it."""
    # Mappings of numbers alone are written to by nothing, and several States may have them.
    inner = [value for value in memory.values() if not isinstance(value, Tensor) and has_tensors(value)]
    if any(type(value) is not FrozenDict for value in inner):
        return False
    if any(map(getweakrefcount, inner)) or count_in(inner) != [1] * len(inner):
        return False
    tensors = Tensors(value for value in memory.values() if isinstance(value, Tensor))
    return tensors.have_uses(expected_uses()["alone"]) and all(map(is_private, inner))


def has_tensors(tree: Any) -> bool:
    """Whether a leaf of a tree is a tensor."""
    return any(isinstance(leaf, Tensor) for leaf in optree.tree_leaves(tree, namespace=NAMESPACE))


def are_unaliased(gradients: Mapping[str, Tensor | None] | Sequence[Tensor | None]) -> bool:
    """Whether nothing but this mapping or tuple has these tensors, and each has memory of its own.

    >>> weight = torch.ones(2)
    >>> are_unaliased((torch.ones(2), torch.ones(3))), are_unaliased((weight,)), are_unaliased((weight[:1],))
    (True, False, False)
    """
    values: Any = gradients.values() if isinstance(gradients, Mapping) else gradients
    if counting_doubt() or not all(map(_is_own, values)):
        return False
    # Behind a view there is one tensor more, which may be that of others.
    expected, tensors = expected_uses(), Tensors(value for value in values if value is not None)
    return tensors.have_uses(expected["alone"], expected["view"])


def are_torchs(tensors: Iterable[Any]) -> bool:
    """Whether the memory of these tensors is torch's: no array's, and no file's."""
    own = Tensors(tensor for tensor in tensors if isinstance(tensor, Tensor))
    return own.are_plain and all(storage.resizable() for storage in own._storages)


def _is_own(tensor: Tensor | None) -> bool:
    """Whether each element has a place of its own, in memory that is torch's and may be written to."""
    orders = torch.contiguous_format, torch.channels_last
    if tensor is None:
        return True
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_inference():
        return False
    return any(tensor.is_contiguous(memory_format=order) for order in orders) and tensor.untyped_storage().resizable()


def was_sent(pointer: int) -> bool:
    """Whether a storage that is not on the CPU, by its pointer, was handed to another process, where it stays.

    Torch lists what was handed over by the allocation that it is in. But it also sees to it that memory which another
    process may have doesn't go straight back to its allocator, and that tells of each storage.
    """
    if not shared_cache:
        return False
    if storage_goes_back is not None:
        return not storage_goes_back(pointer)
    return any(weak.cdata == pointer for weak in list(shared_cache.values()))


@cache
def counting_doubt() -> str:
    """Why references are not counted here, so that steps copy; empty where they are: one reference more, of any kind,
    shows.
    """
    if count is id:
        return "this interpreter does not count references"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "threads run without a global lock here, and take references while they are counted"
    if tensor_uses is None or storage_uses is None:
        return "this torch does not say how many references it has itself"
    try:
        memory = FrozenDict(inner=FrozenDict(one=torch.zeros(2, device="cpu")))
        if not is_private(memory):
            return "tensors seem to have references that none made"
        for kind, take in _KINDS.items():
            kept = take(memory["inner"])
            if is_private(memory):
                return f"{kind} does not show in a count of references"
            kept = None  # noqa: F841
        if not is_private(memory):
            return "the end of a reference does not show in a count of references"
    except Exception as error:  # whatever a counter does elsewhere; pl.explain says it
        return f"counting references raised {type(error).__name__}: {error}"
    return ""


# What refers to a mapping, to a tensor or to its memory.
_KINDS: dict[str, Callable[[FrozenDict[str, Any]], Any]] = {
    "a mapping in a variable": lambda mapping: mapping,
    "a tensor in a variable": lambda mapping: mapping["one"],
    "a tensor in a list": lambda mapping: [mapping["one"]],
    "a view": lambda mapping: mapping["one"][:1],
    "a tensor on the same memory": lambda mapping: mapping["one"].detach(),
    "a storage": lambda mapping: mapping["one"].untyped_storage(),
    "a DLPack capsule": lambda mapping: mapping["one"].__dlpack__(),
    "a weak reference": lambda mapping: ref(mapping["one"]),
}


def can_count() -> bool:
    """Whether references are counted on this interpreter; if not, :func:`counting_doubt` says why."""
    return not counting_doubt()


def count_in(objects: Sequence[Any]) -> list[int]:
    """How many references there are to the objects, besides that of this list or tuple.

    >>> one = FrozenDict()
    >>> count_in([one, FrozenDict()])
    [1, 0]
    """
    (once,) = map(count, [FrozenDict()])
    return [references - once for references in map(count, objects)]
