"""Tensors compared bit by bit, their checksums and digests: what tells one computation from another."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from pure_loop._internal.reprs import shape_and_dtype
from pure_loop._internal.torch_private import is_transformed
from pure_loop._internal.tree_ops import local_tensor

# Integers of the same size as the numbers of a tensor.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal: tensors bit by bit, so that 0.0 is not -0.0, with NaN equal to NaN.

    Tensors of a subclass, of unknown memory, and NumPy's arrays are equal where their numbers are; all else
    where ``==`` says so.

    >>> same(torch.tensor([float("nan")]), torch.tensor([float("nan")])), same(torch.tensor(0.0), torch.tensor(-0.0))
    (True, False)
    """
    a, b = local_tensor(a), local_tensor(b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and not tensors_differ(a, b)
    if hasattr(a, "__array__") and hasattr(b, "__array__"):  # NumPy's: their == is an array
        return bool(a.shape == b.shape and a.dtype == b.dtype and ((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b)


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Dense tensors that have all numbers of this one: its indices and values where it is sparse."""
    layout = tensor.layout
    if tensor.is_meta:
        return []
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor if layout is torch.strided else tensor.to_dense()]


def tensors_differ(a: Tensor, b: Tensor) -> bool | Tensor:
    """Whether a bit of two tensors differs, of shards that of this rank; NaN equals NaN.

    Returns:
        A tensor, shape (), bool, where only their device knows.
    """
    a, b = local_tensor(a).detach(), local_tensor(b).detach()
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or a.layout != b.layout:
        return True
    if not (_has_bits(a) and _has_bits(b)):
        return not all(map(_same_numbers, _dense_parts(a), _dense_parts(b)))
    results = list(map(_bits_differ, _dense_parts(a), _dense_parts(b)))
    on_device = [result for result in results if isinstance(result, Tensor)]
    return torch.stack(on_device).any() if on_device else any(results)


def _has_bits(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its numbers, and nothing of a subclass stands in between."""
    # A tensor inside a transform of torch.func has no memory of its own.
    is_dense = type(tensor) is Tensor or isinstance(tensor, nn.Parameter)
    return is_dense and not tensor.is_quantized and not is_transformed(tensor)


def _bits_differ(a: Tensor, b: Tensor) -> bool | Tensor:
    if a.shape != b.shape:
        return True
    views = [(tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()) for tensor in (a, b)]
    if views[0] == views[1] and a.numel():
        return False  # one memory
    if not a.is_cpu:
        return _differing_numbers(a, b).any()
    return not torch.equal(_bits(a), _bits(b)) and bool(_differing_numbers(a, b).any())


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])


def _differing_numbers(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits of two tensors differ, and not both are NaN."""
    differing = _bits(a) != _bits(b)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return differing
    if a.element_size() == 1:  # floats of 8 bits have no operations of their own
        a, b = a.float(), b.float()
    return differing & ~(a.isnan() & b.isnan())


def count_of_differences(a: object, b: object) -> str:
    """How many numbers of two leaves differ, and the first of them; other leaves as they are written.

    >>> count_of_differences(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    '1 of 2 numbers, [1]: 2.0 and 3.0'
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f"{_short(a)} and {_short(b)}"
    a, b = local_tensor(a).detach().to_dense(), local_tensor(b).detach().to_dense()
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{shape_and_dtype(a)} and {shape_and_dtype(b)}"
    if not (_has_bits(a) and _has_bits(b)):
        return f"two tensors of {shape_and_dtype(a)}"
    wrong = _differing_numbers(a, b)
    if a.is_complex():
        wrong = wrong.any(-1)
    place = wrong.nonzero()[0].tolist()
    values = (tensor[tuple(place)].item() for tensor in (a, b))
    count = f"{int(wrong.sum())} of {a.numel()} numbers, {place}: " if place else ""
    return count + " and ".join(map(repr, values))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of the bits of each tensor, as integers of 64 bits: of one flipped bit it shows every one.

    A device is waited for once. Tensors of a subclass, of unknown memory, have 0.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        tensor = local_tensor(tensor).detach()
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for part in _dense_parts(tensor) if _has_bits(tensor) else []:
            total = total + _bits(part).sum(dtype=torch.int64)
        by_device.setdefault(tensor.device, {})[name] = total
    result = dict.fromkeys(tensors, 0)
    for sums in by_device.values():
        result.update(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))
    return result


def combined(sums: Iterable[int]) -> int:
    """One number of 32 bits of these sums, in their order."""
    return zlib.crc32(array("q", sums).tobytes())


# The bytes up to which a digest has a copy of a tensor's bits.
_SMALL = 1 << 16
# Of sums in as many columns: a number that moves comes to another column, whatever the shape of the tensor.
_COLUMNS = (1021, 1019)


@attrs.frozen(eq=False)
class Digest:
    """What tells a tensor or an array from another one; ``==`` compares their values, bit by bit.

    Attributes:
        kind: class, dtype, device, shape.
        parts: the bits of a small tensor, sums of those of a large one.
        first: its first numbers.
    """

    kind: tuple[object, ...]
    parts: Sequence[object]
    first: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Digest):
            return NotImplemented
        return self.kind == other.kind and all(map(same, self.parts, other.parts))

    def __str__(self) -> str:
        first = self.first.to_dense() if isinstance(self.first, Tensor) else self.first
        numbers = first.flatten()[:4].tolist()
        return repr(numbers) if len(numbers) < 4 else f"{repr(numbers[:3])[:-1]}, ...]"


def digest(leaf: Any) -> Digest | None:
    """The digest of a leaf; None: it is neither a tensor with numbers nor an array of numbers.

    Of a tensor of more than 64 KiB it has sums: a changed number always shows, two by a chance of about 2**-64.

    >>> x = torch.zeros(100_000)
    >>> before = digest(x)
    >>> _ = x.data[70_000].add_(1e-30)
    >>> digest(x) == before
    False
    """
    if not isinstance(leaf, Tensor):
        if not hasattr(leaf, "__array__") or not hasattr(leaf, "setflags") or leaf.dtype.kind not in "biufc":
            return None
        return Digest((type(leaf), leaf.dtype, leaf.shape), [leaf.copy()], leaf.reshape(-1)[:4].copy())
    tensor = local_tensor(leaf).detach()
    if tensor.is_meta:
        return None
    kind = type(tensor), tensor.dtype, tensor.device, tensor.shape
    if not _has_bits(tensor):
        value = tensor.clone()
        return Digest(kind, [value], value)
    parts = _dense_parts(tensor)
    first = parts[-1].reshape(-1)[:4].clone()
    return Digest(kind, [number for part in parts for number in _summary(_bits(part))], first)


def _summary(bits: Tensor) -> list[Tensor]:
    size = bits.element_size()
    if bits.numel() * size <= _SMALL:
        return [bits.clone()]
    flat = bits.reshape(-1)
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    rest = flat.numel() % (8 // size)
    words = flat[: flat.numel() - rest].view(torch.int64)
    # Rows of unequal number: else a bit that changes in all of them would come to nothing.
    columns = next(number for number in _COLUMNS if words.numel() % number or number == _COLUMNS[-1])
    in_rows = words.numel() // columns * columns
    sums = words[:in_rows].view(-1, columns).sum(0)
    sums[: words.numel() - in_rows] += words[in_rows:]
    return [sums, flat[flat.numel() - rest :].clone()]
