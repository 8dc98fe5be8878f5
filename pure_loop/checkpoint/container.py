"""A file of named tensors in the safetensors format, with a digest of itself, written and read in one pass.

The format (https://huggingface.co/docs/safetensors) is a length of 8 bytes, a JSON header, and the tensors' bytes one
after the other, so any tool that knows it opens these files. The last tensor is ours: the BLAKE2b-256 of everything
before it. It is written here, and not by the library of that name, because that takes neither a stream nor a digest,
needs NumPy, and a reader of strangers' files has to be small enough to be read: at worst a file is refused. Nothing is
allocated that the size of the file doesn't pay for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn, TypeGuard

import attrs
import torch
from torch import Tensor

from pure_loop.checkpoint.validation import MOST_MEMORY, memory_of, parse, shortened
from pure_loop.errors import CheckpointError

DIGEST = "pure_loop.blake2b-256"
"""The name of the tensor that holds the digest: uint8, shape (32,)."""

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls each dtype. Others go in as bytes: see :func:`raw`."""

DTYPES = {code: dtype for dtype, code in CODES.items()}
"""The dtype by each name of the format."""

LARGEST = (1 << 63) - 1
"""The largest size, and number of elements, of a tensor."""

_LONGEST_HEADER = 32 << 20
_MOST_DIMENSIONS = 64
_CHUNK = 8 << 20
_PIECE = 512 << 10
_DIGEST_BYTES = 32


@attrs.frozen
class Entry:
    """One tensor of a file: where its bytes begin and end in the part after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@attrs.frozen
class Header:
    """What a file says of itself.

    Attributes:
        metadata: texts by name.
        entries: the tensors in the order of their bytes, the digest left out.
        digested: whether the file ends with a digest.
        text: the bytes up to the first tensor.
        size: of the file.
    """

    metadata: dict[str, str]
    entries: tuple[Entry, ...]
    digested: bool
    text: bytes
    size: int


def write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, digested: bool = True) -> str:
    """Write tensors and texts, and give the digest in hexadecimal.

    Args:
        file: where to; written once from front to back.
        tensors: contiguous, of a dtype in :data:`CODES`; those on a device are copied from it one at a time.
        metadata: texts by name.
        digested: whether the digest is written as well; a tensor more, which a file of weights for other libraries
            must not have.

    Raises:
        CheckpointError: the names and texts alone are longer than a header may be.
    """
    # From the widest dtype to the narrowest, so that every tensor begins at a multiple of its numbers' size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        stop = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    if digested:
        header[DIGEST] = {"dtype": "U8", "shape": [_DIGEST_BYTES], "data_offsets": [offset, offset + _DIGEST_BYTES]}
    written = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
    text = written.encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER or memory_of(written) > MOST_MEMORY:
        raise CheckpointError(
            f"the names and values besides the tensors take {len(text) / 2**20:.1f} MiB as text, and would take "
            f"{memory_of(written) >> 20} MiB of memory when they are read; at most {_LONGEST_HEADER >> 20} and "
            f"{MOST_MEMORY >> 20} MiB can be saved: keep long lists of numbers in tensors."
        )
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _put(file, digest, memoryview(len(text).to_bytes(8, "little") + text))
    for piece in pieces_of(tensor.detach().cpu() for _, tensor in ordered):
        _put(file, digest, piece)
    result = digest.digest()
    if digested:
        _put(file, digest, memoryview(result))
    return result.hex()


def _put(file: BinaryIO, digest: hashlib.blake2b, data: memoryview) -> None:
    digest.update(data)
    while len(data):
        data = data[file.write(data) :]


def pieces_of(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of contiguous tensors on the CPU, some at a time; each piece is valid until the next one."""
    # Through a buffer, because tensors don't show their memory, and NumPy may not be there. It is so small that what
    # was copied and hashed is still in the core's own cache when it is written: training needs the rest.
    data = memoryview(bytearray(_PIECE))
    buffer = torch.frombuffer(data, dtype=torch.uint8)
    for tensor in tensors:
        for piece in torch.split(_flat(tensor.detach()), _PIECE):
            size = len(piece)
            buffer[:size].copy_(piece)
            yield data[:size]


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, one after the other."""
    # Not view(-1): torch calls tensors of at most one number contiguous whatever their strides, which that leaves.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor of any dtype: uint8, its shape with the size of a number at its end.

    >>> raw(torch.zeros(3, dtype=torch.complex128)).shape
    torch.Size([3, 16])
    """
    return tensor.unsqueeze(-1).view(torch.uint8) if tensor.element_size() > 1 else tensor.view(torch.uint8)


