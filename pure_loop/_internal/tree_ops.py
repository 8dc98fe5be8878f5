"""Operations on tensors that may be sharded (torch's DTensors), of which the caller need not ask whether they are.

A rank holds a shard of such a tensor. An elementwise function of it is one of the shard (:func:`map_local`); a sum or a
norm is one over all ranks (:func:`sum_over_shards`, :func:`norms`), which all of them have to call. torch.distributed
is not imported here: a run without such tensors doesn't pay for it. Copies of many tensors (:func:`clone_all`) are one
operation: its call costs as much as the copy of a small tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.torch_private import dtensor_like, foreach_clone, store_of, transforms
from pure_loop._internal.torch_private import local_tensor as local_tensor
from pure_loop.errors import ArgumentError, DistributedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

alone_on_rank: ContextVar[str] = ContextVar("alone_on_rank", default="")
"""The name of the callback that runs on one of several ranks alone, while it runs; "": there is none."""


def _refuse_alone() -> None:
    """
    Raises:
        DistributedError: a callback on one rank alone begins a collective, for which it would wait for ever.
    """
    name = alone_on_rank.get()
    if name:
        raise DistributedError(
            f"callback {name} runs on the first rank alone, and reads shards that all ranks read together, for which "
            "it would wait for ever: write all_ranks = True in it, and record on self.rank == 0."
        )


# Seconds that a rank waits for the others, which the last stream of several ranks says; and how often ranks met, by the
# name of their process group and the rank.
longest_wait = [300.0]
_meetings: dict[tuple[str, int], int] = {}


def meet(tensors: Mapping[str, Tensor], what: str) -> None:
    """Wait until all ranks are here to gather these shards together; nothing, where there are none.

    A collective that one rank begins alone is answered by another one of theirs, or ends the process.

    Raises:
        DistributedError: not all ranks come in time, or this one runs a callback that the others don't.
    """
    sharded = next(filter(is_sharded, tensors.values()), None)
    if sharded is None:
        return
    _refuse_alone()
    group, store, rank, size = store_of(sharded.device_mesh)
    if store is None:
        return
    number = _meetings.get((group, rank), 0)
    keys = [f"pure_loop/meeting/{group}/{number}/{place}" for place in range(size)]
    store.set(keys[rank], what)
    try:
        store.wait(keys, timedelta(seconds=longest_wait[0]))
    except RuntimeError as error:
        absent = [place for place in range(size) if place != rank and not store.check([keys[place]])]
        store.delete_key(keys[rank])
        raise DistributedError(
            f"{what}: the State is sharded, so all ranks call it together, and of {size} ranks rank {rank} waited "
            f"{longest_wait[0]:g} s for {', '.join(map(str, absent))}: call it outside of `if rank == 0:`, and use "
            "what it gives on one rank."
        ) from error
    _meetings[group, rank] = number + 1


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor, of which this rank holds a shard.

    >>> import torch
    >>> is_sharded(torch.ones(2))
    False
    """
    return hasattr(tensor, "to_local")


def are_sharded(tensors: Mapping[str, object] | Iterable[object]) -> bool:
    """Whether one of these is sharded: such as of ``state.params``.

    >>> import torch
    >>> are_sharded({"weight": torch.ones(2)})
    False
    """
    return any(map(is_sharded, tensors.values() if isinstance(tensors, Mapping) else tensors))


def have_same_sharding(tensor: object, before: object) -> bool:
    """Whether two tensors of one shape have the same placements and mesh; True where one of them is not sharded."""
    if not (is_sharded(before) and is_sharded(tensor)):
        return True
    return tensor.placements == before.placements and tensor.device_mesh == before.device_mesh


def placements_of(tensor: object) -> object:
    """How the ranks hold a tensor; None of one that is not sharded."""
    return getattr(tensor, "placements", None)


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor; a collective, which all ranks have to call."""
    if not is_sharded(tensor):
        return tensor
    _refuse_alone()
    return tensor.full_tensor()


def from_local(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor sharded like this one, with ``part`` as the local shard."""
    return dtensor_like(tensor, part) if is_sharded(tensor) else part


