"""A whole tensor as a rank holds others: all of it, or its part."""

from __future__ import annotations

from torch import Tensor

from pure_loop._parts import is_part, part_of, with_part
from pure_loop.errors import ArgumentError

__all__ = ["shard_like"]


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
    parts = distribute_tensor(whole, spec.mesh, spec.placements, src_data_rank=None)
    # A view of it would keep the whole of it.
    return with_part(parts, part_of(parts).clone())  # type: ignore[no-any-return]
