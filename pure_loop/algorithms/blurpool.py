"""BlurPool: layers that subsample get a low-pass filter, so that shifting an image shifts the features.

A layer with stride s takes every s-th value, and what varies faster than that comes back as something else
(aliasing). Before the values are taken they go through the filter [1 2 1]/4 along each strided dimension::

    max pool            max of stride 1, filter, every s-th
    convolution         filter, convolution of stride s          blur_first
                        convolution of stride 1, filter, every s-th

https://arxiv.org/abs/1904.11486. Differences to the authors' code: edges are repeated instead of reflected, so
that images of any size pass; and ``blur_first``, which costs less, is the default for convolutions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Annotated, Any, cast

from torch import Tensor, nn
from torch.nn import functional

from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentError, ArgumentTypeError, ModelError
from pure_loop.event import Event
from pure_loop.ranges import AtLeast, Flag, checked
from pure_loop.state import State

__all__ = ["apply_blurpool", "blurpool"]

SERVES = "images"


def blur(images: Tensor, stride: tuple[int, int], filtered: tuple[int, int] | None = None) -> Tensor:
    """Filter images with [1 2 1]/4 along each dimension that is strided, edges repeated, and take every s-th value.

    Args:
        images: (n, channels, height, width) or (channels, height, width).
        stride: of height and width.
        filtered: the stride for which to filter; default: ``stride``. A dimension with 1 is not filtered.

    Returns:
        Images of size ``ceil(height / stride[0])``, ``ceil(width / stride[1])``. Constant images keep their value.

    >>> import torch
    >>> blur(torch.tensor([[[0.0, 4.0, 0.0, 0.0]]]), (1, 2))
    tensor([[[1., 1.]]])
    """
    # [1 2 1] is [1 1] twice, and the mean over what is inside repeats the edge. No filter tensor, no padded copy,
    # and a backward that is deterministic on every device, which that of reflection padding is not.
    kernel = tuple(2 if s > 1 else 1 for s in (stride if filtered is None else filtered))
    once = functional.avg_pool2d(images, kernel, 1, tuple(k - 1 for k in kernel), count_include_pad=False)
    return functional.avg_pool2d(once, kernel, stride)


class BlurConv2d(nn.Conv2d):
    """A strided convolution, filtered before (``blur_stride`` is then (1, 1)) or after; parameters as in ``Conv2d``."""

    filtered: tuple[int, int]
    blur_stride: tuple[int, int]

    def forward(self, input: Tensor) -> Tensor:
        """(n, in_channels, height, width) to what the convolution gave before it was replaced, in shape and dtype."""
        if self.blur_stride == (1, 1):
            return super().forward(blur(input, (1, 1), self.filtered))
        return blur(super().forward(input), self.blur_stride)

    def extra_repr(self) -> str:
        shape = cast("str", super().extra_repr())  # type: ignore[no-untyped-call]
        return f"{shape}, filtered={self.filtered}, blur_stride={self.blur_stride}"


class BlurMaxPool2d(nn.MaxPool2d):
    """A max pool of stride 1, filtered and then subsampled."""

    def forward(self, input: Tensor) -> Tensor:
        """(n, channels, height, width) to what the pool gave before it was replaced, in shape and dtype."""
        dense = functional.max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation)
        return blur(dense, _pair(self.stride))


@checked
def apply_blurpool(
    module: nn.Module,
    *,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: Annotated[int, AtLeast(1)] = 16,
) -> nn.Module:
    """A copy of a module in which strided convolutions and max pools are anti-aliased; the module stays as it was.

    Names and values of parameters and buffers, hooks, shapes of outputs and whether a module is shared stay as well, so
    pretrained weights fit. Replaced are layers whose class is ``nn.Conv2d`` or ``nn.MaxPool2d`` itself (subclasses
    have forwards of their own), with a stride above 1; not max pools with ``ceil_mode`` or ``return_indices``.

    Args:
        replace_convs: replace convolutions.
        replace_maxpools: replace max pools.
        blur_first: filter before a convolution, which keeps its stride; else the convolution has stride 1 and the
            filter comes after it, as in the paper, at stride^2 times the cost.
        min_channels: convolutions with fewer input channels stay; a first layer on images would lose detail.

    Raises:
        ModelError: nothing in the module could be replaced; says what was found.
        ArgumentError: both kinds are switched off, or a number out of range.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> apply_blurpool(nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)))[1]
    BlurMaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)
    """
    _refuse_neither(replace_convs, replace_maxpools)
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"apply_blurpool: {module!r} of type {type(module).__name__} is not a torch.nn.Module.")
    new = copy.deepcopy(module)
    replaced = False
    for layer in list(new.modules()):
        if replace_maxpools and _is_pool(layer):
            # Of another class, with all it had: names of parameters, hooks, modes and shared references stay.
            layer.__class__ = BlurMaxPool2d
            replaced = True
        elif replace_convs and _is_conv(layer) and cast("nn.Conv2d", layer).in_channels >= min_channels:
            conv = cast("BlurConv2d", layer)
            conv.__class__ = BlurConv2d
            conv.filtered, conv.blur_stride = _pair(conv.stride), (1, 1)
            if not blur_first:
                conv.stride, conv.blur_stride = (1, 1), conv.filtered
            replaced = True
    if not replaced:
        result = "; ".join(_why_not(new, replace_convs)) or "no layer that subsamples"
        raise ModelError(
            f"blurpool finds nothing to replace in {type(module).__name__}: {result}. It serves nn.Conv2d and "
            f"nn.MaxPool2d with a stride above 1, convolutions from min_channels={min_channels} input channels on: "
            "lower min_channels, or leave blurpool out."
        )
    return new


@checked
def blurpool(
    *,
    replace_convs: Annotated[bool, Flag(typical=())] = True,
    replace_maxpools: Annotated[bool, Flag(typical=())] = True,
    blur_first: bool = True,
    min_channels: Annotated[int, AtLeast(1, typical=(1, 1))] = 16,
    name: str = "blurpool",
) -> Algorithm:
    """Anti-aliasing filters in strided convolutions and max pools, put into the model at INIT.

    The module given to ``fit`` stays as it was; :func:`apply_blurpool` is the same for a module of your own. Put it
    before algorithms that change the model further.

    Args:
        replace_convs, replace_maxpools, blur_first, min_channels: as in :func:`apply_blurpool`.
        name: another one, if there are several.

    Raises:
        ArgumentError: both kinds are switched off, or a number out of range.
        ArgumentTypeError: a setting of another type.
        ModelError: in training, at INIT: nothing in the model could be replaced.

    >>> import torch, pure_loop as pl
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(2))
    >>> data = [(torch.ones(2, 3, 8, 8), torch.tensor([0, 1]))]
    >>> _ = net(data[0][0])
    >>> state = pl.run(pl.fit(net, data, loss=functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[blurpool()]))
    >>> type(state.module()[1]).__name__, type(net[1]).__name__
    ('BlurMaxPool2d', 'MaxPool2d')
    """
    settings: dict[str, Any] = {
        "replace_convs": replace_convs,
        "replace_maxpools": replace_maxpools,
        "blur_first": blur_first,
        "min_channels": min_channels,
    }
    _refuse_neither(replace_convs, replace_maxpools)

    def operate(state: State) -> State:
        return state.with_module(apply_blurpool(state.module(), **settings))

    return Algorithm(name, {Event.INIT: operate})


def _refuse_neither(replace_convs: bool, replace_maxpools: bool) -> None:
    if not (replace_convs or replace_maxpools):
        raise ArgumentError("blurpool: replace_convs and replace_maxpools are both False, so it would do nothing.")


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _is_conv(layer: nn.Module) -> bool:
    return type(layer) is nn.Conv2d and max(_pair(layer.stride)) > 1


def _is_pool(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.MaxPool2d and max(_pair(layer.stride)) > 1 and not (layer.ceil_mode or layer.return_indices)
    )


def _why_not(module: nn.Module, convs: bool) -> Iterator[str]:
    """Why layers that subsample were left as they are."""
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Conv2d | nn.MaxPool2d) or max(_pair(layer.stride)) == 1:
            continue
        kind = type(layer).__name__
        if isinstance(layer, BlurConv2d | BlurMaxPool2d):
            yield f"{name} is a {kind} already"
        elif _is_conv(layer):
            yield f"{name} has {layer.in_channels} input channels" if convs else f"{name}: replace_convs is False"
        elif _is_pool(layer):
            yield f"{name}: replace_maxpools is False"
        elif type(layer) is nn.MaxPool2d:
            yield f"{name} is a MaxPool2d with ceil_mode or return_indices"
        else:
            yield f"{name} is a {kind}, a subclass"
