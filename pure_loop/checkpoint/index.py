"""The index of a sharded checkpoint: what lies in which file of its folder.

The folder holds a file of each rank, ``<save>-<rank>-of-<ranks>.safetensors``, with its parts, a file ``<save>-whole``
with what is in no parts, and :data:`INDEX`, which is written last: without it the folder is no checkpoint. The index is
a file of our container without tensors, so it ends with a digest of itself; its metadata have the document, as a file
of a whole State has it, and under :data:`INDEX_KEY`, in JSON, each file's size and digest, and each tensor's dtype,
shape and chunks. A save has a number of its own in the names of its files, so one that is saved in the place of another
leaves that whole until its own index replaces the old.

An index may be a stranger's: it can name files of this pattern in its own folder, and tensors that these files pay for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

import attrs
import torch

from pure_loop.checkpoint import container
from pure_loop.checkpoint.container import CODES, DTYPES, LARGEST, are_counts, is_shape
from pure_loop.checkpoint.document import Document, read_document
from pure_loop.checkpoint.paths import join
from pure_loop.checkpoint.storage import storage_of
from pure_loop.checkpoint.validation import Json, parse, shortened
from pure_loop.errors import CheckpointError

INDEX = "index.safetensors"
"""The name of the file that makes a folder a checkpoint."""

INDEX_KEY = "pure_loop.index"
PART_KEY = "pure_loop.part"

_FILES = re.compile(r"[0-9a-f]{16}-([0-9]{1,6}-of-[0-9]{1,6}|whole)\.safetensors")
# The shortest text by which the header of a file tells of one chunk.
_SHORTEST_ENTRY = len('"":{"dtype":"U8","shape":[],"data_offsets":[0,1]},')


@attrs.frozen
class Chunk:
    """A box of a tensor: where it begins, how large it is, and the number of the file that it is in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int

    def name(self, tensor: str) -> str:
        """What the chunk is called in its file: ``params.weight[0:4,0:2]``."""
        return chunk_name(tensor, self.offsets, self.sizes)


