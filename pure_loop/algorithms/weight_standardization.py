"""Weight standardization: the filters of a convolution have mean 0 and variance 1 in each forward.

With the filter ``w`` of one output channel::

    w' = (w - mean(w)) / sqrt(var(w) + eps)        biased variance; https://arxiv.org/abs/1903.10520
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, cast

from torch import Tensor, nn
from torch.nn import functional

from pure_loop._internal.records import set_class
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import LayerFilter, chosen, copied, nothing_fits, surgery
from pure_loop.ranges import Above, AtLeast, checked

__all__ = ["apply_weight_standardization", "bake", "standardized", "weight_standardization"]

SERVES = "images"


def standardized(weight: Tensor, eps: float = 1e-10) -> Tensor:
    """Filters with mean 0 and variance 1.

    Args:
        weight: (output channels, ...), the filter of each along the other dimensions.
        eps: added to the variance.

    Returns:
        Of the shape and dtype of ``weight``.

    >>> import torch
    >>> standardized(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[-1.3416, -0.4472,  0.4472,  1.3416]])
    """
    dims = tuple(range(1, weight.ndim))
    centred = weight - weight.mean(dims, keepdim=True)
    scaled: Tensor = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    return scaled


class _Standardized(nn.Module):
    """The forward of a convolution with standardized filters; the parameter ``weight`` stays as it is."""

    standardization_eps: float

    def forward(self, input: Tensor) -> Tensor:
        """What the convolution computes, in shape and dtype."""
        layer = cast("nn.Conv2d", self)
        return _convolved(layer, input, standardized(layer.weight, self.standardization_eps))


class StandardizedConv1d(_Standardized, nn.Conv1d):
    """``nn.Conv1d`` with standardized filters."""


class StandardizedConv2d(_Standardized, nn.Conv2d):
    """``nn.Conv2d`` with standardized filters."""


class StandardizedConv3d(_Standardized, nn.Conv3d):
    """``nn.Conv3d`` with standardized filters."""


_CLASSES: dict[type[nn.Module], type[_Standardized]] = {
    nn.Conv1d: StandardizedConv1d,
    nn.Conv2d: StandardizedConv2d,
    nn.Conv3d: StandardizedConv3d,
}
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {cls: plain for plain, cls in _CLASSES.items()}
_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def _convolved(layer: nn.Conv2d, features: Tensor, weight: Tensor) -> Tensor:
    """The convolution of a layer with another weight."""
    convolve = _CONVOLVE[weight.ndim - 2]
    padding: str | tuple[int, ...] = layer.padding
    if layer.padding_mode != "zeros":
        pads: list[int] = []
        for number in reversed(range(weight.ndim - 2)):
            if padding == "same":
                total = layer.dilation[number] * (layer.kernel_size[number] - 1)
                pads += [total // 2, total - total // 2]
            else:
                pads += [0 if isinstance(padding, str) else padding[number]] * 2
        features, padding = functional.pad(features, pads, mode=layer.padding_mode), (0,) * (weight.ndim - 2)
    return convolve(features, weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)


@checked
def apply_weight_standardization(
    module: nn.Module,
    *,
    skip_last: Annotated[int, AtLeast(0)] = 0,
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
    eps: Annotated[float, Above(0)] = 1e-10,
) -> nn.Module:
    """A copy of a module with convolutions that standardize their filters; the module stays as it was.

    Names and values of parameters stay. Changed are layers of the class ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``
    itself, with filters of more than one weight. Layers that standardize already stay.

    Args:
        skip_last: so many convolutions stay, the last ones in the order in which the module defines them.
        only, exclude: functions of (name, layer): which convolutions are changed, and which are not.
        eps: added to the variance.

    Raises:
        ModelError: there is no such convolution; says what there is.
        ArgumentError: a number out of range.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> apply_weight_standardization(nn.Sequential(nn.Conv1d(3, 8, 3)))[0]
    StandardizedConv1d(3, 8, kernel_size=(3,), stride=(1,))
    """
    clone, reasons, layers = copied(module, "apply_weight_standardization"), [], []
    for name, layer in chosen(clone, only, exclude, "weight_standardization"):
        if type(layer) in _PLAIN:
            reasons.append(f"{name} is a {type(layer).__name__} already")
        elif type(layer) in _CLASSES:
            if cast("nn.Conv2d", layer).weight[0].numel() > 1:
                layers.append((name, layer))
            else:
                reasons.append(f"each filter of {name} is one weight")
        elif isinstance(layer, tuple(_CLASSES)):
            reasons.append(f"{name} is a {type(layer).__name__}, a subclass")
    count = max(0, len(layers) - skip_last)
    reasons += [f"{name} is one of the last {skip_last}" for name, _ in layers[count:]]
    if not count:
        raise nothing_fits(
            "weight_standardization",
            module,
            reasons,
            "nn.Conv1d, nn.Conv2d and nn.Conv3d with filters of more than one weight",
        )
    for _, layer in layers[:count]:
        set_class(layer, _CLASSES[type(layer)]).standardization_eps = eps
    return clone


def bake(module: nn.Module) -> nn.Module:
    """A copy of a module with plain convolutions and the standardized weights: for inference and export.

    >>> net = apply_weight_standardization(nn.Sequential(nn.Conv1d(3, 8, 3)))
    >>> bake(net)[0]
    Conv1d(3, 8, kernel_size=(3,), stride=(1,))
    """
    clone = copied(module, "bake")
    for layer in list(clone.modules()):
        if type(layer) in _PLAIN:
            conv = cast("nn.Conv2d", layer)
            eps = cast("_Standardized", layer).standardization_eps
            conv.weight = nn.Parameter(standardized(conv.weight.detach(), eps), conv.weight.requires_grad)
            del layer.standardization_eps
            set_class(layer, _PLAIN[type(layer)])
    return clone


@checked
def weight_standardization(
    *,
    skip_last: Annotated[int, AtLeast(0, typical=())] = 0,
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
    eps: Annotated[float, Above(0, typical=(1e-10, 1e-4))] = 1e-10,
    name: str = "weight_standardization",
) -> Algorithm:
    """Standardized filters in the convolutions of the model, put there at INIT.

    The module given to ``fit`` stays as it was; :func:`apply_weight_standardization` is the same for a module of your
    own, and :func:`bake` makes plain convolutions of the trained ones. Put a normalization of activations after them,
    as the paper does.

    Args:
        skip_last, only, exclude, eps: as in :func:`apply_weight_standardization`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range.
        ArgumentTypeError: a setting of another type.
        ModelError: in training, at INIT: there is no convolution with filters of more than one weight.

    >>> import torch, pure_loop as pl
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    >>> data = [(torch.ones(2, 1, 3, 3), torch.tensor([0, 1]))]
    >>> state = pl.run(pl.fit(net, data, loss=functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[weight_standardization()]))
    >>> type(state.module()[0]).__name__, type(bake(state.module())[0]).__name__
    ('StandardizedConv2d', 'Conv2d')
    """
    return surgery(apply_weight_standardization, **locals())
