"""Checkpoints of States in parts: a folder to which every rank writes its own, and the index that completes it.

Which rank writes and reads which chunk of which tensor is planned by torch.distributed.checkpoint. Its planners know
every placement of a DTensor, and cut what was saved in one to what is needed in another. Its storage is not used: its
metadata are a pickle, and its loading takes what can't be read for what isn't there.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from pure_loop._internal.tree_ops import empty_sharded, have_same_sharding, is_sharded, local_tensor
from pure_loop.checkpoint import container
from pure_loop.checkpoint.checkpoint import Checkpoint
from pure_loop.checkpoint.coordination import Coordinator
from pure_loop.checkpoint.document import METADATA_KEY, write_document
from pure_loop.checkpoint.index import INDEX, INDEX_KEY, PART_KEY, Chunk, File, Index, Stored, chunk_name, leftovers
from pure_loop.checkpoint.paths import join
from pure_loop.checkpoint.selection import ALL, Selection
from pure_loop.checkpoint.storage import storage_of
from pure_loop.errors import ArgumentError, CheckpointError, CheckpointWriteError
from pure_loop.model.model import ModelDef
from pure_loop.state import State


@attrs.frozen
class _Proposal:
    """What a rank has to save: what must be the same on all of them, digested by name, and its plan."""

    same: dict[str, str]
    plan: SavePlan


@attrs.frozen
class _Written:
    """A file that a rank has written, and name, offsets and sizes of each chunk in it."""

    file: File
    chunks: list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def write(coordinator: Coordinator, state: State, path: str, notes: Mapping[str, object] | None = None) -> None:
    """Save a State in parts to a folder; all ranks call it. When it returns, on any of them, all of it is there.

    Raises:
        ArgumentTypeError: the State holds a value that a checkpoint can't hold; names its place.
        ArgumentError: what is not in parts differs between ranks; names it.
        CheckpointWriteError: (an OSError) this rank can't write.
        DistributedError: another rank couldn't; names it and the path.
    """
    text = ""
    tensors: dict[str, Tensor] = {}
    planned: Plan | None = None

    def propose() -> _Proposal:
        nonlocal text, tensors, planned
        text, tensors = write_document(state, notes, parts=True)
        planned = Plan(tensors, first=coordinator.rank == 0)
        return _Proposal(_digests(text, tensors), planned.local())

    def assign(proposals: Sequence[_Proposal]) -> list[tuple[str, SavePlan]]:
        _refuse_different([proposal.same for proposal in proposals])
        assert planned is not None
        # Before any rank writes: what the link leads to, such as a checkpoint that was moved to an archive, stays.
        if storage_of(path).is_link():
            storage_of(path).remove()
        save = secrets.token_hex(8)
        return [(save, item) for item in planned.of_all([proposal.plan for proposal in proposals])]

    def store() -> list[_Written]:
        assert planned is not None
        own, shared = f"{save}-{coordinator.rank}-of-{coordinator.ranks}.safetensors", f"{save}-whole.safetensors"
        # Apart, or each rank would have to read the shards of others for values that are not sharded.
        chunks: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]] = {own: []}
        for chunk in planned.chunks(plan):
            chunks.setdefault(own if is_sharded(tensors[chunk[0]]) else shared, []).append(chunk)
        return [_write_file(path, name, some) for name, some in chunks.items()]

    def complete(by_rank: Sequence[list[_Written]]) -> list[None]:
        for rank, theirs in enumerate(by_rank):
            _refuse_unseen(rank, [item.file for item in theirs], path)
        index = _index(tensors, [item for theirs in by_rank for item in theirs])
        storage_of(path).flush()
        with storage_of(join(path, INDEX)).writing() as file:
            container.write(file, {}, {METADATA_KEY: text, INDEX_KEY: index.as_text(), "format": "pt"})
        for name in leftovers(storage_of(path).names(), index):
            storage_of(join(path, name)).remove()
        storage_of(path).sweep()
        return [None] * len(by_rank)

    save, plan = coordinator.round(path, propose, assign)
    coordinator.round(path, store, complete)


def _write_file(
    path: str, name: str, chunks: Sequence[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]
) -> _Written:
    where = storage_of(join(path, name))
    numbers = {chunk_name(fqn, offsets, sizes): tensor for fqn, offsets, sizes, tensor in chunks}
    with where.writing() as file:
        digest = container.write(file, numbers, {PART_KEY: name, "format": "pt"})
    return _Written(File(name, where.size(), digest), [chunk[:3] for chunk in chunks])


def _index(tensors: Mapping[str, Tensor], written: Sequence[_Written]) -> Index:
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for number, part in enumerate(written):
        for name, offsets, sizes in part.chunks:
            chunks[name].append(Chunk(offsets, sizes, number))
    return Index(
        tuple(item.file for item in written),
        {
            name: Stored(tensor.dtype, tuple(tensor.shape), is_sharded(tensor), tuple(chunks[name]))
            for name, tensor in tensors.items()
        },
    )


def _digests(text: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What is not in parts, and has to be the same on all ranks, for it is written once."""

    def of(pieces: Iterable[bytes | memoryview]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            digest.update(piece)
        return digest.hexdigest()

    result = {name: of([json.dumps(value).encode()]) for name, value in json.loads(text)["fields"].items()}
    for name, tensor in tensors.items():
        kind = f"{tensor.dtype} {tuple(tensor.shape)}"
        numbers = "in parts" if is_sharded(tensor) else of(container.pieces_of([tensor.cpu()]))
        result[name] = f"{result.get(name)} {kind} {numbers}"
    return result


def _refuse_different(by_rank: Sequence[dict[str, str]]) -> None:
    for rank, theirs in enumerate(by_rank):
        for name in {**by_rank[0], **theirs}:
            if by_rank[0].get(name) != theirs.get(name):
                raise ArgumentError(
                    f"state.{name} differs between rank {rank} and rank 0, and training could not resume from it: only "
                    "the shards of DTensors may differ between ranks. Keep values of one rank outside of the State, or "
                    "make them equal (torch.distributed.all_reduce) first."
                )


def _refuse_unseen(rank: int, files: Sequence[File], path: str) -> None:
    """Refuse to complete a folder that ranks don't share."""
    for file in files:
        where = storage_of(join(path, file.name))
        if not where.exists() or where.size() != file.size:
            raise CheckpointWriteError(
                errno.ENOENT,
                f"checkpoint {path} was not written: rank {rank} wrote {file.name}, and rank 0 doesn't see it there. "
                "Give a folder that all ranks share",
                path,
            )


@attrs.frozen(eq=False)
class ShardedCheckpoint(Checkpoint):
    """A sharded checkpoint: its index is read, and its tensors when it is known which of them are needed, and where."""

    index: Index = attrs.field(kw_only=True)

    @classmethod
    def read(cls, path: str) -> ShardedCheckpoint:
        """
        Raises:
            CheckpointNotFoundError, CheckpointError: there is no index, or none that is whole, or a file is missing.
        """
        index, document = Index.read(path)
        return cls(path, document, {}, index=index)

    def into(self, state: State, *, selection: Selection = ALL) -> State:
        """The saved State, with the model and on the device of this one, and in parts if this one is."""
        self._empty(state.model, state, selection)
        assert self.document is not None
        tensors = {name: _template(stored, _like(name, stored, state)) for name, stored in self.index.tensors.items()}
        fill(tensors, self.index, self.path)
        return self.document.state(state.model, tensors, state.device, self.path, start=state, selection=selection)

    def weights_into(
        self, state: State, *, strict: bool = True, selection: Selection = ALL, call: str | None = None
    ) -> State:
        """The State with the weights that were saved."""
        names = [name for name in self.index.tensors if name.startswith(("params.", "buffers."))]
        tensors = {name: _template(self.index.tensors[name], None) for name in names}
        fill(tensors, self.index, self.path)
        unsharded = Checkpoint(self.path, self.document, tensors)
        return unsharded.weights_into(state, strict=strict, selection=selection, call=call)

    def fitted(self, model: ModelDef) -> State:
        """The saved State, with this model, and without numbers.

        Raises:
            ResumeError: it was saved with another model; names the leaf.
            CheckpointError: its document and its index name other tensors.
        """
        return self._empty(model)

    def _empty(self, model: ModelDef, start: State | None = None, selection: Selection = ALL) -> State:
        assert self.document is not None
        self.document.refuse_contradiction(self.index.tensors, self.path, complete=True)
        tensors = {
            name: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            for name, stored in self.index.tensors.items()
        }
        home = torch.device("meta")
        return self.document.state(model, tensors, home, self.path, start=start, selection=selection)


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
        return dataclasses.replace(plan, items=[item for item in plan.items if 0 not in _chunk_of(item).sizes])

    def of_all(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """What each rank writes, of what all of them have."""
        return list(self._planner.create_global_plan(list(plans))[0])

    def chunks(self, plan: SavePlan) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
        """Name, offsets, sizes and numbers of each chunk to write."""
        result = []
        for item in self._planner.finish_plan(plan).items:
            tensor, chunk = self._planner.resolve_data(item), _chunk_of(item)
            assert isinstance(tensor, Tensor)
            result.append((item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), tensor.contiguous()))
        return result


def _chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def fill(templates: Mapping[str, Tensor], index: Index, folder: str) -> None:
    """Fill tensors, whole ones or parts, with what a folder has of them. Each file is read once, front to back.

    Raises:
        CheckpointError: a file is damaged; the tensors then hold anything.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(templates), _metadata({name: index.tensors[name] for name in templates}))
    wanted: list[dict[str, list[tuple[ReadItem, Chunk, torch.dtype]]]] = [{} for _ in index.files]
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


def _fill_from(
    file: File, items: dict[str, list[tuple[ReadItem, Chunk, torch.dtype]]], planner: DefaultLoadPlanner, folder: str
) -> int:
    where, filled = storage_of(join(folder, file.name)), 0
    with where.open() as opened, torch.no_grad():
        header = container.read_header(opened, where.path)
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


def _like(name: str, stored: Stored, state: State) -> Tensor | None:
    """The parameter as which a tensor of a checkpoint is in parts: its own, or any, where all are in like parts."""
    for place in range(name.count(".") + 1):
        parameter = state.params.get(name.split(".", place)[-1])
        if parameter is not None and stored.shape[: parameter.ndim] == parameter.shape:
            return parameter
    sharded = [tensor for tensor in state.params.values() if is_sharded(tensor)]
    alike = all(have_same_sharding(tensor, sharded[0]) for tensor in sharded[1:])
    return sharded[0] if sharded and alike else None


def _template(stored: Stored, like: Tensor | None) -> Tensor:
    """A tensor to be filled: a part, on the device of ``like``, of what was in parts, or a whole one."""
    if not is_sharded(like) or not stored.part:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return empty_sharded(stored.shape, stored.dtype, like)
