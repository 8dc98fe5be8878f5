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

from collections.abc import Iterator
from typing import Annotated, TypeAlias, TypeGuard, cast

from torch import Tensor, nn
from torch.nn import functional

from pure_loop._internal.records import set_class
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import copied, surgery
from pure_loop.errors import ArgumentError, ModelError
from pure_loop.ranges import AtLeast, Flag, checked

__all__ = ["apply_blurpool", "blurpool"]

SERVES = "images"


Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
Pool: TypeAlias = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d
_CONV, _POOL = (nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGES = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
_MAXIMA = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}


def blur(images: Tensor, stride: tuple[int, ...], filtered: tuple[int, ...] | None = None) -> Tensor:
    """Filter images with [1 2 1]/4 along each dimension that is strided, edges repeated, and take every s-th value.

    Args:
        images: (n, channels, height, width) or (channels, height, width); with one dimension, as sequences have, or
            three, as volumes have, in the place of two for a stride of so many.
        stride: of height and width.
        filtered: the stride for which to filter; default: ``stride``. A dimension with 1 is not filtered.

    Returns:
        Images of size ``ceil(height / stride[0])``, ``ceil(width / stride[1])``. Constant images keep their value.

    >>> import torch
    >>> blur(torch.tensor([[[0.0, 4.0, 0.0, 0.0]]]), (1, 2))
    tensor([[[1., 1.]]])
    >>> blur(torch.tensor([[0.0, 4.0, 0.0, 0.0]]), (2,))
    tensor([[1., 1.]])
    """
    # [1 2 1] is [1 1] twice, and the mean over what is inside repeats the edge. No filter tensor, no padded copy,
    # and a backward that is deterministic on every device, which that of reflection padding is not; but for volumes, of
    # which torch's mean on a GPU is not.
    average = _AVERAGES[len(stride)]
    kernel = tuple(2 if s > 1 else 1 for s in (stride if filtered is None else filtered))
    once = average(images, kernel, 1, tuple(k - 1 for k in kernel), count_include_pad=False)
    blurred: Tensor = average(once, kernel, stride)
    return blurred


class _BlurConv(nn.Module):
    """A strided convolution, filtered before (``blur_stride`` is then 1) or after; parameters as in torch's class."""

    filtered: tuple[int, ...]
    blur_stride: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        """(n, in_channels, ...) to what the convolution gave before it was replaced, in shape and dtype."""
        if max(self.blur_stride) == 1:
            output: Tensor = super().forward(blur(input, self.blur_stride, self.filtered))
            return output
        return blur(super().forward(input), self.blur_stride)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, filtered={self.filtered}, blur_stride={self.blur_stride}"


class BlurConv1d(_BlurConv, nn.Conv1d):
    """A strided convolution of sequences, filtered."""


class BlurConv2d(_BlurConv, nn.Conv2d):
    """A strided convolution of images, filtered."""


class BlurConv3d(_BlurConv, nn.Conv3d):
    """A strided convolution of volumes, filtered."""


class _BlurMaxPool(nn.Module):
    """A max pool of stride 1, filtered and then subsampled."""

    def forward(self, input: Tensor) -> Tensor:
        """(n, channels, ...) to what the pool gave before it was replaced, in shape and dtype."""
        assert isinstance(self, _POOL)
        stride = _sizes(self)
        largest: Tensor = _MAXIMA[len(stride)](input, self.kernel_size, 1, self.padding, self.dilation)
        return blur(largest, stride)


class BlurMaxPool1d(_BlurMaxPool, nn.MaxPool1d):
    """A max pool of sequences, filtered."""


class BlurMaxPool2d(_BlurMaxPool, nn.MaxPool2d):
    """A max pool of images, filtered."""


class BlurMaxPool3d(_BlurMaxPool, nn.MaxPool3d):
    """A max pool of volumes, filtered."""


