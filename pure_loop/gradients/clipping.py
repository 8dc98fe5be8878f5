"""The norm of gradients, and three ways to clip them, as pure functions.

They take and give mappings of parameter names to tensors. A gradient that is None (a parameter the
loss didn't reach) stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias, cast

import torch
from torch import Tensor

from pure_loop._internal.tree_ops import (
    are_sharded,
    from_local,
    is_sharded,
    is_sharded_along,
    local_tensor,
    map_local,
    of_one_sharding,
    sum_over_shards,
)
from pure_loop._internal.tree_ops import norms as norms_of
from pure_loop.errors import ArgumentTypeError
from pure_loop.frozendict import FrozenDict

ClipFunction: TypeAlias = Callable[
    [FrozenDict[str, Tensor | None], FrozenDict[str, Tensor]], Mapping[str, Tensor | None]
]
"""``(grads, params) -> grads``."""


def map_present(
    function: Callable[[list[Tensor]], list[Tensor]], grads: Mapping[str, Tensor | None]
) -> FrozenDict[str, Tensor | None]:
    """Apply a function of a list of tensors to the gradients that are there; it gives others that lie as these do."""
    present = {name: gradient for name, gradient in grads.items() if gradient is not None}
    if not present:
        return FrozenDict(grads)
    tensors = list(present.values())
    results = _on_values(function, tensors) if any(map(_is_sparse, tensors)) else map_local(function, tensors)
    changed: FrozenDict[str, Tensor | None] = FrozenDict(zip(present, results, strict=True))
    return changed if len(changed) == len(grads) else FrozenDict((name, changed.get(name)) for name in grads)


_is_sparse = attrgetter("is_sparse")


def _on_values(function: Callable[[list[Tensor]], list[Tensor]], tensors: list[Tensor]) -> list[Tensor]:
    """A function of a list of tensors, applied to the numbers that sparse ones among them hold."""
    tensors = [tensor.coalesce() if tensor.is_sparse else tensor for tensor in tensors]
    values = function([tensor.values() if tensor.is_sparse else tensor for tensor in tensors])
    return [
        _with_values(tensor, part) if tensor.is_sparse else part for tensor, part in zip(tensors, values, strict=True)
    ]


def _with_values(coalesced: Tensor, values: Tensor) -> Tensor:
    """A sparse tensor with other values at the same indices."""
    return torch.sparse_coo_tensor(
        coalesced.indices(), values, coalesced.shape, is_coalesced=True, check_invariants=False
    )


def in_dtypes_of(tensors: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    """``new`` in the dtypes of ``tensors``: of two tensors of shape () the wider dtype is that of their product.

    >>> tensors = [torch.tensor(1.0, dtype=torch.bfloat16)]
    >>> in_dtypes_of(tensors, new=torch._foreach_mul(tensors, torch.tensor(2.0)))
    [tensor(2., dtype=torch.bfloat16)]
    """
    return [
        result if result.dtype is tensor.dtype else result.to(tensor.dtype)
        for result, tensor in zip(new, tensors, strict=True)
    ]


def _refuse_unnamed(tensors: object, function: str) -> None:
    """
    Raises:
        ArgumentTypeError: tensors that are no mapping, as a list is none.
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(
            f"{function} takes tensors by name and was given a {type(tensors).__name__}: write "
            f"{function}(state.grads), or {function}(dict(enumerate(tensors)))."
        )


@torch.no_grad()
def global_norm(tensors: Mapping[str, Tensor | None], norm_type: float = 2.0) -> Tensor:
    """The norm of all tensors taken as one long vector; shape (), on their device.

    Of tensors in parts (DTensors) it is that of the whole, and all ranks have to call it. Of a sparse tensor (COO)
    it is the norm of its values, those at one index added up.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    _refuse_unnamed(tensors, "global_norm")
    present = [tensor for tensor in tensors.values() if tensor is not None]
    if not present:
        return torch.zeros(())
    if any(map(_is_sparse, present)):
        present = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in present]
    norms = norms_of(present, norm_type)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


@torch.no_grad()
def inner_product(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None]) -> Tensor:
    """The inner product of two sets of tensors, each taken as one long vector; shape (), on their device.

    Names that one of them lacks, or has None for, count for nothing; those of 16 bits are multiplied in float32, and of
    complex numbers it is the real part. Of tensors in parts (DTensors) it is that of the
    whole, and all ranks have to call it.

    >>> inner_product({"a": torch.tensor([1.0, 2.0]), "b": None}, {"a": torch.tensor([3.0, 4.0])})
    tensor(11.)
    """
    present = [(tensor, b.get(name)) for name, tensor in a.items() if tensor is not None]
    pairs = [(left, right) for left, right in present if right is not None]
    if not pairs:
        return torch.zeros(())
    local = [(local_tensor(left), local_tensor(right)) for left, right in pairs]
    parts = [(_wide(left) * _wide(right).conj()).sum().real for left, right in local]
    lefts, total = [left for left, _ in pairs], torch.zeros_like(parts[0])
    for places in of_one_sharding(lefts):
        some = torch.stack([parts[place].to(parts[0]) for place in places]).sum()
        total = total + sum_over_shards(some, lefts[places[0]])
    return total


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


@torch.no_grad()
def norms(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The L2 norm of each tensor that is there, by its name; shape (), float32 for tensors of 16 bits.

    Of sharded tensors (DTensors) it is that of the whole, in one exchange for all, and all ranks have to call it.

    >>> norms({"a": torch.tensor([3.0, 4.0]), "b": None})
    {'a': tensor(5.)}
    """
    _refuse_unnamed(tensors, "norms")
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in present.values()]
    if not are_sharded(values) and any(tensor.dtype in _HALVES for tensor in values):
        lengths: list[Tensor] = [torch.linalg.vector_norm(tensor, dtype=_norm_dtype(tensor)) for tensor in values]
    else:
        lengths = norms_of(values)
    return dict(zip(present, lengths, strict=True))