def shard_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor in parts as ``tensor`` is, so that an algorithm can compute with both.

    Every rank is given the same whole tensor, and keeps its part: ranks don't talk. Where ``tensor`` isn't in parts (on
    one rank, on replicated ones), it is ``whole`` itself.

    Args:
        whole: such as noise that each rank draws from the same seed; of any dtype.
        tensor: one of the State's parameters or gradients, of the same shape and on the same device.

    Raises:
        ArgumentError: the shapes differ.

    >>> import torch
    >>> shard_like(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if whole.shape != tensor.shape:
        raise ArgumentError(
            f"shard_like(whole, tensor): whole has shape {tuple(whole.shape)}, and tensor has shape "
            f"{tuple(tensor.shape)}, that of all its shards together; the two must be equal"
        )
    if not is_sharded(tensor) or is_sharded(whole):
        return whole
    # A view of it would keep the whole of it, and kernels add up in another order where elements lie otherwise.
    shard = box_of(whole.detach(), tensor).clone(memory_format=torch.contiguous_format)
    sharded: Tensor = from_local(tensor, shard)
    return sharded


def box_of(whole: Tensor, tensor: Any) -> Tensor:
    """The view of a whole tensor that this rank would hold of it, were it sharded as ``tensor`` is."""
    (box,) = tensor.__create_chunk_list__()
    for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole


def reshaped_shard(tensor: Any, shard: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another shape and dtype that is sharded as ``tensor`` is, with this local shard."""
    stride = torch.empty(shape, device="meta").stride()
    sharded: Tensor = type(tensor).from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return sharded


def empty_sharded(shape: Sequence[int], dtype: torch.dtype, tensor: Any) -> Tensor:
    """A tensor to be filled, sharded as ``tensor`` is and on its device."""
    from torch.distributed.tensor import empty  # already imported where tensors are sharded

    return empty(*shape, dtype=dtype, device_mesh=tensor.device_mesh, placements=tensor.placements)


def on_mesh(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """A tensor in the same parts, over another mesh of the same shape."""
    return dtensor_like(tensor, local_tensor(tensor), mesh)


def map_local(function: Callable[..., Iterable[Tensor]], *lists: Sequence[Tensor]) -> list[Tensor]:
    """An elementwise function of lists of tensors, applied to what this rank holds of them.

    >>> import torch
    >>> map_local(torch._foreach_neg, [torch.tensor(1.0)])
    [tensor(-1.)]
    """
    if not are_sharded(lists[0]):
        return list(function(*lists))
    parts = function(*[list(map(local_tensor, tensors)) for tensors in lists])
    return [from_local(tensor, part) for tensor, part in zip(lists[0], parts, strict=True)]


def is_sharded_along(tensor: object, first: int) -> bool:
    """Whether a tensor is sharded along this dimension, or a later one."""
    return is_sharded(tensor) and any(
        not placement.is_replicate() and getattr(placement, "dim", 0) >= first for placement in tensor.placements
    )


def sum_over_shards(values: Tensor, tensor: object, *, largest: bool = False, along: int = 0) -> Tensor:
    """Values computed from the shard of ``tensor``, summed (or their largest) over the ranks that hold the others.

    Of a tensor that is not sharded they are ``values``. ``along``: over shards along this dimension and later ones.
    """
    if not is_sharded(tensor):
        return values
    _refuse_alone()
    dist: Any = sys.modules["torch.distributed"]
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    values = values.clone()
    for dimension, placement in enumerate(tensor.placements):
        # Also of torch's _StridedShard, for which is_shard() is False.
        if not placement.is_replicate() and getattr(placement, "dim", 0) >= along:
            dist.all_reduce(values, op=op, group=tensor.device_mesh.get_group(dimension))
    return values


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """The norm of each tensor as a vector, over all its shards, in one exchange; shape (), in the tensor's dtype.

    >>> import torch
    >>> norms([torch.tensor([3.0, 4.0])])
    [tensor(5.)]
    """
    if not are_sharded(tensors):
        return list(torch._foreach_norm(list(tensors), order)) if tensors else []
    # The norm of nothing is 0, and the largest of nothing an error.
    shards = map(local_tensor, tensors)
    parts = torch.stack(
        [torch.linalg.vector_norm(shard, order) if shard.numel() else shard.new_zeros(()) for shard in shards]
    )
    largest = order == torch.inf
    totals = parts if largest else parts**order
    for places in of_one_sharding(tensors):
        totals[places] = sum_over_shards(totals[places], tensors[places[0]], largest=largest)
    return list((totals if largest else totals ** (1.0 / order)).unbind())


def of_one_sharding(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of those tensors of which ranks hold shards over one set of ranks: each is one exchange.

    >>> import torch
    >>> of_one_sharding([torch.ones(1), torch.ones(2)])
    [[0, 1]]
    """
    groups: dict[object, list[int]] = {}
    for place, tensor in enumerate(tensors):
        over = tuple([not item.is_replicate() for item in tensor.placements]) if is_sharded(tensor) else None
        groups.setdefault(over, []).append(place)
    return list(groups.values())


def clone_all(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in the layout of the originals.

    >>> import torch
    >>> clone_all([torch.ones(2), torch.tensor(3)])
    [tensor([1., 1.]), tensor(3)]
    """
    if tensors and foreach_clone is not None and not in_transform():
        return list(foreach_clone(tensors))
    return [tensor.clone() for tensor in tensors]


def unaliased(tree: PyTree, other: PyTree) -> PyTree:
    """A tree without the tensors of another one: copies in their places; the tree itself where it has none of them.

    >>> import torch
    >>> one, two = torch.ones(1), torch.ones(1)
    >>> copies = unaliased([one, two], {"weight": one})
    >>> copies[0] is one, copies[1] is two
    (False, True)
    """
    foreign = {id(leaf) for leaf in optree.tree_leaves(other, namespace=NAMESPACE) if isinstance(leaf, Tensor)}
    if foreign.isdisjoint(map(id, optree.tree_leaves(tree, namespace=NAMESPACE))):
        return tree
    return optree.tree_map(lambda leaf: leaf.clone() if id(leaf) in foreign else leaf, tree, namespace=NAMESPACE)


def in_transform() -> bool:
    """Whether this runs inside a transform of ``torch.func``, where tensors have no memory of their own."""
    return transforms() is not None


def bytes_of(tree: PyTree) -> int:
    """The bytes of the numbers of all tensors in a tree.

    >>> import torch
    >>> bytes_of({"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int64)]})
    28
    """
    leaves: list[Any] = optree.tree_leaves(tree, namespace=NAMESPACE)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
