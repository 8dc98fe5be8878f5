"""Tensors in parts, of which a rank holds one: made of parts, cut as others are, and empty ones to be filled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.tree_ops import from_local, local_tensor
from pure_loop.checkpoint.container import raw

__all__ = ["as_bytes", "contiguous_parts", "empty_like_parts", "from_bytes", "split_like"]


def _with_part(like: Any, part: Tensor, shape: list[int]) -> Tensor:
    """A tensor of this shape, in parts as ``like`` is, of which this rank holds ``part``."""
    stride = torch.empty(shape, device="meta").stride()
    parts: Tensor = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return parts


def contiguous_parts(tensor: Tensor) -> Tensor:
    """The tensor in parts that lie in memory as a file has them."""
    part = local_tensor(tensor).detach().resolve_conj().resolve_neg().contiguous()
    return _with_part(tensor, part, list(tensor.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in contiguous parts: see :func:`pure_loop.checkpoint.container.raw`."""
    part = raw(local_tensor(tensor))
    return _with_part(tensor, part, [*tensor.shape, *part.shape[tensor.ndim :]])


def from_bytes(tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """The tensor of this shape whose bytes these are."""
    part = local_tensor(tensor)
    return _with_part(tensor, part.flatten().view(dtype).reshape(part.shape[:-1]), shape)


def _box_of(whole: Tensor, like: Any) -> Tensor:
    """What a rank holds of a whole tensor that is in parts as ``like`` is."""
    (box,) = like.__create_chunk_list__()
    for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole


def split_like(whole: Tensor, like: Any) -> Any:
    """A whole tensor in parts, as ``like`` is; every rank has to have it."""
    part = _box_of(whole, like).to(local_tensor(like), copy=True, memory_format=torch.contiguous_format)
    return from_local(like, part)


def empty_like_parts(shape: tuple[int, ...], dtype: torch.dtype, like: Any) -> Any:
    """A tensor to be filled, in parts as ``like`` is, and on its device."""
    from torch.distributed.tensor import empty  # already imported where tensors are sharded

    return empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)
