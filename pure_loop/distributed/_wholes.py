"""A model's parameters, whole, from the parts that ranks hold, and gradients by them on their way into parts.

For what a graph computes, which can exchange nothing. Many tensors go through one exchange: a *bucket* is flat memory
in which they lie one after the other, each padded so that all ranks have equally many rows of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pure_loop._parts import part_of
from pure_loop.frozendict import FrozenDict

__all__ = ["Wholes"]

# Bytes of whole tensors that are exchanged at a time: as many as with torch's DistributedDataParallel.
_CAPACITY = 25 << 20


class Wholes:
    """The parameters of one model, whole, while they are needed, and the sums of gradients by them.

    Args:
        params: in parts, of which shapes, dtypes and the mesh are taken.
        trained: the names of those that are trained.
    """

    def __init__(self, params: Mapping[str, Any], trained: Sequence[str]) -> None:
        mesh = next(iter(params.values()))._spec.mesh
        self._group = mesh.get_group(mesh.ndim - 1)
        self._copies = mesh.get_group(0) if mesh.ndim > 1 else None
        ranks = mesh.size(mesh.ndim - 1)
        self._of_params = _buckets(params, ranks)
        self._of_gradients = _buckets({name: params[name] for name in trained}, ranks)
        self._parts: Any = None
        self._gathered: FrozenDict[str, Tensor] = FrozenDict()
        # Of the microbatches so far, by the number of their bucket.
        self._sums: dict[int, Tensor] = {}
        self._reached: set[str] = set()

    def of(self, params: FrozenDict[str, Any]) -> FrozenDict[str, Tensor]:
        """The whole of each of these parameters: gathered, unless they were the last ones. All ranks ask for it."""
        if self._parts is not params:
            self.drop()  # or there would be those of two models for a while
            found: dict[str, Tensor] = {}
            for bucket in self._of_params:
                found |= bucket.wholes([part_of(params[name]) for name in bucket.names], self._group)
            self._parts, self._gathered = params, FrozenDict((name, found[name]) for name in params)
        return self._gathered

    def drop(self) -> None:
        """Let go of the parameters."""
        self._parts, self._gathered = None, FrozenDict()

    def add(self, gradients: dict[str, Tensor | None]) -> None:
        """Add this rank's gradients of a microbatch, which are taken out of the mapping."""
        for number in range(len(self._of_gradients)):
            self._sums[number] = self._summed(number, gradients)

    def scatter(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """The same of the last microbatch, and this rank's parts of the sums over all ranks, by name.

        There are none of what no microbatch reached.
        """
        found: dict[str, Tensor] = {}
        for number, bucket in enumerate(self._of_gradients):
            found |= bucket.parts(self._summed(number, gradients), self._group, self._copies)
        reached, self._reached = self._reached, set()
        return {name: part for name, part in found.items() if name in reached}

    def _summed(self, number: int, gradients: dict[str, Tensor | None]) -> Tensor:
        """The sums of one bucket, with these gradients in them."""
        bucket = self._of_gradients[number]
        sums = self._sums.pop(number, None)
        if sums is None:
            sums = bucket.zeros()
        found = {name: gradients.pop(name) for name in bucket.names}
        self._reached |= {name for name, gradient in found.items() if gradient is not None}
        bucket.add(sums, list(found.values()))
        return sums


class _Bucket:
    """Some tensors of one dtype, by name, in flat memory.

    Args:
        tensors: in parts.
        ranks: how many hold parts.
    """

    def __init__(self, tensors: Mapping[str, Any], ranks: int) -> None:
        self.names = tuple(tensors)
        self._shapes = [tensor.shape for tensor in tensors.values()]
        # Rows that a rank has at most, and those that this one has.
        self._most = [-(-shape[0] // ranks) for shape in self._shapes]
        self._mine = [len(part_of(tensor)) for tensor in tensors.values()]
        self._widths = [most * shape[1:].numel() for most, shape in zip(self._most, self._shapes, strict=True)]
        self._ranks, self._width = ranks, sum(self._widths)
        part = part_of(next(iter(tensors.values())))
        self._options: dict[str, Any] = {"dtype": part.dtype, "device": part.device}

    def wholes(self, parts: Sequence[Tensor], group: Any) -> dict[str, Tensor]:
        """The whole tensors, from the parts of all ranks."""
        mine = torch.empty(self._width, **self._options)
        places = [place[: part.numel()] for place, part in zip(torch.split(mine, self._widths), parts, strict=True)]
        torch._foreach_copy_(places, [part.reshape(-1) for part in parts])
        table = torch.empty(self._ranks * self._width, **self._options)
        dist.all_gather_into_tensor(table, mine, group=group)
        columns = torch.split(table.view(self._ranks, self._width), self._widths, dim=1)
        return {
            name: column.contiguous().view(self._ranks * most, *shape[1:])[: shape[0]]
            for name, column, most, shape in zip(self.names, columns, self._most, self._shapes, strict=True)
        }

    def zeros(self) -> Tensor:
        """Memory for a tensor of each shape: a row for each rank, with the parts that it will have."""
        return torch.zeros(self._ranks, self._width, **self._options)

    def add(self, sums: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Add these tensors, of which None is nothing."""
        places, found = [], []
        columns = torch.split(sums, self._widths, dim=1)
        for column, most, shape, tensor in zip(columns, self._most, self._shapes, tensors, strict=True):
            if tensor is not None:
                rows = tensor.reshape(shape[0], shape[1:].numel())
                missing = self._ranks * most - shape[0]
                rows = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
                places.append(column)
                found.append(rows.reshape(column.shape))
        if places:
            torch._foreach_add_(places, found)

    def parts(self, sums: Tensor, group: Any, copies: Any) -> dict[str, Tensor]:
        """This rank's parts of the sums over all ranks; ``copies`` is the group of those that hold the same parts."""
        mine = torch.empty(self._width, **self._options)
        dist.reduce_scatter_tensor(mine, sums.view(-1), group=group)
        if copies is not None:
            dist.all_reduce(mine, group=copies)
        return {
            name: part[: rows * shape[1:].numel()].view(rows, *shape[1:])
            for name, part, rows, shape in zip(
                self.names, torch.split(mine, self._widths), self._mine, self._shapes, strict=True
            )
        }


def _buckets(tensors: Mapping[str, Any], ranks: int) -> list[_Bucket]:
    found: list[_Bucket] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        chosen: dict[str, Any] = {}
        size = 0
        for name, tensor in tensors.items():
            if tensor.dtype is not dtype:
                continue
            more = tensor.shape.numel() * tensor.dtype.itemsize
            if chosen and size + more > _CAPACITY:
                found.append(_Bucket(chosen, ranks))
                chosen, size = {}, 0
            chosen[name] = tensor
            size += more
        found.append(_Bucket(chosen, ranks))
    return found