_HALVES = frozenset({torch.float16, torch.bfloat16})


def _norm_dtype(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in _HALVES else None


def clipping_factor(
    grads: Mapping[str, Tensor | None], max_norm: float, norm_type: float = 2.0, *, norm: Tensor | None = None
) -> Tensor:
    """What gradients are multiplied by so that their global norm is at most ``max_norm``; shape ().

    ``norm`` is their :func:`global_norm`, if that is known.
    """
    return torch.clamp(max_norm / ((global_norm(grads, norm_type) if norm is None else norm) + 1e-6), max=1.0)


@torch.no_grad()
def clip_by_norm(
    grads: Mapping[str, Tensor | None], max_norm: float, norm_type: float = 2.0, *, norm: Tensor | None = None
) -> FrozenDict[str, Tensor | None]:
    """Scale all gradients so that their global norm is at most ``max_norm`` (https://arxiv.org/abs/1211.5063).

    ``norm`` is their :func:`global_norm`, if that is known.

    >>> clip_by_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)["a"]
    tensor([0.6000])
    """
    _refuse_unnamed(grads, "clip_by_norm")
    factor = clipping_factor(grads, max_norm, norm_type, norm=norm)
    return map_present(lambda present: in_dtypes_of(present, torch._foreach_mul(present, factor)), grads)


@torch.no_grad()
def clip_by_value(grads: Mapping[str, Tensor | None], max_value: float) -> FrozenDict[str, Tensor | None]:
    """Clamp every element of every gradient to ``[-max_value, max_value]``; one that is not finite becomes NaN.

    An infinite gradient clamped to a finite one would hide that it had overflowed. Of complex gradients the real and
    the imaginary parts are clamped.

    >>> clip_by_value({"a": torch.tensor([3.0, -0.5])}, 1.0)["a"]
    tensor([ 1.0000, -0.5000])
    """
    _refuse_unnamed(grads, "clip_by_value")

    def clamp(present: list[Tensor]) -> list[Tensor]:
        real = [
            torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient for gradient in present
        ]
        clamped: Sequence[Tensor]
        if type(max_value) is float or type(max_value) is int:
            clamped = torch._foreach_clamp_max(torch._foreach_clamp_min(real, -max_value), max_value)
        else:  # the stand-in for a schedule's value in a compiled step, which functions of lists don't take
            clamped = [gradient.clamp(-max_value, max_value) for gradient in real]
        # x - x is 0, and NaN where x is infinite.
        result = torch._foreach_add(clamped, torch._foreach_sub(real, real))
        return [
            torch.view_as_complex(part) if source.is_complex() else part
            for part, source in zip(result, present, strict=True)
        ]

    return map_present(clamp, grads)


def _unit_norm(tensor: Tensor) -> Tensor:
    """The norm of each output unit: over all dimensions but the first; of the whole for vectors and scalars."""
    across = tuple(range(1, tensor.ndim)) or None
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=across, keepdim=across is not None)
    return norm


def _unit_norms(tensor: Tensor) -> Tensor:
    """Of the units of which this rank holds a part, which may be cut as well (tensor parallelism)."""
    norm = _unit_norm(local_tensor(tensor))
    return sum_over_shards(norm.square(), tensor, along=1).sqrt() if is_sharded_along(tensor, 1) else norm


@torch.no_grad()
def clip_adaptively(
    grads: Mapping[str, Tensor | None], params: Mapping[str, Tensor], clipping: float = 0.01, eps: float = 1e-3
) -> FrozenDict[str, Tensor | None]:
    """Clip each unit's gradient to ``clipping`` times the norm of its weights (https://arxiv.org/abs/2102.06171).

    ``eps`` is the least weight norm that counts, so that weights at zero can leave it.
    """
    _refuse_unnamed(grads, "clip_adaptively")

    # Ranks hold whole rows of a matrix, and parts of a vector.
    vectors = [name for name, g in grads.items() if g is not None and g.ndim < 2 and is_sharded(g)]
    both = [*(params[name] for name in vectors), *(cast("Tensor", grads[name]) for name in vectors)]
    lengths = norms_of(both)
    norms = dict(zip(vectors, zip(lengths[: len(vectors)], lengths[len(vectors) :], strict=True), strict=True))

    def clip(name: str, gradient: Tensor) -> Tensor:
        if gradient.is_sparse:
            dense, gradient = clip(name, gradient.to_dense()), gradient.coalesce()
            return _with_values(gradient, dense[tuple(gradient.indices())])
        if name in norms:
            size, norm = norms[name]
        else:
            size, norm = _unit_norms(params[name].detach()), _unit_norms(gradient)
        limit = clipping * size.clamp(min=eps)
        clipped: Tensor = from_local(gradient, scale(local_tensor(gradient), norm, limit))
        return clipped

    def scale(gradient: Tensor, norm: Tensor, limit: Tensor) -> Tensor:
        return torch.where(norm > limit, gradient * (limit / norm.clamp(min=1e-6)), gradient)

    return FrozenDict((name, None if g is None else clip(name, g)) for name, g in grads.items())
