"""Digests of tensors: of frozen parameters that a file leaves out, and of all parameters and batches in a journal."""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.checkpoint.container import CODES, pieces_of

__all__ = ["FROZEN_BYTES", "digest_of", "digest_of_batch", "digest_of_frozen", "has_digest"]

# Bytes: of a row of numbers that are added up, and from which on tensors are.
_BLOCK, _LARGE = 1 << 13, 1 << 17


def digest_of(params: Mapping[str, Tensor]) -> str:
    """A checksum of the numbers of all parameters: 8 hexadecimal digits, the same for the same names and bits.

    Large tensors are added up where they are, as integers, whose sums are exact in any order: the host gets the sums.

    >>> import torch
    >>> digest_of({"w": torch.tensor([1.0, 2.0])}) == digest_of({"w": torch.tensor([1.0, 2.0])})
    True
    """
    return _checksum(params[name] for name in sorted(params))


def has_digest(params: Mapping[str, Tensor], digest: str) -> bool:
    """Whether parameters have this digest, which may be one by the model's order of names, as it once was."""
    return digest in (digest_of(params), _checksum(params.values()))


def _checksum(tensors: Iterable[Tensor]) -> str:
    parts = [part for tensor in tensors for part in _condensed(full_tensor(tensor.detach()))]
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    numbers = torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.uint8)
    checksum = 0
    for piece in pieces_of([numbers]):
        checksum = zlib.crc32(piece, checksum)
    return f"{checksum:08x}"


def _condensed(tensor: Tensor) -> list[Tensor]:
    """The bytes of a tensor; of a large one those of its sums by row and by column, as integers of 8 bytes."""
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    flat = numbers.contiguous().view(-1).view(torch.uint8)
    length = flat.numel() // _BLOCK * _BLOCK
    if length < _LARGE:
        return [flat]
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[:length].view(torch.int64).view(-1, _BLOCK // 8)
    return [words.sum(0).view(torch.uint8), words.sum(1).view(torch.uint8), flat[length:]]


def digest_of_batch(batch: Any) -> str:
    """A checksum of the tensors of a batch, in their order."""
    leaves = optree.tree_leaves(batch, namespace=NAMESPACE)
    return _checksum(leaf for leaf in leaves if isinstance(leaf, Tensor))


FROZEN_BYTES = 16

# Frozen tensors are never written to, and a large base takes seconds to read: once for all saves of a run.
_known: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}


def digest_of_frozen(tensor: Tensor, plain: Tensor) -> str:
    """The digest of a frozen parameter, from the tensor that a file would have of it."""
    number = id(tensor)
    known = _known.get(number)
    if known is not None and known[0]() is tensor and known[1] == tensor._version:
        return known[2]
    result = hashlib.blake2b(f"{CODES[plain.dtype]} {tuple(plain.shape)} ".encode(), digest_size=FROZEN_BYTES)
    for piece in pieces_of([plain.cpu()]):
        result.update(piece)
    digest = result.hexdigest()
    _known[number] = weakref.ref(tensor, lambda _: _known.pop(number, None)), tensor._version, digest
    return digest
