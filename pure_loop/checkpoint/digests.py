"""Digests of tensors: of all parameters and batches in a journal, and of frozen parameters that a file leaves out.

A run that trains few parameters of a large model (adapters, a head) saves those alone. What is frozen is the same in
all of its checkpoints, and in the weights that it started with, so a file has a digest of each frozen tensor, and
loading compares them with the model that is passed.
"""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Iterable, Mapping

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, Batch
from pure_loop._internal.tree_ops import are_sharded, full_tensor
from pure_loop.checkpoint.container import CODES, DTYPES, is_shape, pieces_of
from pure_loop.checkpoint.tree import Writer
from pure_loop.checkpoint.validation import Json, shortened
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import State

# Bytes: of a row of numbers that are added up, and from which on tensors are.
_BLOCK, _LARGE = 1 << 13, 1 << 17


def digest_of(params: Mapping[str, Tensor]) -> str:
    """A checksum of the numbers of all parameters: 8 hexadecimal digits, the same for the same names and bits.

    Large tensors are added up where they are, as integers: their sums, exact in any order, go to the host.

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
    # Not view(-1), which leaves the strides of at most one number, and these may be any.
    flat = numbers.contiguous().as_strided((numbers.numel(),), (1,)).view(torch.uint8)
    length = flat.numel() // _BLOCK * _BLOCK
    if length < _LARGE:
        return [flat]
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[:length].view(torch.int64).view(-1, _BLOCK // 8)
    return [words.sum(0).view(torch.uint8), words.sum(1).view(torch.uint8), flat[length:]]


def digest_of_batch(batch: Batch) -> str:
    """A checksum of the tensors of a batch, in their order."""
    leaves = optree.tree_leaves(batch, namespace=NAMESPACE)
    return _checksum(leaf for leaf in leaves if isinstance(leaf, Tensor))


_FROZEN_BYTES = 16

# Frozen tensors are never written to, and a large base takes seconds to read: once for all saves of a run.
_known: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}


def _digest_of_frozen(tensor: Tensor, plain: Tensor) -> str:
    """The digest of a frozen parameter, from the tensor that a file would have of it."""
    number = id(tensor)
    entry = _known.get(number)
    if entry is not None and entry[0]() is tensor and entry[1] == tensor._version:
        return entry[2]
    result = hashlib.blake2b(f"{CODES[plain.dtype]} {tuple(plain.shape)} ".encode(), digest_size=_FROZEN_BYTES)
    for piece in pieces_of([plain.cpu()]):
        result.update(piece)
    digest = result.hexdigest()
    _known[number] = weakref.ref(tensor, lambda _: _known.pop(number, None)), tensor._version, digest
    return digest


_PREFIX = "params."


@attrs.frozen
class BaseTensor:
    """A frozen parameter that a file leaves out.

    Attributes:
        dtype, shape: as it would lie in the file.
        digest: BLAKE2b-128 of its dtype, shape and bytes, in hexadecimal.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str

    def described(self) -> list[object]:
        return [CODES[self.dtype], list(self.shape), self.digest]


Base = Mapping[str, BaseTensor]
"""Frozen parameters by the names that they would have in the file, ``params.<name>``."""


def refuse_no_base(state: State) -> None:
    """
    Raises:
        ArgumentError: nothing can be left out of a file of this State.
    """
    model = type(state.model.skeleton).__name__
    if are_sharded(state.params):
        raise ArgumentError(
            "trained_only=True: a sharded State is saved whole, because the digest of a frozen parameter needs all of "
            "its shards: leave trained_only out."
        )
    if len(state.model.trainable) == len(state.params):
        raise ArgumentError(
            f"trained_only=True leaves out frozen parameters, and all {len(state.params)} parameters of {model} are "
            "trained: freeze some, model.backbone.requires_grad_(False), or leave trained_only out."
        )


def take_out_base(state: State, keys: Mapping[str, str], tensors: dict[str, Tensor]) -> dict[str, BaseTensor]:
    """Take the frozen parameters out of the tensors to be written.

    Args:
        state: what is written.
        keys: by the names of its parameters, their names in the file.
        tensors: by those names.
    """
    trained = {keys[name] for name in state.model.trainable}
    result: dict[str, BaseTensor] = {}
    for name, tensor in state.params.items():
        key = keys[name]
        if key in trained or key in result:
            continue
        plain = tensors.pop(key)
        result[key] = BaseTensor(plain.dtype, tuple(plain.shape), _digest_of_frozen(tensor, plain))
    return result


def read_base(value: Json) -> dict[str, BaseTensor]:
    """
    Raises:
        ValueError: the JSON describes no tensors.
    """
    result = {}
    for key, described in value.items():
        code, shape, digest = described
        if not (key.startswith(_PREFIX) and isinstance(code, str) and code in DTYPES and is_shape(shape)):
            raise ValueError(f"its frozen parameter {shortened(key)} is {shortened(described)}")
        if not (isinstance(digest, str) and len(digest) == 2 * _FROZEN_BYTES):
            raise ValueError(f"the digest of its frozen parameter {shortened(key)} is {shortened(digest)}")
        result[key] = BaseTensor(DTYPES[code], tuple(shape), digest)
    return result


def verified_base(base: Base, state: State, path: object) -> dict[str, tuple[Tensor, Tensor]]:
    """The frozen parameters of a file, from the State of the model that was passed.

    If the State is sharded, all ranks call it together.

    Returns:
        by the names of ``base``: the parameter, and the tensor that the file would have.

    Raises:
        ResumeError: the model has other ones; names the first.
    """
    result, differing = {}, []
    model = type(state.model.skeleton).__name__
    for key, saved in base.items():
        name = key.removeprefix(_PREFIX)
        if name not in state.params:
            raise ResumeError(
                f"{path} holds the trained parameters alone, and its frozen ones come from the model: {name!r} is not "
                f"a parameter of the {model} given. Build the model as it was built then."
            )
        parameter = full_tensor(state.params[name])
        writer = Writer(parameter.device)
        writer.write(parameter, ("params", name))
        plain = writer.tensors[key]
        if (plain.dtype, tuple(plain.shape)) != (saved.dtype, saved.shape) or _digest_of_frozen(
            parameter, plain
        ) != saved.digest:
            differing.append(name)
        result[key] = parameter, plain
    if differing:
        raise ResumeError(
            f"{path} holds the trained parameters alone, and its frozen ones come from the model: params"
            f"[{differing[0]!r}] of the {model} given is not what it was when the file was saved "
            f"({len(differing)} of {len(base)} frozen parameters differ). Load the same base into the model first. "
            "For the trained parameters on another base: "
            "pl.load(path, model=model, weights_only=True, strict=False)."
        )
    return result


def journal_loss(state: State) -> Tensor:
    """The loss of a batch as a journal has it, of an ensemble the mean of its members'; shape ()."""
    return total_loss(state.loss).detach().mean()
