"""Finding losses and gradients that are NaN or infinite, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.cloning import clone_all
from pure_loop._internal.torch_private import find_nonfinite as find_nonfinite_kernel
from pure_loop.stages.ownership import LARGE

__all__ = [
    "find_nonfinite",
    "gradients_nonfinite",
    "loss_is_finite",
    "real_numbers",
    "total_loss",
]


def total_loss(loss: Any) -> Tensor:
    """The loss that is differentiated: the tensor itself, or ``total`` of a dict."""
    return loss["total"] if isinstance(loss, dict) else loss  # type: ignore[no-any-return]


def loss_is_finite(loss: Any) -> bool:
    """Whether a loss is finite; waits for the device."""
    return math.isfinite(total_loss(loss).item())


_dtype = attrgetter("dtype")


_CPU = torch.device("cpu")  # whatever the default device
# By device, made once: to make a tensor takes longer than many a kernel.
_ones: dict[torch.device, Tensor] = {_CPU: torch.ones(1, dtype=torch.float32, device=_CPU)}


def _one_on(device: torch.device) -> Tensor:
    """A 1 of float32, shape (1,), to be read and not written to.

    Inside of a trace it has no number, and is not kept: the next caller would compute with it.
    """
    result = _ones.get(device)
    if result is None:
        result = torch.ones(1, dtype=torch.float32, device=device)
        if type(result) is Tensor:
            _ones[device] = result
    return result


def find_nonfinite(loss: Tensor, fresh: Iterable[Tensor]) -> Tensor:
    """1 where the loss or one of these tensors is not finite, else 0; float32, shape (1,), on their device.

    It is torch's kernel for unscaling gradients, at scale 1: the cheapest that sees a NaN. It writes each
    tensor, times one, back, so the tensors must not be aliased.
    """
    device, tensors = loss.device, list(fresh)
    if device.type == "cpu":
        return _looked_at(tensors, _CPU) if math.isfinite(loss.item()) else _one_on(_CPU)
    if not _SCALED.issuperset(map(_dtype, tensors)) or any(element.device != device for element in tensors):
        return _any_nonfinite(loss, tensors)
    return torch.maximum(_looked_at(tensors, device), (~torch.isfinite(loss)).float().reshape(1))


# What that kernel takes on a GPU, in pairs of numbers where they are complex.
_SCALED = frozenset({torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128})


def _looked_at(tensors: list[Tensor], device: torch.device) -> Tensor:
    """1 where one of these tensors is not finite, else 0; float32, shape (1,)."""
    result, one = torch.zeros(1, dtype=torch.float32, device=device), _one_on(device)
    dtypes = set(map(_dtype, tensors))
    if len(dtypes) == 1 and not dtypes.pop().is_complex:
        find_nonfinite_kernel(tensors, result, one)
        return result
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        find_nonfinite_kernel([real], result, one)
    return result


def gradients_nonfinite(loss: Tensor, grads: Iterable[Tensor]) -> Tensor:
    """The same of a loss and of gradients, which may be aliased: nothing is written."""
    looked_at = [gradient for gradient in map(real_numbers, grads) if gradient.is_floating_point()]
    if loss.is_cpu:
        if sum(gradient.numel() for gradient in looked_at) < LARGE:
            return find_nonfinite(loss, clone_all(looked_at))
        # Sums are quick on a CPU; one of large numbers may overflow, too.
        if all(math.isfinite(element.item()) for element in (loss, *[element.sum() for element in looked_at])):
            return torch.zeros(1, dtype=torch.float32, device=_CPU)
    return _any_nonfinite(loss, looked_at)


def _any_nonfinite(loss: Tensor, tensors: list[Tensor]) -> Tensor:
    """The same by the largest element of each tensor, which is NaN where one is; of any dtypes and devices."""
    devices: dict[torch.device, list[Tensor]] = {}
    for item in map(real_numbers, tensors):
        if item.numel():
            devices.setdefault(item.device, []).append(item)
    numbers = [loss.detach()]
    for filled in devices.values():
        numbers += torch._foreach_norm(filled, math.inf)
    widest = reduce(torch.promote_types, map(_dtype, numbers))
    moved = [number.to(loss.device, widest, non_blocking=True) for number in numbers]
    return (~torch.isfinite(torch.stack(moved))).any().float().reshape(1)


def real_numbers(tensor: Tensor) -> Tensor:
    """The numbers in a tensor, real ones."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
