"""Images of a batch: where they are, boxes in them, and operations for augmentation with a strength for each image.

Images of operations are floats from 0 to 255, (n, channels, height, width). Boxes are masks, each operation computes
all images of a batch, and the choice between operations is a selection, so that nothing waits for the device.
Operations are those of Pillow's ``ImageOps`` and ``ImageEnhance``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pure_loop._internal.pytree import Batch
from pure_loop._internal.weights import has_numbers
from pure_loop.errors import DataError
from pure_loop.lens import BatchKey, part_of
from pure_loop.random import generator
from pure_loop.state import State

Normalization: TypeAlias = float | Sequence[float] | None
"""What images were normalized with: a number, or one for each channel."""


def image_of(batch: Batch, key: BatchKey, where: str, *others: str, dims: int | None = 4) -> Tensor:
    """The inputs of a batch; ``others`` are arguments that an error names besides ``input_key``.

    Raises:
        DataError: they are no tensor, or no images, (n, channels, height, width).
    """
    inputs = part_of(batch, key, where, "input_key", *others)
    if not isinstance(inputs, Tensor):
        raise DataError(
            f"{where}: the inputs are {type(inputs).__name__}, not a tensor. Say where in a batch they are: "
            f'{where}(input_key="pixel_values"), or a pl.Lens(get, put).'
        )
    if dims is not None and inputs.ndim != dims:
        raise DataError(
            f"{where}: the inputs have shape {tuple(inputs.shape)}, and images are (n, channels, height, width). Say "
            f'where in a batch they are: {where}(input_key="pixel_values").'
        )
    return inputs


def box_mask(height: int, width: int, rows: Tensor, columns: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Which pixels of an image lie in a box; what of a box lies outside is cut off.

    Args:
        height, width: of the image, in pixels.
        rows, columns: of the box, in pixels, integers, (...).
        row, column: its centre, integers, (...): of an even number of rows the upper one of the lower half.

    Returns:
        (..., height, width), bool.

    >>> two = torch.tensor(2)
    >>> box_mask(2, 4, two, two, torch.tensor(0), torch.tensor(3)).long()
    tensor([[0, 0, 1, 1],
            [0, 0, 0, 0]])
    """

    def inside(length: int, size: Tensor, centre: Tensor) -> Tensor:
        place = torch.arange(length, device=size.device)
        start = (centre - size // 2).unsqueeze(-1)
        return (place >= start) & (place < start + size.unsqueeze(-1))

    return inside(height, rows, row).unsqueeze(-1) & inside(width, columns, column).unsqueeze(-2)


def centres(
    path: tuple[int | str, ...], state: State, shape: tuple[int, ...], length: int, size: Tensor, uniform: bool
) -> Tensor:
    """Drawn centres of boxes along one dimension, integers, of the shape ``shape``.

    Args:
        path: where they are drawn, for the seed.
        length: of the image, in pixels.
        size: of the box, in pixels.
        uniform: draw from all places at which the box covers a pixel, so that each pixel is covered as often as
            another; else from the pixels, so that those at the edge are covered less often.
    """
    random = generator(state.seed, *path, device=state.device)
    drawn = torch.rand(
        shape, dtype=torch.float64 if state.device.type == "cpu" else None, generator=random, device=state.device
    )
    if not uniform:
        return (drawn * length).long().clamp(max=length - 1)
    first = size // 2 - size + 1
    return first + torch.minimum((drawn * (length + size - 1)).long(), length + size - 2)


Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


def _by_image(value: Tensor) -> Tensor:
    return value.view(-1, 1, 1, 1)


def _grey(pixels: Tensor) -> Tensor:
    """(n, 1, height, width): luminance where there are three channels, else their mean."""
    if pixels.shape[1] == 3:
        return 0.299 * pixels[:, :1] + 0.587 * pixels[:, 1:2] + 0.114 * pixels[:, 2:]
    return pixels.mean(1, keepdim=True)


def _blended(pixels: Tensor, base: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Away from a base, or towards it: by a factor of 1 +- 0.9."""
    factor = _by_image(1 + 0.9 * level * sign)
    return (base + factor * (pixels - base)).clamp(0, 255)


def _identity(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return pixels


def _autocontrast(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """The values of each channel from 0 to 255."""
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    spread = high - low
    stretched = (pixels - low) * (255.0 / spread.clamp(min=1e-6))
    return torch.where(spread > 0, stretched, pixels).clamp(0, 255)


def _equalize(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Each value of a channel as often as any other, by the table of Pillow."""
    n, channels, height, width = pixels.shape
    values = pixels.round().long().clamp(0, 255).view(n * channels, -1)
    counts = torch.zeros(n * channels, 256, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(1, values, torch.ones_like(values))
    largest = counts.gather(1, values.amax(1, keepdim=True))
    step = (height * width - largest) // 255
    before = counts.cumsum(1) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    result = table.gather(1, values).to(pixels.dtype).view(pixels.shape)
    return torch.where((step > 0).view(n, channels, 1, 1), result, pixels)


def _solarize(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    stays = (pixels < _by_image(255 * (1 - level))) | _by_image(level == 0)
    return torch.where(stays, pixels, 255 - pixels)


def _color(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return _blended(pixels, _grey(pixels), level, sign)


def _posterize(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Fewer bits: from 8 to 4."""
    size = torch.exp2(torch.round(4 * _by_image(level)))
    return torch.where(size > 1, (pixels.round() / size).floor() * size, pixels)


def _contrast(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return _blended(pixels, _grey(pixels).mean((1, 2, 3), keepdim=True), level, sign)


def _brightness(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return _blended(pixels, torch.zeros_like(pixels), level, sign)


def _sharpness(pixels: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    channels = pixels.shape[1]
    kernel = torch.ones(3, 3, dtype=pixels.dtype, device=pixels.device)
    kernel[1, 1] = 5.0
    kernel = (kernel / 13.0).expand(channels, 1, 3, 3)
    smooth = pixels.clone()
    if min(pixels.shape[2:]) > 2:  # what is at an edge has no neighbours, and stays
        smooth[:, :, 1:-1, 1:-1] = functional.conv2d(pixels, kernel, groups=channels)
    return _blended(pixels, smooth, level, sign)


OPERATIONS: dict[str, Operation | None] = {
    "identity": _identity,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "solarize": _solarize,
    "posterize": _posterize,
    "color": _color,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
    # One grid for all images that drew one of them.
    "rotate": None,
    "shear_x": None,
    "shear_y": None,
    "translate_x": None,
    "translate_y": None,
}
"""By their names; those that move pixels have no function of their own."""

GEOMETRIC = tuple(name for name, function in OPERATIONS.items() if function is None)

SAFE = tuple(name for name in OPERATIONS if name not in ("color", "contrast", "brightness", "sharpness"))
"""Without those that images of ImageNet-C, a test of robustness, were made by."""


def _moved(pixels: Tensor, names: Sequence[str], choice: Tensor, level: Tensor, sign: Tensor, fill: float) -> Tensor:
    """Images turned, sheared and shifted by one grid; what comes from outside has the value ``fill``."""
    height, width = pixels.shape[2:]
    amount = level * sign

    def of(name: str, most: float) -> Tensor:
        return (
            torch.where(choice == names.index(name), most * amount, 0.0) if name in names else torch.zeros_like(level)
        )

    angle = of("rotate", math.radians(30.0))
    cosine, sine = angle.cos(), angle.sin()
    # From places in the result to places in the image, in units of half a side.
    ratio = height / width
    rows = [
        torch.stack([cosine, sine * ratio + of("shear_x", 0.3) * ratio, of("translate_x", 0.9)], 1),
        torch.stack([-sine / ratio + of("shear_y", 0.3) / ratio, cosine, of("translate_y", 0.9)], 1),
    ]
    grid = functional.affine_grid(torch.stack(rows, 1).to(pixels.dtype), list(pixels.shape), align_corners=False)
    moved = functional.grid_sample(pixels - fill, grid, "bilinear", "zeros", align_corners=False) + fill
    # Where nothing moves, not even by rounding.
    return torch.where(_by_image(amount != 0), moved, pixels)


def operated(
    pixels: Tensor, names: Sequence[str], choice: Tensor, level: Tensor, sign: Tensor, fill: float = 0.0
) -> Tensor:
    """Images, each with one operation.

    Args:
        pixels: (n, channels, height, width), floats from 0 to 255.
        names: of the operations that there are.
        choice: the index of the operation of each image, (n,), int64.
        level: its strength, from 0 to 1, (n,), of the dtype of ``pixels``.
        sign: 1 or -1, (n,): the direction of those that have one.
        fill: the value of pixels that come from outside.

    Returns:
        Of the shape and dtype of ``pixels``.
    """
    result = pixels
    for number, name in enumerate(names):
        function = OPERATIONS[name]
        if function is not None and function is not _identity:
            result = torch.where(_by_image(choice == number), function(pixels, level, sign), result)
    geometric = [number for number, name in enumerate(names) if name in GEOMETRIC]
    if geometric:
        moves = torch.zeros_like(choice, dtype=torch.bool)
        for number in geometric:
            moves = moves | (choice == number)
        moved = _moved(pixels, names, choice, torch.where(moves, level, 0.0), sign, fill)
        result = torch.where(_by_image(moves), moved, result)
    return result


def as_pixels(images: Tensor, mean: Normalization, std: Normalization, where: str, *, checks: bool) -> Tensor:
    """Images as floats from 0 to 255.

    Args:
        images: (n, channels, height, width): uint8; or floats from 0 to 1, or what ``mean`` was subtracted from and
            then divided by ``std``.
        checks: whether to compare the values with that range, which waits for the device.

    Raises:
        DataError: images of another dtype or number of dimensions, or out of range.
    """
    if images.ndim != 4 or not (images.dtype is torch.uint8 or images.is_floating_point()):
        raise DataError(
            f"{where}: the images have shape {tuple(images.shape)} and dtype {images.dtype}, and (n, channels, height, "
            "width) of uint8, or of floats from 0 to 1, is needed."
        )
    if images.dtype is torch.uint8:
        return images.float()
    values = images.to(torch.promote_types(images.dtype, torch.float32))
    if std is not None:
        values = values * _column(std, values)
    if mean is not None:
        values = values + _column(mean, values)
    if checks and has_numbers(values) and bool((values.amin() < -1e-3) | (values.amax() > 1 + 1e-3)):
        raise DataError(
            f"{where}: the images have values from {float(values.amin()):.3g} to {float(values.amax()):.3g}, and "
            f"floats from 0 to 1 are needed. Say what they were normalized with, {where}(mean=, std=), or give uint8."
        )
    return (values * 255.0).clamp(0, 255)


def from_pixels(pixels: Tensor, images: Tensor, mean: Normalization, std: Normalization, *, before: Tensor) -> Tensor:
    """What :func:`as_pixels` read, in the dtype and normalization of ``images``.

    Pixels that are those of ``before``, which it gave, are those of ``images``, bit for bit.
    """
    if images.dtype is torch.uint8:
        return pixels.round().clamp(0, 255).to(torch.uint8)
    values = pixels / 255.0
    if mean is not None:
        values = values - _column(mean, values)
    if std is not None:
        values = values / _column(std, values)
    return torch.where(pixels == before, images, values.to(images.dtype))


def _column(value: float | Sequence[float] | Tensor, like: Tensor) -> float | Tensor:
    """A number, or one for each channel, made on the device: a copy would wait for it."""
    if isinstance(value, Sequence):
        return torch.stack([like.new_full((), float(number)) for number in value]).view(-1, 1, 1)
    return value.to(like).view(-1, 1, 1) if isinstance(value, Tensor) else float(value)