@attrs.frozen
class Stored:
    """A tensor: its dtype and shape, whether it was in parts, and its chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    part: bool
    chunks: tuple[Chunk, ...]


@attrs.frozen
class File:
    """A file of the folder, as it was written."""

    name: str
    size: int
    digest: str


@attrs.frozen
class Index:
    """What lies where.

    Attributes:
        files: of the folder.
        tensors: by the names under which the document knows them.
    """

    files: tuple[File, ...]
    tensors: dict[str, Stored]

    def as_text(self) -> str:
        """As JSON."""
        files = [[item.name, item.size, item.digest] for item in self.files]
        tensors = {
            name: [
                CODES[stored.dtype],
                stored.shape,
                stored.part,
                [[c.file, c.offsets, c.sizes] for c in stored.chunks],
            ]
            for name, stored in self.tensors.items()
        }
        return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":"))

    @classmethod
    def of_text(cls, text: str, path: object) -> Index:
        """
        Raises:
            CheckpointError: it is no index, or says what can't be.
        """
        try:
            value = parse(text)
            files = tuple(_file(path, *item) for item in value["files"])
            tensors = {name: _stored(path, name, *stored) for name, stored in value["tensors"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} can't be read: its index is none: {repr(error)[:300]}.") from error
        if len({item.name for item in files}) != len(files):
            _refuse(path, "its index names a file twice")
        _refuse_unpaid(files, tensors, path)
        return cls(files, tensors)

    @classmethod
    def read(cls, folder: str) -> tuple[Index, Document]:
        """The index of a folder and its document. Its files are looked at, and not read.

        Raises:
            CheckpointNotFoundError: there is none: it is no checkpoint.
            CheckpointError: it is damaged, or a file of it is missing, cut off or outside the folder.
        """
        where = storage_of(join(folder, INDEX))
        with where.open() as file:
            header = container.verify(file, where.path)
        text, document = header.metadata.get(INDEX_KEY), read_document(header.metadata, where.path)
        if text is None or document is None or not header.digested or header.entries:
            _refuse(where.path, "it is no index of a sharded checkpoint")
        index = cls.of_text(text, where.path)
        index._look(folder)
        return index, document

    def _look(self, folder: str) -> None:
        for file in self.files:
            where = storage_of(join(folder, file.name))
            if not where.exists():
                raise CheckpointError(
                    f"{where.path} is missing, a part of a sharded checkpoint: {folder} was copied without it, or it "
                    "was deleted. Resume from another one: pl.latest_path(folder) finds the newest one that is whole."
                )
            if storage_of(folder).leads_out(file.name):
                _refuse(where.path, "it is a link to outside of its folder")
            if where.is_folder() or where.size() != file.size:
                _refuse(where.path, f"it was written with {file.size:,} bytes, and is another by now: it was cut off")

    def verify(self, folder: str) -> None:
        """Read all files through, and hold them against their digests.

        Raises:
            CheckpointError: one is damaged.
        """
        for item in self.files:
            where = storage_of(join(folder, item.name))
            with where.open() as file:
                container.verify(file, where.path, item.digest)


def chunk_name(tensor: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    ranges = ",".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True))
    return f"{tensor}[{ranges}]"


def is_sharded_folder(path: str) -> bool:
    """Whether the folder is a sharded checkpoint, whole or not."""
    return storage_of(join(path, INDEX)).exists()


def is_index(metadata: Mapping[str, str]) -> bool:
    """Whether a file is a piece of a sharded checkpoint, by its metadata."""
    return INDEX_KEY in metadata or PART_KEY in metadata


def remove(path: str) -> None:
    """Remove a checkpoint, of one file or a folder; of a folder the index first, so that it is never half a one.

    Of a link the link alone is removed: what it leads to, such as a checkpoint that was moved to an archive, stays.
    """
    where = storage_of(path)
    if where.is_folder() and not where.is_link():
        storage_of(join(path, INDEX)).remove()
    where.remove()


def leftovers(names: Iterable[str], index: Index) -> list[str]:
    """The files of a folder that are of earlier saves, and that no index names any more."""
    current = {file.name for file in index.files}
    return [name for name in names if name not in current and _FILES.fullmatch(name)]


def _file(path: object, name: Json, size: Json, digest: Json) -> File:
    if not isinstance(name, str) or not _FILES.fullmatch(name):
        _refuse(
            path,
            f"its index names the file {shortened(name)}, and files of a sharded checkpoint lie in its folder, by "
            "the names that pl.save gives them",
        )
    if type(size) is not int or not 0 <= size <= LARGEST or not isinstance(digest, str):
        _refuse(path, f"its index describes {name} in another way than pl.save does")
    return File(name, size, digest)


def _stored(path: object, name: str, code: Json, shape: Json, part: Json, chunks: Json) -> Stored:
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None or not is_shape(shape) or type(part) is not bool:
        _refuse(
            path,
            f"its index says of tensor {name[:80]!r} that it has dtype {shortened(code)} and shape {shortened(shape)}",
        )
    boxes = tuple(_chunk(path, name, tuple(shape), *chunk) for chunk in chunks)
    _refuse_holes(name, tuple(shape), boxes, path)
    return Stored(dtype, tuple(shape), part, boxes)


def _chunk(path: object, name: str, shape: tuple[int, ...], file: Json, offsets: Json, sizes: Json) -> Chunk:
    fits = are_counts(offsets) and are_counts(sizes) and len(offsets) == len(sizes) == len(shape)
    if type(file) is not int or file < 0 or not fits:
        _refuse(path, f"its index describes a chunk of tensor {name[:80]!r} in another way than pl.save does")
    if any(start + size > length for start, size, length in zip(offsets, sizes, shape, strict=True)):
        _refuse(path, f"its index has a chunk of tensor {name[:80]!r} outside of its shape {shortened(shape)}")
    return Chunk(tuple(offsets), tuple(sizes), file)


def _refuse_holes(name: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...], path: object) -> None:
    """Refuse chunks that are not each number of the tensor once: the others would be whatever was in memory."""
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape) or _overlap(shape, chunks):
        _refuse(path, f"in its index the chunks of tensor {name[:80]!r} are not all of it, once")


def _overlap(shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> bool:
    """Whether chunks overlap, or are cut in another way than ranks cut: along each dimension all at the same places.

    Two different boxes of such a grid differ along some dimension, and there they are apart.
    """
    if not all(math.prod(chunk.sizes) for chunk in chunks):
        return True
    # Sorted and not hashed: hashes of tuples can be made equal.
    for dim in range(len(shape)):
        spans = sorted((chunk.offsets[dim], chunk.sizes[dim]) for chunk in chunks)
        if any(left != right and left[0] + left[1] > right[0] for left, right in pairwise(spans)):
            return True
    return any(left == right for left, right in pairwise(sorted(chunk.offsets for chunk in chunks)))


def _refuse_unpaid(files: tuple[File, ...], tensors: dict[str, Stored], path: object) -> None:
    """Refuse tensors and chunks for which there are not as many bytes, before memory is asked for."""
    claimed = [0] * len(files)
    for name, stored in tensors.items():
        for chunk in stored.chunks:
            if chunk.file >= len(files):
                _refuse(path, f"its index has tensor {name[:80]!r} in file {chunk.file}, and names {len(files)}")
            claimed[chunk.file] += math.prod(chunk.sizes) * stored.dtype.itemsize + _SHORTEST_ENTRY
    for file, size in zip(files, claimed, strict=True):
        if size > file.size:
            _refuse(path, f"its index has {size:,} bytes of tensors in {file.name}, which has {file.size:,}")


def _refuse(path: object, reason: str) -> NoReturn:
    raise CheckpointError(
        f"{path} can't be read: {reason}. Resume from another checkpoint: pl.latest_path(folder) finds the newest one "
        "that is whole."
    )
