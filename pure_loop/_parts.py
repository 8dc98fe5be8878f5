"""Tensors of which every rank holds a part (torch's DTensors): reading a part, and putting another one in its place.

torch.distributed is not imported here: who has no such tensors doesn't pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from pure_loop.errors import ArgumentError

__all__ = [
    *("is_part", "on_mesh", "on_parts", "part_of", "same_parts", "shard_like", "sum_over_parts", "whole_of"),
    "with_part",
]


def is_part(tensor: Any) -> bool:
    """Whether this is a tensor of which this rank holds a part.

    >>> import torch
    >>> is_part(torch.ones(2))
    False
    """
    return hasattr(tensor, "_local_tensor")


def same_parts(tensor: Any, before: Any) -> bool:
    """Whether each rank holds the part of a tensor that it held of another of that shape; of a whole one, it may."""
    if not (is_part(before) and is_part(tensor)):
        return True
    return tensor.placements == before.placements and tensor.device_mesh == before.device_mesh  # type: ignore[no-any-return]


def part_of(tensor: Any) -> Any:
    """What this rank holds of a tensor: all of a plain one."""
    return getattr(tensor, "_local_tensor", tensor)


def whole_of(tensor: Any) -> Any:
    """The whole tensor; all ranks have to ask for it."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def with_part(tensor: Any, part: Tensor) -> Any:
    """A tensor like this one, of which this rank holds ``part``."""
    if not is_part(tensor):
        return part
    spec = tensor._spec
    if part.dtype is not tensor.dtype:
        spec = type(spec)(spec.mesh, spec.placements, spec.tensor_meta._replace(dtype=part.dtype))
    return type(tensor)(part, spec, requires_grad=False)


def shard_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor in parts as ``tensor`` is, so that an algorithm can compute with both.

    Every rank is given the same whole tensor, and keeps its part: ranks don't talk. Where ``tensor`` isn't in parts (on
    one rank, on replicated ones), it is ``whole`` itself.

    Args:
        whole: such as noise that each rank draws from the same seed; of any dtype.
        tensor: one of the State's parameters or gradients, of the same shape and on the same device.

    Raises:
        ArgumentError: the shapes differ.

    >>> import torch
    >>> shard_like(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if whole.shape != tensor.shape:
        raise ArgumentError(
            f"shard_like(whole, tensor) was given a whole tensor of shape {tuple(whole.shape)}, and one of shape "
            f"{tuple(tensor.shape)}, that of all its parts together: make it of tensor.shape"
        )
    if not is_part(tensor) or is_part(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor  # who has tensors in parts has it already

    spec = tensor._spec  # type: ignore[attr-defined]
    parts = distribute_tensor(whole.detach(), spec.mesh, spec.placements, src_data_rank=None)
    # A view of it would keep the whole of it.
    return with_part(parts, part_of(parts).clone())  # type: ignore[no-any-return]


def on_mesh(tensor: Any, mesh: Any) -> Any:
    """A tensor in the same parts, over another mesh of the same shape."""
    spec = tensor._spec
    return type(tensor)(part_of(tensor), type(spec)(mesh, spec.placements, spec.tensor_meta), requires_grad=False)


def on_parts(function: Callable[..., Iterable[Tensor]], *lists: Sequence[Tensor]) -> list[Tensor]:
    """An elementwise function of lists of tensors, applied to what this rank holds of them.

    >>> import torch
    >>> on_parts(torch._foreach_neg, [torch.tensor(1.0)])
    [tensor(-1.)]
    """
    if not any(map(is_part, lists[0])):
        return list(function(*lists))
    new = function(*[[part_of(tensor) for tensor in some] for some in lists])
    return [with_part(old, part) for old, part in zip(lists[0], new, strict=True)]


def sum_over_parts(values: Tensor, tensor: Any, *, largest: bool = False) -> Tensor:
    """Values computed from the part of ``tensor``, summed (or their largest) over the ranks that hold the others."""
    dist: Any = sys.modules["torch.distributed"]
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    values = values.clone()
    for dimension, placement in enumerate(tensor._spec.placements):
        if placement.is_shard():
            dist.all_reduce(values, op=op, group=tensor._spec.mesh.get_group(dimension))
    return values