_CONVS: dict[type[nn.Module], type[_BlurConv]] = {
    nn.Conv1d: BlurConv1d,
    nn.Conv2d: BlurConv2d,
    nn.Conv3d: BlurConv3d,
}
_POOLS: dict[type[nn.Module], type[_BlurMaxPool]] = {
    nn.MaxPool1d: BlurMaxPool1d,
    nn.MaxPool2d: BlurMaxPool2d,
    nn.MaxPool3d: BlurMaxPool3d,
}
_DIMENSIONS = {kind: count for kinds in (_CONVS, _POOLS) for count, kind in enumerate(kinds, 1)}


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
    pretrained weights fit. Replaced are layers of the class ``nn.Conv2d`` or ``nn.MaxPool2d`` itself, or
    that of one or three dimensions (subclasses have forwards of their own), with a stride above 1; not max pools with
    ``ceil_mode`` or ``return_indices``.

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
    clone = copied(module, "apply_blurpool")
    replaced = False
    for layer in list(clone.modules()):
        if replace_maxpools and _is_pool(layer):
            set_class(layer, _POOLS[type(layer)])
            replaced = True
        elif replace_convs and _is_conv(layer) and layer.in_channels >= min_channels:
            stride = _sizes(layer)
            ones = (1,) * len(stride)
            conv = set_class(layer, _CONVS[type(layer)])
            conv.filtered, conv.blur_stride = stride, ones
            if not blur_first:
                layer.stride, conv.blur_stride = ones, stride
            replaced = True
    if not replaced:
        result = "; ".join(_why_not(clone, replace_convs)) or "no layer that subsamples"
        raise ModelError(
            f"blurpool finds nothing to replace in {type(module).__name__}: {result}. It serves nn.Conv1d, 2d, 3d and "
            f"nn.MaxPool1d, 2d, 3d with a stride above 1, convolutions from min_channels={min_channels} input channels "
            "on: lower min_channels, or leave blurpool out."
        )
    return clone


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
    _refuse_neither(replace_convs, replace_maxpools)
    return surgery(apply_blurpool, **locals())


def _refuse_neither(replace_convs: bool, replace_maxpools: bool) -> None:
    if not (replace_convs or replace_maxpools):
        raise ArgumentError("blurpool: replace_convs and replace_maxpools are both False, so it would do nothing.")


def _sizes(layer: Conv | Pool) -> tuple[int, ...]:
    """The stride of a layer, of each dimension."""
    count = next(count for kind, count in _DIMENSIONS.items() if isinstance(layer, kind))
    stride = layer.stride
    return (stride,) * count if isinstance(stride, int) else tuple(stride) * (count if len(stride) == 1 else 1)


def _is_conv(layer: nn.Module) -> TypeGuard[Conv]:
    return type(layer) in _CONVS and max(_sizes(cast("Conv", layer))) > 1


def _is_pool(layer: nn.Module) -> TypeGuard[Pool]:
    if type(layer) not in _POOLS:
        return False
    pool = cast("Pool", layer)
    return max(_sizes(pool)) > 1 and not (pool.ceil_mode or pool.return_indices)


def _why_not(module: nn.Module, convs: bool) -> Iterator[str]:
    """Why layers that subsample were left as they are."""
    for name, layer in module.named_modules():
        if not isinstance(layer, (*_CONV, *_POOL)) or max(_sizes(layer)) == 1:
            continue
        kind = type(layer).__name__
        if isinstance(layer, _BlurConv | _BlurMaxPool):
            yield f"{name} is a {kind} already"
        elif _is_conv(layer):
            yield (f"{name} has {layer.in_channels} input channels" if convs else f"{name}: replace_convs is False")
        elif _is_pool(layer):
            yield f"{name}: replace_maxpools is False"
        elif type(layer) in _POOLS:
            yield f"{name} is a {kind} with ceil_mode or return_indices"
        else:
            yield f"{name} is a {kind}, a subclass"
