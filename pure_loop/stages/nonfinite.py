"""Finding losses and gradients that are NaN or infinite, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.torch_private import find_nonfinite as find_nonfinite_kernel


def total_loss(loss: Any) -> Tensor:
    """The loss that is differentiated: the tensor itself, or ``total`` of a dict."""
    total: Tensor = loss["total"] if isinstance(loss, dict) else loss
    return total


_dtype = attrgetter("dtype")


# By device, made once: to make a tensor takes longer than many a kernel.
_ones: dict[torch.device, Tensor] = {}


def find_nonfinite(loss: Tensor, fresh: Iterable[Tensor]) -> Tensor:
    """1 where the loss or one of these tensors is not finite, else 0; float32, shape (1,), on their device.

    It is torch's kernel for unscaling gradients, at scale 1: the cheapest that sees a NaN. It writes each
    tensor, times one, back, so the tensors must not be aliased.
    """
    device, tensors = loss.device, list(fresh)
    on_cpu, dtypes = device.type == "cpu", set(map(_dtype, tensors))
    if not on_cpu and (not dtypes <= _SCALED or any(element.device != device for element in tensors)):
        return _any_nonfinite(loss, tensors)
    unit = _ones.get(device)
    if unit is None:
        unit = torch.ones(1, dtype=torch.float32, device=device)
        if type(unit) is Tensor:  # inside of a trace it has no number, and the next caller would compute with it
            _ones[device] = unit
    if on_cpu and not math.isfinite(loss.item()):
        return unit
    result = torch.zeros_like(unit) if on_cpu else (~torch.isfinite(loss)).float().reshape(1)
    together = len(dtypes) == 1 and not dtypes.pop().is_complex
    for group in [tensors] if together else [[real_numbers(tensor)] for tensor in tensors]:
        find_nonfinite_kernel(group, result, unit)
    return result


# What that kernel takes on a GPU, in pairs of numbers where they are complex.
_SCALED = frozenset({torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128})


def gradients_nonfinite(loss: Tensor, grads: Iterable[Tensor]) -> Tensor:
    """1 where a loss or a gradient is not finite, else 0, as above. They may be aliased: nothing is written."""
    looked_at = [gradient for gradient in map(real_numbers, grads) if gradient.is_floating_point()]
    # Sums are quick on a CPU; one of large numbers may overflow, too.
    if loss.is_cpu and all(math.isfinite(number.item()) for number in (loss, *map(torch.sum, looked_at))):
        return torch.zeros(1, dtype=torch.float32, device=loss.device)
    return _any_nonfinite(loss, looked_at)


def _any_nonfinite(loss: Tensor, tensors: list[Tensor]) -> Tensor:
    """1 where the largest element of a tensor is not finite, else 0: it is NaN where one is; any dtypes and devices."""
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
