"""Checkpoints of States in parts: a folder to which every rank writes its own, and the index that completes it."""

from __future__ import annotations

import errno
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import empty as empty_in_parts

from pure_loop._parts import is_part, part_of, with_part
from pure_loop.checkpoint import container
from pure_loop.checkpoint.document import METADATA_KEY, write_document
from pure_loop.checkpoint.files import Checkpoint
from pure_loop.checkpoint.index import INDEX, INDEX_KEY, PART_KEY, Chunk, File, Index, Stored, chunk_name, leftovers
from pure_loop.checkpoint.meeting import Meeting
from pure_loop.checkpoint.places import join, place
from pure_loop.checkpoint.resharding import Plan, box_of, fill
from pure_loop.errors import ArgumentError, CheckpointWriteError
from pure_loop.model import ModelDef
from pure_loop.state import State

__all__ = ["ShardedCheckpoint", "split_like", "write"]


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


def write(meeting: Meeting, state: State, path: str, notes: Mapping[str, Any] | None = None) -> None:
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
        planned = Plan(tensors, first=meeting.rank == 0)
        return _Proposal(_digests(text, tensors), planned.local())

    def assign(proposals: Sequence[_Proposal]) -> list[tuple[str, SavePlan]]:
        _refuse_different([each.same for each in proposals])
        assert planned is not None
        save = secrets.token_hex(8)
        return [(save, each) for each in planned.of_all([each.plan for each in proposals])]

    def store() -> list[_Written]:
        assert planned is not None
        mine, everybodys = f"{save}-{meeting.rank}-of-{meeting.ranks}.safetensors", f"{save}-whole.safetensors"
        # Apart, or each rank would have to read the parts of others for what is nobody's part.
        chunks: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]] = {mine: []}
        for chunk in planned.chunks(plan):
            chunks.setdefault(mine if is_part(tensors[chunk[0]]) else everybodys, []).append(chunk)
        return [_write_file(path, name, some) for name, some in chunks.items()]

    def complete(everybody: Sequence[list[_Written]]) -> list[None]:
        for rank, theirs in enumerate(everybody):
            _refuse_unseen(rank, [each.file for each in theirs], path)
        index = _index(tensors, [each for theirs in everybody for each in theirs])
        place(path).flush()
        with place(join(path, INDEX)).writing() as file:
            container.write(file, {}, {METADATA_KEY: text, INDEX_KEY: index.as_text(), "format": "pt"})
        for name in leftovers(place(path).names(), index):
            place(join(path, name)).remove()
        place(path).sweep()
        return [None] * len(everybody)

    save, plan = meeting.round(path, propose, assign)
    meeting.round(path, store, complete)


def _write_file(
    path: str, name: str, chunks: Sequence[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]
) -> _Written:
    where = place(join(path, name))
    numbers = {chunk_name(fqn, offsets, sizes): tensor for fqn, offsets, sizes, tensor in chunks}
    with where.writing() as file:
        digest = container.write(file, numbers, {PART_KEY: name, "format": "pt"})
    return _Written(File(name, where.size(), digest), [chunk[:3] for chunk in chunks])


def _index(tensors: Mapping[str, Tensor], written: Sequence[_Written]) -> Index:
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for number, each in enumerate(written):
        for name, offsets, sizes in each.chunks:
            chunks[name].append(Chunk(offsets, sizes, number))
    return Index(
        tuple(each.file for each in written),
        {
            name: Stored(tensor.dtype, tuple(tensor.shape), is_part(tensor), tuple(chunks[name]))
            for name, tensor in tensors.items()
        },
    )


def _digests(text: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What is not in parts, and has to be the same on all ranks, for it is written once."""

    def of(data: Any) -> str:
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    found = {name: of(json.dumps(value).encode()) for name, value in json.loads(text)["fields"].items()}
    for name, tensor in tensors.items():
        kind = f"{tensor.dtype} {tuple(tensor.shape)}"
        numbers = "in parts" if is_part(tensor) else of(container.bytes_of(tensor.cpu()))
        found[name] = f"{found.get(name)} {kind} {numbers}"
    return found


def _refuse_different(everybody: Sequence[dict[str, str]]) -> None:
    for rank, theirs in enumerate(everybody):
        for name in {**everybody[0], **theirs}:
            if everybody[0].get(name) != theirs.get(name):
                raise ArgumentError(
                    f"state.{name} is another on rank {rank} than on rank 0, and a State may differ between ranks only "
                    "in parts of one tensor (DTensors), or training could not go on from it: keep what belongs to one "
                    "rank outside of the State, or agree on it (torch.distributed.all_reduce) before it goes in."
                )


def _refuse_unseen(rank: int, files: Sequence[File], path: str) -> None:
    """Refuse to complete a folder that ranks don't share."""
    for file in files:
        where = place(join(path, file.name))
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
    def read(cls, path: Any) -> ShardedCheckpoint:
        """
        Raises:
            CheckpointNotFoundError, CheckpointError: there is no index, or none that is whole, or a file is missing.
        """
        index, document = Index.read(path)
        return cls(path, document, {}, index=index)

    def into(self, state: State) -> State:
        """The saved State, with the model and on the device of this one, and in parts if this one is."""
        self.fitted(state.model)
        assert self.document is not None
        like = next((tensor for tensor in state.params.values() if is_part(tensor)), None)
        tensors = {name: _template(stored, like) for name, stored in self.index.tensors.items()}
        fill(tensors, self.index, self.path)
        return self.document.state(state.model, tensors, state.device, self.path)

    def weights_into(self, state: State, *, strict: bool = True) -> State:
        """The State with the weights that were saved."""
        names = [name for name in self.index.tensors if name.startswith(("params.", "buffers."))]
        tensors = {name: _template(self.index.tensors[name], None) for name in names}
        fill(tensors, self.index, self.path)
        return Checkpoint(self.path, self.document, tensors).weights_into(state, strict=strict)

    def fitted(self, model: ModelDef) -> State:
        """The saved State, with this model, and without numbers.

        Raises:
            ResumeError: it was saved with another model; names the leaf.
            CheckpointError: its document and its index name other tensors.
        """
        assert self.document is not None
        self.document.refuse_contradiction(self.index.tensors, self.path, complete=True)
        tensors = {
            name: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            for name, stored in self.index.tensors.items()
        }
        return self.document.state(model, tensors, torch.device("meta"), self.path)


def _template(stored: Stored, like: Any) -> Any:
    """A tensor to be filled: a part, on the device of ``like``, of what was in parts, or a whole one."""
    if like is None or not stored.part:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return empty_in_parts(*stored.shape, dtype=stored.dtype, device_mesh=like.device_mesh, placements=like.placements)


def split_like(whole: Tensor, like: Any) -> Any:
    """A whole tensor in parts, as ``like`` is; every rank has to have it."""
    part = box_of(whole, like).to(part_of(like), copy=True, memory_format=torch.contiguous_format)
    return with_part(like, part)