def read_header(file: BinaryIO, path: object) -> Header:
    """Read what a file says of itself; ``file`` is left at the first tensor.

    Args:
        file: open, anywhere.
        path: for errors.

    Raises:
        CheckpointError: it is no such file, or not a whole one.
    """
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian, and this machine is not: it can't read or write them.")
    size = file.seek(0, os.SEEK_END)  # not that of the path, which may have become another file's since
    file.seek(0)
    first = file.read(8)
    if len(first) < 8:
        _refuse(path, f"it has {len(first)} bytes: it was cut off, or is no checkpoint")
    length = int.from_bytes(first, "little")
    if length > min(_LONGEST_HEADER, size - 8):
        _refuse_pickle(file, path, first)
        _refuse(
            path, f"it tells of a header of {length:,} bytes, and has {size:,}: it was cut off, or is no checkpoint"
        )
    text = _exactly(file, length, path)
    if text[:1] != b"{":
        _refuse_pickle(file, path, first)
        _refuse(path, "its header is not JSON")
    try:
        parsed = parse(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{path}: its header can't be read: {reason}. {_ADVICE}") from error
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "its metadata are not texts")
    entries = sorted((_entry(name, value, path) for name, value in parsed.items()), key=lambda e: (e.start, e.stop))
    position = 0
    for entry in entries:
        if entry.start != position:
            _refuse(path, f"the bytes of tensor {shortened(entry.name, 60)} don't begin where those before it end")
        position = entry.stop
    if 8 + length + position != size:
        _refuse(
            path, f"it has {size:,} bytes, and its header tells of {8 + length + position:,}: it was cut off or damaged"
        )
    digested = bool(entries) and entries[-1].name == DIGEST and entries[-1].stop - entries[-1].start == _DIGEST_BYTES
    if not digested and any(entry.name == DIGEST for entry in entries):
        _refuse(path, "its digest is not at its end")
    return Header(metadata, tuple(entries[:-1] if digested else entries), digested, first + text, size)


def read(file: BinaryIO, path: object) -> tuple[Header, dict[str, Tensor]]:
    """Read a file whole, and hold it against its digest, if it has one.

    Raises:
        CheckpointError: it is no such file, not a whole one, or damaged.
    """
    header = read_header(file, path)
    return header, dict(read_some(file, header, path, {entry.name for entry in header.entries}))


