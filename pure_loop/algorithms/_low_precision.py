"""Normalizations in the precision of autocast, which autocast itself computes in float32 on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop._internal.records import set_class
from pure_loop.algorithms._surgery import LayerFilter, with_layers


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


_CLASSES: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "low_precision_layernorm": {nn.LayerNorm: LowPrecisionLayerNorm, nn.RMSNorm: LowPrecisionRMSNorm},
    "low_precision_groupnorm": {nn.GroupNorm: LowPrecisionGroupNorm},
}


def with_low_precision(
    module: nn.Module, where: str, only: LayerFilter | None, exclude: LayerFilter | None
) -> nn.Module:
    """A copy of a module; its normalizations, those of the algorithm ``where``, compute in the precision of autocast.

    Raises:
        ModelError: there is none.
        ArgumentTypeError: not a module, or a filter that is no function.
    """
    classes = _CLASSES[where]

    def change(name: str, layer: nn.Module) -> bool | str:
        cls = type(layer)
        if cls in classes.values():
            return f"{name} is a {cls.__name__} already"
        if cls in classes:
            set_class(layer, classes[cls])
            return True
        return isinstance(layer, tuple(classes)) and f"{name} is a {cls.__name__}, a subclass"

    serves = " and ".join(f"nn.{cls.__name__}" for cls in classes)
    return with_layers(module, change, where, serves, only, exclude)
