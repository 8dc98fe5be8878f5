"""Which rank writes and reads which chunk of which tensor, by the planners of torch.distributed.checkpoint.

Its planners know every placement of a DTensor, and cut what was saved in one to what is needed in another. Its storage
is not used: its metadata are a pickle, and its loading takes what can't be read for what isn't there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from pure_loop._internal.tree_ops import from_local, local_tensor
from pure_loop.checkpoint import container
from pure_loop.checkpoint.index import File, Index, Stored
from pure_loop.checkpoint.storage import join, storage_of
from pure_loop.errors import CheckpointError

__all__ = ["Plan", "box_of", "fill", "split_like"]


class Plan:
    """What this rank writes of tensors that all ranks save; those that are not in parts are written once.

    Args:
        tensors: by name.
        first: whether this is rank 0.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, first: bool) -> None:
        self._planner = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )
        self._planner.set_up_planner(dict(tensors), is_coordinator=first)

    def local(self) -> SavePlan:
        """What this rank has; a rank for which nothing is left of a tensor has nothing of it."""
        plan = self._planner.create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if 0 not in _sizes(item)])

    def of_all(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """What each rank writes, of what all of them have."""
        return list(self._planner.create_global_plan(list(plans))[0])

    def chunks(self, plan: SavePlan) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
        """Name, offsets, sizes and numbers of each chunk to write."""
        result = []
        for item in self._planner.finish_plan(plan).items:
            tensor: Any = self._planner.resolve_data(item)
            data: Any = item.tensor_data
            result.append((item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), tensor.contiguous()))
        return result


def _sizes(item: Any) -> Sequence[int]:
    return item.tensor_data.chunk.sizes  # type: ignore[no-any-return]


def fill(templates: Mapping[str, Any], index: Index, folder: str) -> None:
    """Fill tensors, whole ones or parts, with what a folder has of them. Each file is read once, front to back.

    Raises:
        CheckpointError: a file is damaged; the tensors then hold anything.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(templates), _metadata({name: index.tensors[name] for name in templates}))
    wanted: list[dict[str, list[Any]]] = [{} for _ in index.files]
    at = {name: {chunk.offsets: chunk for chunk in index.tensors[name].chunks} for name in templates}
    for item in planner.finish_plan(planner.create_local_plan()).items:
        name, offsets = item.storage_index.fqn, item.storage_index.offset
        chunk = at[name][tuple(offsets or ())]
        wanted[chunk.file].setdefault(chunk.name(name), []).append((item, chunk, index.tensors[name].dtype))
    filled = 0
    for file, items in zip(index.files, wanted, strict=True):
        if items:
            filled += _fill_from(file, items, planner, folder)
    needed = sum(local_tensor(template).numel() for template in templates.values())
    if filled != needed:
        raise CheckpointError(f"{folder} can't be read: it has {filled:,} of {needed:,} numbers that are needed.")


def _fill_from(file: File, items: dict[str, list[Any]], planner: DefaultLoadPlanner, folder: str) -> int:
    where, filled = storage_of(join(folder, file.name)), 0
    with where.open() as opened, torch.no_grad():
        header = container.read_header(opened, file.size, where.path)
        there = {entry.name: entry for entry in header.entries}
        for name, (first, *_) in items.items():
            _, chunk, dtype = first
            if name not in there or there[name].dtype is not dtype or there[name].shape != chunk.sizes:
                raise CheckpointError(f"{where.path} can't be read: it lacks {name!r}, which the index has in it.")
        for name, tensor in container.read_some(opened, header, where.path, items, file.digest):
            for item, _, _ in items[name]:
                piece = tensor
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    piece = piece.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(piece)
                filled += piece.numel()
    return filled


def _metadata(tensors: Mapping[str, Stored]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=stored.dtype),
                torch.Size(stored.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in stored.chunks],
            )
            for name, stored in tensors.items()
        }
    )


def box_of(whole: Tensor, like: Any) -> Tensor:
    """What a rank holds of a whole tensor that is in parts as ``like`` is."""
    (box,) = like.__create_chunk_list__()
    for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole


def split_like(whole: Tensor, like: Any) -> Any:
    """A whole tensor in parts, as ``like`` is; every rank has to have it."""
    part = box_of(whole, like).to(local_tensor(like), copy=True, memory_format=torch.contiguous_format)
    return from_local(like, part)
