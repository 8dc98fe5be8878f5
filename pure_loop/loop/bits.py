"""Leaves of two States compared bit by bit, and a checksum of tensors: what tells one computation from another."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pure_loop._internal.dtensor import local_tensor
from pure_loop.data.batch import tensors_in
from pure_loop.loop.leaves import leaves_of
from pure_loop.loop.strict import dense_parts, same
from pure_loop.state import State

__all__ = ["checksums", "combined", "count_of_differences", "unequal_leaves"]

# Integers of the same size as the numbers of a tensor.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Values of which `==` says whether they are equal.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), frozenset, torch.dtype, torch.device)

Pair = tuple[int, int]


def unequal_leaves(one: State, other: State, equal: Collection[Pair] = ()) -> tuple[list[str], set[Pair]]:
    """The names of leaves of which a bit differs between two States; NaN equals NaN. Of shards those of this rank.

    Numbers of a device are waited for once.

    Args:
        one, other: the States.
        equal: the addresses of pairs of leaves that are known to be equal.

    Returns:
        The names in the order of the State's fields, and the pairs that are equal.
    """
    first, second = leaves_of(one), leaves_of(other)
    unequal: set[str] = set(first.keys() ^ second.keys())
    same_now: set[Pair] = set()  # of tensors alone: other leaves may be made for the moment
    waiting: list[tuple[str, Pair, Tensor]] = []
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        pair = id(a), id(b)
        if a is b:
            continue
        if pair in equal:
            same_now.add(pair)
            continue
        result = _are_unequal(a, b)
        if isinstance(result, Tensor):
            waiting.append((name, pair, result))
        elif result:
            unequal.add(name)
        elif isinstance(a, Tensor):
            same_now.add(pair)
    by_device: dict[torch.device, list[tuple[str, Pair, Tensor]]] = {}
    for item in waiting:
        by_device.setdefault(item[2].device, []).append(item)
    for items in by_device.values():
        for (name, pair, _), result in zip(items, torch.stack([item[2] for item in items]).tolist(), strict=True):
            if result:
                unequal.add(name)
            else:
                same_now.add(pair)
    return [name for name in {**first, **second} if name in unequal], same_now


def _are_unequal(a: Any, b: Any) -> bool | Tensor:
    """Whether two leaves differ; a tensor, shape (), bool, where only their device knows."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = local_tensor(a).detach(), local_tensor(b).detach()
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or a.layout != b.layout:
            return True
        if not (_has_bits(a) and _has_bits(b)):
            return not same(a, b)
        results = [_bits_differ(one, other) for one, other in zip(dense_parts(a), dense_parts(b), strict=True)]
        on_device = [result for result in results if isinstance(result, Tensor)]
        return torch.stack(on_device).any() if on_device else any(results)
    if type(a) is not type(b):
        return True
    if isinstance(a, _PLAIN):
        return not bool(a == b or (a != a and b != b))
    if hasattr(a, "__array__"):
        return not same(a, b)
    # An object of a user's class: by its tensors, or by an `==` of its own.
    ours, others = tensors_in(a), tensors_in(b)
    if ours or others:
        return len(ours) != len(others) or any(bool(_are_unequal(x, y)) for x, y in zip(ours, others, strict=True))
    has_own = any("__eq__" in vars(base) for base in type(a).__mro__[:-1])
    return has_own and not bool(a == b)


def _has_bits(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its numbers, and nothing of a subclass stands in between."""
    return (type(tensor) is Tensor or isinstance(tensor, nn.Parameter)) and not tensor.is_quantized


def _bits_differ(a: Tensor, b: Tensor) -> bool | Tensor:
    if a.shape != b.shape:
        return True
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.numel():
        return False  # one memory
    mine, others = _bits(a), _bits(b)
    if mine.is_cpu:
        return not (torch.equal(mine, others) or (_may_be_nan(a) and bool(_equal_numbers(a, b, mine, others).all())))
    if not _may_be_nan(a):
        return (mine != others).any()
    return (~_equal_numbers(a, b, mine, others)).any()


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])


def _may_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _equal_numbers(a: Tensor, b: Tensor, mine: Tensor, others: Tensor) -> Tensor:
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if a.element_size() == 1:  # floats of 8 bits have no operations of their own
        a, b = a.float(), b.float()
    return (mine == others) | (a.isnan() & b.isnan())


def count_of_differences(a: Any, b: Any) -> str:
    """How many numbers of two leaves differ, and the first of them; other leaves as they are written.

    >>> count_of_differences(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    '1 of 2 numbers, [1]: 2.0 and 3.0'
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f"{_short(a)} and {_short(b)}"
    a, b = local_tensor(a).detach().to_dense(), local_tensor(b).detach().to_dense()
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{_kind(a)} and {_kind(b)}"
    if not (_has_bits(a) and _has_bits(b)):
        return f"two tensors of {_kind(a)}"
    mine, others = _bits(a), _bits(b)
    wrong = ~_equal_numbers(a, b, mine, others) if _may_be_nan(a) else mine != others
    if a.is_complex():
        wrong = wrong.any(-1)
    place = wrong.nonzero()[0].tolist()
    values = (tensor[tuple(place)].item() for tensor in (a, b))
    count = f"{int(wrong.sum())} of {a.numel()} numbers, {place}: " if place else ""
    return count + " and ".join(map(repr, values))


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def checksums(tensors: Mapping[str, Tensor]) -> list[int]:
    """The sum of the bits of each tensor, as integers of 64 bits: of one flipped bit it shows every one.

    A device is waited for once. Tensors of a subclass, whose memory isn't known, have 0.
    """
    sums: list[Tensor] = []
    for tensor in tensors.values():
        tensor = local_tensor(tensor).detach()
        parts = dense_parts(tensor) if _has_bits(tensor) else []
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for part in parts:
            total = total + _bits(part).sum(dtype=torch.int64)
        sums.append(total)
    by_device: dict[torch.device, list[int]] = {}
    for index, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(index)
    result = [0] * len(sums)
    for indices in by_device.values():
        numbers = torch.stack([sums[index] for index in indices]).tolist()
        for index, number in zip(indices, numbers, strict=True):
            result[index] = number
    return result


def combined(sums: Iterable[int]) -> int:
    """One number of 32 bits of these sums, in their order."""
    return zlib.crc32(array("q", sums).tobytes())
