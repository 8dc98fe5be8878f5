"""The parameters of a State while a forward and its backward go through them: tensors of their own, made when needed.

:class:`LazyLeaves`: the forward runs on tensors of an engine's own, with memory that will be another State's in the
next step. So that what a State shows never changes, it shows others, through which a penalty on weights has its
gradient. In most runs no code looks, and to make them for all parameters costs as much as a small layer for each.

:class:`UnshardedParameters`: whole tensors from the parts that ranks hold, and gradients by them on their way into
parts, for what a graph computes, which can exchange nothing. Many tensors go through one exchange: a *bucket* is flat
memory in which they lie one after the other, each padded so that all ranks have equally many rows of it.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from operator import is_
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pure_loop._internal import pytree as _pytree
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.tree_ops import local_tensor
from pure_loop.frozendict import FrozenDict

# Under their names since torch 2.13, and before.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Bytes of whole tensors that are exchanged at a time: as many as with torch's DistributedDataParallel.
_CAPACITY = 25 << 20


class LazyLeaves(FrozenDict[str, Tensor]):
    """Parameters by name.

    Args:
        origin: the parameters of the State.
        make: from a name to the tensor that is shown, until :meth:`close`.
        after: the same from then on, for those that were not accessed.
        frozen: the names of those that need no gradient.
        index: the microbatch's number in its batch.
        last: whether no other one follows in it.

    Attributes:
        buffers: those that the forward went through, for a backward that goes through it again.
        seen: those that were accessed, by name.
    """

    __slots__ = ("_after", "_make", "buffers", "index", "last", "seen")

    def __init__(
        self,
        origin: FrozenDict[str, Tensor],
        make: Callable[[str], Tensor],
        after: Callable[[str], Tensor],
        *,
        frozen: frozenset[str],
        index: int,
        last: bool,
    ) -> None:
        super().__init__(origin)
        self.index, self.last = index, last
        self.origin, self.frozen, self.holder = origin, frozen, None
        self.buffers: Mapping[str, Tensor] = {}
        self._make, self._after = make, after
        self.seen: dict[str, Tensor] = {}

    def close(self) -> None:
        """The backward is over."""
        self._make = self._after

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.seen:
            if name not in self.origin:
                raise KeyError(name)
            self.seen[name] = self._make(name)
        return self.seen[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - that would be this function itself

    # dict(leaves) looks up each key only if iteration is a method of the class.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def values(self) -> Any:
        return ValuesView(self)

    def items(self) -> Any:
        return ItemsView(self)


def origin_of(params: FrozenDict[str, Tensor]) -> FrozenDict[str, Tensor]:
    """The parameters of the State that these are, or are leaves of."""
    origin: Any = getattr(params, "origin", params)
    return cast("FrozenDict[str, Tensor]", origin)


def _flatten(leaves: LazyLeaves) -> tuple[Sequence[object], object, Sequence[str]]:
    names = tuple(leaves)
    return [leaves[name] for name in names], names, names


def _unflatten(names: tuple[str, ...], children: Iterable[PyTree]) -> Mapping[str, PyTree]:
    return FrozenDict(zip(names, children, strict=True))


_pytree.register(LazyLeaves, _flatten, _unflatten, attributes=False)


class UnshardedParameters:
    """The parameters of one model, whole, while they are needed, and the sums of gradients by them.

    Args:
        params: in parts, of which shapes, dtypes and the mesh are taken.
        trained: the names of those that are trained.
    """

    def __init__(self, params: Mapping[str, Any], trained: Sequence[str]) -> None:
        mesh = next(iter(params.values())).device_mesh
        self._group = mesh.get_group(mesh.ndim - 1)
        self._copies = mesh.get_group(0) if mesh.ndim > 1 else None
        ranks = mesh.size(mesh.ndim - 1)
        self._of_params = _buckets(params, ranks)
        self._of_gradients = _buckets({name: params[name] for name in trained}, ranks)
        self._parts: FrozenDict[str, Tensor] | None = None
        self._gathered: FrozenDict[str, Tensor] = FrozenDict()
        # Of the microbatches so far, by the number of their bucket.
        self._sums: dict[int, Tensor] = {}
        self._reached: set[str] = set()

    def of(self, params: FrozenDict[str, Tensor]) -> FrozenDict[str, Tensor]:
        """The whole of each of these parameters: gathered, unless they were the last ones. All ranks ask for it."""
        last = self._parts
        # On one rank only another mapping of the same ones may have been made.
        if last is None or not all(map(is_, params.values(), map(last.get, params))):
            self.drop()  # or there would be those of two models for a while
            result: dict[str, Tensor] = {}
            for bucket in self._of_params:
                result |= bucket.wholes([local_tensor(params[name]) for name in bucket.names], self._group)
            self._parts, self._gathered = params, FrozenDict((name, result[name]) for name in params)
        return self._gathered

    def drop(self) -> None:
        """Let go of the parameters."""
        self._parts, self._gathered = None, FrozenDict()

    def add(self, gradients: dict[str, Tensor | None]) -> None:
        """Add this rank's gradients of a microbatch, which are taken out of the mapping."""
        for number in range(len(self._of_gradients)):
            self._sums[number] = self._summed(number, gradients)

    def scatter(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Add those of the last microbatch; returns this rank's parts of the sums over all ranks, by name.

        There are none of what no microbatch of any rank reached.
        """
        result: dict[str, Tensor] = {}
        for number, bucket in enumerate(self._of_gradients):
            parts, ranks = bucket.parts(self._summed(number, gradients), self._group, self._copies)
            if not self._reached.issuperset(parts):  # else a device needn't be waited for
                parts = {name: parts[name] for name, count in zip(bucket.names, ranks.tolist(), strict=True) if count}
            result |= parts
        self._reached = set()
        return result

    def _summed(self, number: int, gradients: dict[str, Tensor | None]) -> Tensor:
        """The sums of one bucket, with these gradients in them."""
        bucket = self._of_gradients[number]
        sums = self._sums.pop(number, None)
        if sums is None:
            sums = bucket.zeros()
        result = {name: gradients.pop(name) for name in bucket.names}
        self._reached |= {name for name, gradient in result.items() if gradient is not None}
        bucket.add(sums, list(result.values()))
        return sums


class _Bucket:
    """Some tensors of one dtype, by name, in flat memory.

    Args:
        tensors: in parts.
        ranks: how many hold parts.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: int) -> None:
        self.names = tuple(tensors)
        self._shapes = [tensor.shape for tensor in tensors.values()]
        # Rows that a rank has at most, and those that this one has.
        self._most = [-(-shape[0] // ranks) for shape in self._shapes]
        self._mine = [len(local_tensor(tensor)) for tensor in tensors.values()]
        self._widths = [most * shape[1:].numel() for most, shape in zip(self._most, self._shapes, strict=True)]
        self._ranks, self._width = ranks, sum(self._widths)
        part = local_tensor(next(iter(tensors.values())))
        self._options: dict[str, Any] = {"dtype": part.dtype, "device": part.device}

    def wholes(self, parts: Sequence[Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
        """The whole tensors, from the parts of all ranks."""
        mine = torch.empty(self._width, **self._options)
        places = [place[: part.numel()] for place, part in zip(torch.split(mine, self._widths), parts, strict=True)]
        torch._foreach_copy_(places, [part.reshape(-1) for part in parts])
        table = torch.empty(self._ranks * self._width, **self._options)
        _all_gather(table, mine, group=group)
        columns = torch.split(table.view(self._ranks, self._width), self._widths, dim=1)
        return {
            name: column.contiguous().view(self._ranks * most, *shape[1:])[: shape[0]]
            for name, column, most, shape in zip(self.names, columns, self._most, self._shapes, strict=True)
        }

    def zeros(self) -> Tensor:
        """Memory for a tensor of each shape: a row for each rank, with its parts, and how often each was added to."""
        return torch.zeros(self._ranks, self._width + len(self.names), **self._options)

    def add(self, sums: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Add these tensors, of which None is nothing."""
        columns, times = self._columns(sums)
        present = [tensor is not None for tensor in tensors]
        places, result = [], []
        for column, most, shape, tensor in zip(columns, self._most, self._shapes, tensors, strict=True):
            if tensor is not None:
                rows = tensor.reshape(shape[0], shape[1:].numel())
                missing = self._ranks * most - shape[0]
                rows = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
                places.append(column)
                result.append(rows.reshape(column.shape))
        if places:
            torch._foreach_add_(places, result)
            times += 1 if all(present) else torch.tensor(present).to(times)

    def parts(
        self, sums: Tensor, group: dist.ProcessGroup, copies: dist.ProcessGroup | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """This rank's parts of the sums over all ranks, and how often all of them added each.

        ``copies`` is the group of ranks that hold the same parts.
        """
        mine = torch.empty(sums.shape[1], **self._options)
        _reduce_scatter(mine, sums.view(-1), group=group)
        if copies is not None:
            dist.all_reduce(mine, group=copies)
        columns, times = self._columns(mine.unsqueeze(0))
        parts = {
            name: column[0, : rows * shape[1:].numel()].view(rows, *shape[1:])
            for name, column, rows, shape in zip(self.names, columns, self._mine, self._shapes, strict=True)
        }
        return parts, times[0]

    def _columns(self, sums: Tensor) -> tuple[list[Tensor], Tensor]:
        """Of sums: those of each tensor, and how often it was added."""
        *columns, times = torch.split(sums, [*self._widths, len(self.names)], dim=1)
        return columns, times


def _buckets(tensors: Mapping[str, Tensor], ranks: int) -> list[_Bucket]:
    result: list[_Bucket] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        chosen: dict[str, Tensor] = {}
        size = 0
        for name, tensor in tensors.items():
            if tensor.dtype is not dtype:
                continue
            more = tensor.shape.numel() * tensor.dtype.itemsize
            if chosen and size + more > _CAPACITY:
                result.append(_Bucket(chosen, ranks))
                chosen, size = {}, 0
            chosen[name] = tensor
            size += more
        result.append(_Bucket(chosen, ranks))
    return result