def read_some(
    file: BinaryIO, header: Header, path: object, names: Container[str], digest: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Some of a file's tensors, one after the other; after the last one the file was held against its digest.

    Args:
        file: at its first tensor, where :func:`read_header` left it.
        header: what the file says of itself.
        path: for errors.
        names: of the tensors.
        digest: which one the file has to have, in hexadecimal; None: that which it brings, if it brings one.

    Raises:
        CheckpointError: it is not whole, or damaged; what was given of it until then may be wrong.
    """
    result = hashlib.blake2b(header.text, digest_size=_DIGEST_BYTES)
    data = memoryview(bytearray(min(_PIECE, header.size)))
    buffer = torch.frombuffer(data, dtype=torch.uint8)
    for entry in header.entries:
        if entry.name not in names:
            for piece in _pieces(entry.stop - entry.start):
                result.update(_exactly(file, piece, path))
            continue
        try:
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
        except RuntimeError as error:  # a file with holes may be larger than any memory
            _refuse(
                path,
                f"there is no memory for tensor {shortened(entry.name, 60)} of {entry.stop - entry.start:,} bytes",
                error,
            )
        for target in torch.split(_flat(tensor), _PIECE):
            part = data[: len(target)]
            _fill(file, part, path)
            result.update(part)
            target.copy_(buffer[: len(target)])
        # Any other number in a bool is undefined behaviour wherever it is used.
        if entry.dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            _refuse(path, f"tensor {shortened(entry.name, 60)} of dtype bool holds other numbers than 0 and 1")
        yield entry.name, tensor
        del tensor, target
    _hold_against(file, header, result, path)
    if digest is not None and (not header.digested or result.hexdigest() != digest):
        _refuse(path, "it is whole, and another file than the one that belongs here")


def verify(file: BinaryIO, path: object, digest: str | None = None) -> Header:
    """Read a file through and hold it against its digest, keeping nothing of its tensors.

    Raises:
        CheckpointError: it is no such file, not a whole one, or damaged.
    """
    header = read_header(file, path)
    for _ in read_some(file, header, path, (), digest):
        pass
    return header


def _hold_against(file: BinaryIO, header: Header, digest: hashlib.blake2b, path: object) -> None:
    if header.digested and _exactly(file, _DIGEST_BYTES, path) != digest.digest():
        _refuse(path, "its contents don't have the digest that was written with them: it is damaged")


def _pieces(size: int) -> Iterator[int]:
    while size:
        piece = min(size, _CHUNK)
        yield piece
        size -= piece


def _entry(name: str, value: object, path: object) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"its header describes tensor {shortened(name, 60)} in another way than the format does")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        _refuse(
            path,
            f"tensor {shortened(name, 60)} has dtype {shortened(code, 60)}, which this version of pure_loop doesn't "
            "know",
        )
    if not (is_shape(shape) and are_counts(offsets)) or len(offsets) != 2:
        _refuse(
            path, f"tensor {shortened(name, 60)} has shape {shortened(shape, 60)} and offsets {shortened(offsets, 60)}"
        )
    start, stop = offsets
    if stop - start != math.prod(shape) * dtype.itemsize:
        _refuse(
            path,
            f"tensor {shortened(name, 60)} of shape {shortened(shape, 60)} and dtype {code} has {stop - start} bytes",
        )
    return Entry(name, dtype, tuple(shape), start, stop)


def are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether JSON is a list of whole numbers that torch can count with."""
    # Not isinstance: a bool is an int.
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= LARGEST for value in values)


def is_shape(values: object) -> TypeGuard[list[int]]:
    """Whether JSON is the shape of a tensor that torch can have."""
    return are_counts(values) and len(values) <= _MOST_DIMENSIONS and math.prod(size or 1 for size in values) <= LARGEST


def _exactly(file: BinaryIO, size: int, path: object) -> bytes:
    result = bytearray()
    # Piece by piece: what the file doesn't have is not allocated.
    while len(result) < size:
        piece = file.read(min(size - len(result), _CHUNK))
        if not piece:
            _refuse(path, "it ends before its last tensor: it was cut off")
        result += piece
    return bytes(result)


def _fill(file: Any, view: memoryview, path: object) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            _refuse(path, "it ends before its last tensor: it was cut off")
        view = view[count:]


def _refuse_pickle(file: BinaryIO, path: object, first: bytes) -> None:
    """Refuse a file that begins as a pickle, or as a zip file, in which torch.save puts one."""
    zipped = first[:4] == b"PK\x03\x04"
    if not zipped and first[:2] not in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return
    kind = "it is a zip file with a pickle in it, of torch.save," if zipped else "it is a pickle,"
    _refuse(path, f"{kind} which could run any code: it isn't opened")


_ADVICE = (
    "Resume from another checkpoint: pl.latest_path(folder) finds the newest one that is whole. What torch.save or "
    "Composer wrote is read by pl.from_composer(path, model)."
)


def _refuse(path: object, reason: str, cause: Exception | None = None) -> NoReturn:
    raise CheckpointError(f"{path} can't be read: {reason}. {_ADVICE}") from cause
