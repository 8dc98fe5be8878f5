"""Normalizations in the precision of autocast, which autocast itself computes in float32 on a GPU."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop.algorithms._surgery import LayerFilter, chosen, copied, nothing_fits

__all__ = ["KINDS", "with_low_precision"]


def _dtype_at(tensor: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of a tensor; None: it is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` in the precision of autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) to the same shape; of the dtype of autocast where that is on."""
        dtype = _dtype_at(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
            return functional.layer_norm(input.to(dtype), list(self.normalized_shape), weight, bias, self.eps)


class LowPrecisionRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` in the precision of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., *normalized_shape) to the same shape; of the dtype of autocast where that is on."""
        dtype = _dtype_at(x)
        if dtype is None:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            weight = _cast(self.weight, dtype)
            return functional.rms_norm(x.to(dtype), list(self.normalized_shape), weight, self.eps)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` in the precision of autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """(n, C, ...) to the same shape; of the dtype of autocast where that is on."""
        dtype = _dtype_at(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
            return functional.group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)


KINDS: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "layer": {nn.LayerNorm: LowPrecisionLayerNorm, nn.RMSNorm: LowPrecisionRMSNorm},
    "group": {nn.GroupNorm: LowPrecisionGroupNorm},
}


def with_low_precision(
    module: nn.Module, kind: str, where: str, only: LayerFilter | None, exclude: LayerFilter | None
) -> nn.Module:
    """A copy of a module whose normalizations of a kind compute in the precision of autocast.

    Raises:
        ModelError: there is none.
        ArgumentTypeError: not a module, or a filter that is no function.
    """
    classes, new = KINDS[kind], copied(module, f"apply_{where}")
    reasons, changed = [], False
    for name, layer in chosen(new, only, exclude, where):
        if type(layer) in classes.values():
            reasons.append(f"{name} is a {type(layer).__name__} already")
        elif type(layer) in classes:
            # Of another class, with all it had: names of parameters, hooks, modes and shared references stay.
            cast("Any", layer).__class__ = classes[type(layer)]
            changed = True
        elif isinstance(layer, tuple(classes)):
            reasons.append(f"{name} is a {type(layer).__name__}, a subclass")
    if not changed:
        raise nothing_fits(where, module, reasons, " and ".join(f"nn.{cls.__name__}" for cls in classes))
    return new
