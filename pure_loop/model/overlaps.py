"""Tensors of a module with elements at the same addresses, though they are registered as different tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pure_loop._internal.torch_private import is_transformed

__all__ = ["overlapping_elements", "overlapping_pair"]


class _Span(NamedTuple):
    """The bytes from the first to the last element of a tensor."""

    begin: int
    end: int
    name: str
    tensor: Tensor
    only_with_named: bool


def overlapping_pair(
    named: Iterable[tuple[str, Tensor]], unnamed: Iterable[tuple[str, Tensor]] = ()
) -> tuple[str, str] | None:
    """The names of two tensors that have an element in common in memory; None if there are none.

    Tensors of one storage that don't overlap, such as slices of a flat tensor or columns of a matrix, are no pair.

    Args:
        named: names and tensors, each of them another object. Tensors without memory of their own (empty, on the meta
            device, sparse, or of a class that dispatches by itself) are left out.
        unnamed: further tensors, which may overlap with each other, and not with one in ``named``.

    >>> flat = torch.zeros(6)
    >>> overlapping_pair([("a", flat[:3]), ("b", flat[3:])])
    >>> overlapping_pair([("a", flat[:3]), ("b", flat[2:])])
    ('a', 'b')
    """
    spans = [_span(name, tensor, False) for name, tensor in named if _has_memory(tensor)]
    spans += [_span(name, tensor, True) for name, tensor in unnamed if _has_memory(tensor)]
    spans.sort(key=lambda span: span[:2])
    for cluster in _clusters(spans):
        result = _pair_in(cluster)
        if result is not None:
            return result
    return None


def overlapping_elements(tensor: Tensor) -> bool:
    """Whether several elements of this tensor lie at one address, as those of an expanded tensor do.

    >>> overlapping_elements(torch.zeros(1).expand(3)), overlapping_elements(torch.zeros(3))
    (True, False)
    """
    if not _has_memory(tensor):
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                break
            reach += stride * (size - 1)
    else:
        return False
    # The rule above is sufficient, and not necessary: count the places.
    span = _span("", tensor, False)
    marks = _marks(span.end - span.begin)
    places = _bytes_of(span, marks, span.begin)
    places.fill_(1)
    return int(marks.count_nonzero()) < places.numel()


def _has_memory(tensor: Tensor) -> bool:
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or is_transformed(tensor):
        return False
    return tensor.numel() > 0


def _span(name: str, tensor: Tensor, only_with_named: bool) -> _Span:
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(begin, begin + (last + 1) * tensor.element_size(), name, tensor, only_with_named)


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Those that reach into each other, two or more at a time."""
    cluster: list[_Span] = []
    reach = 0
    for span in spans:
        if cluster and span.begin >= reach:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(span)
        reach = max(reach, span.end) if len(cluster) > 1 else span.end
    if len(cluster) > 1:
        yield cluster


def _pair_in(cluster: list[_Span]) -> tuple[str, str] | None:
    cluster = sorted(cluster, key=lambda span: span.only_with_named)
    named = [span for span in cluster if not span.only_with_named]
    begin = min(span.begin for span in cluster)
    marks = _marks(max(span.end for span in cluster) - begin)
    for position, span in enumerate(cluster):
        places = _bytes_of(span, marks, begin)
        if places.any():
            # Once, for the message: which of those before it.
            for earlier in named[:position]:
                marks.zero_()
                _bytes_of(earlier, marks, begin).fill_(1)
                if places.any():
                    return earlier.name, span.name
        if not span.only_with_named:
            places.fill_(1)
    return None


def _marks(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cpu")


def _bytes_of(span: _Span, marks: Tensor, begin: int) -> Tensor:
    """The bytes of a tensor's elements, in ``marks``, which has one for each byte of memory from ``begin`` on."""
    size = span.tensor.element_size()
    strides = [stride * size for stride in span.tensor.stride()]
    return marks.as_strided((*span.tensor.shape, size), (*strides, 1), span.begin - begin)
