"""Small convolutions as matrix products.

What oneDNN adds to the arithmetic of a convolution is the same for a small one as for a large one: to choose a kernel,
and to lay out weights as that likes them, forward and twice backward. Of small images it is half the time. Written as
a product, with a row for each place that the kernel is laid on, and in the row what it is laid on (im2col; Chellapilla,
Puri and Simard, 2006), a convolution is one call of BLAS, the rows are made together with what comes before them, and
those of the forward are there in the backward. Rows that a processor's cache can't hold cost more than they bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Products"]

_aten: Any = torch.ops.aten
_onednn: Any = torch.backends.mkldnn

# Measured (docs/compile.md): with so many numbers in all rows and fewer, products are quicker. Rows are copied a vector
# at a time where channels of one pixel fill it; with other numbers of channels they take longer than oneDNN does, but
# for a single one and a small kernel.
MOST_NUMBERS, MOST_NUMBERS_OF_ONE = 3 * 2**17, 3 * 2**16
_VECTOR = 16
_MOST_TAPS, _MOST_TAPS_OF_ONE = 25, 9


class Products:
    """The convolutions of one graph that are written as products.

    The methods take what torch's operations do; None: it is to stay a convolution.
    """

    def __init__(self) -> None:
        # What a backward asks for a second time, by the images, which are held so that no others take their place.
        self._rows: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def convolution(self, images: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor | None:
        """``(N, C, H, W)`` by ``(O, C, KH, KW)`` as ``(N, O, OH, OW)``, with the channels last in memory."""
        stride, padding = map(_of_both, geometry[:2])
        if not _pays(images, weight, stride, padding, *geometry[2:]):
            return None
        rows, kernels = self._rows_of(images, weight, stride, padding), _as_rows(weight).t()
        found = torch.mm(rows, kernels) if bias is None else torch.addmm(bias, rows, kernels)
        return found.view(len(images), *_places(images, weight, stride, padding), len(weight)).permute(0, 3, 1, 2)

    def backward(
        self, gradient: Tensor, images: Tensor, weight: Tensor, bias_sizes: Any, *geometry: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """The gradients of images, weight and bias, as far as they are wanted: the last of ``geometry`` says which."""
        (stride, padding), wanted = map(_of_both, geometry[:2]), geometry[-1]
        if not _pays(images, weight, stride, padding, *geometry[2:-1]):
            return None
        out, channels, *kernel = weight.shape
        flat = gradient.permute(0, 2, 3, 1).reshape(-1, out)
        of_images = of_weight = of_bias = None
        if wanted[0]:
            laid_on = torch.mm(flat, _as_rows(weight)).view(len(images), *gradient.shape[2:], *kernel, channels)
            of_images = _put_back(laid_on, images, stride, padding)
        if wanted[1]:
            product = torch.mm(flat.t(), self._rows_of(images, weight, stride, padding))
            of_weight = product.view(out, *kernel, channels).permute(0, 3, 1, 2)
        if wanted[2]:
            of_bias = flat.sum(0)
        return of_images, of_weight, of_bias

    def _rows_of(self, images: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
        """``(N * OH * OW, KH * KW * C)``."""
        high, wide = weight.shape[2:]
        key = (id(images), high, wide, *stride, *padding)
        if key not in self._rows:
            pixels = images.permute(0, 2, 3, 1)
            if any(padding):
                up, left = padding
                pixels = _aten.constant_pad_nd(pixels, [0, 0, left, left, up, up], 0.0)
            laid_on = pixels.unfold(1, high, stride[0]).unfold(2, wide, stride[1])
            rows = laid_on.permute(0, 1, 2, 4, 5, 3).reshape(-1, high * wide * images.shape[1])
            self._rows[key] = images, rows
        return self._rows[key][1]


def _pays(
    images: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether a product is known to be quicker."""
    if transposed or groups != 1 or any(each != 1 for each in dilation):
        return False
    if not all(each.is_cpu and each.dtype is torch.float32 and each.ndim == 4 for each in (images, weight)):
        return False
    # What it is set to round to holds for products, and has a setting of its own for convolutions.
    if _onednn.matmul.fp32_precision not in ("none", "ieee"):
        return False
    channels, taps = images.shape[1], weight.shape[2] * weight.shape[3]
    most_taps, most = (_MOST_TAPS_OF_ONE, MOST_NUMBERS_OF_ONE) if channels == 1 else (_MOST_TAPS, MOST_NUMBERS)
    if taps > most_taps or (channels != 1 and channels % _VECTOR):
        return False
    high, wide = _places(images, weight, stride, padding)
    return 0 < len(images) * high * wide * taps * channels <= most


def _of_both(values: Sequence[int]) -> list[int]:
    """Of height and width, for which one number may stand."""
    return list(values) * (2 // len(values))


def _places(images: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> tuple[int, int]:
    """OH and OW."""
    high, wide = (
        (size + 2 * more - kernel) // step + 1
        for size, kernel, step, more in zip(images.shape[2:], weight.shape[2:], stride, padding, strict=True)
    )
    return high, wide


def _as_rows(weight: Tensor) -> Tensor:
    """``(O, KH * KW * C)``."""
    return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)


def _put_back(laid_on: Tensor, images: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """``(N, OH, OW, KH, KW, C)`` added up where each number was taken from (col2im), like ``images``."""
    count, channels, *size = images.shape
    high, wide = (each + 2 * more for each, more in zip(size, padding, strict=True))
    rows, columns = laid_on.shape[1:3]
    total: Any = 0
    for i in range(laid_on.shape[3]):
        lines: Any = 0
        for j in range(laid_on.shape[4]):
            empty = laid_on.new_zeros(count, rows, wide, channels)
            end = j + stride[1] * (columns - 1) + 1
            lines = lines + _aten.slice_scatter(empty, laid_on[:, :, :, i, j], 2, j, end, stride[1])
        empty = laid_on.new_zeros(count, high, wide, channels)
        end = i + stride[0] * (rows - 1) + 1
        total = total + _aten.slice_scatter(empty, lines, 1, i, end, stride[0])
    up, left = padding
    found: Tensor = total[:, up : up + size[0], left : left + size[1]].permute(0, 3, 1, 2)
    return found
