"""Operations on images, against those of Pillow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

import pure_loop as pl
from pure_loop.algorithms._images import GEOMETRIC, OPERATIONS, as_pixels, from_pixels, operated
from tests.support.runs import noise

NAMES = tuple(OPERATIONS)
LEVELS = (0.0, 0.3, 0.5, 1.0)


def pictures(count: int = 2) -> torch.Tensor:
    """Smooth ones, whose histograms are not flat."""
    place = torch.linspace(0, 3, 24)
    waves = torch.stack([torch.sin(place[:, None] * k + place * (3 - k)) for k in range(3)])
    base = (waves * 100 + 110 + torch.randn(count, 3, 24, 24, generator=noise()) * 10).clamp(0, 255)
    return base.to(torch.uint8)


def one(name: str, images: torch.Tensor, level: float, sign: float = 1.0) -> torch.Tensor:
    n = len(images)
    choice = torch.full((n,), NAMES.index(name))
    pixels = as_pixels(images, None, None, "f", checks=True)
    pixels = operated(pixels, NAMES, choice, torch.full((n,), level), torch.full((n,), sign))
    return from_pixels(pixels, images, None, None, before=pixels)


def by_pillow(function: Callable[[Any], Any], images: torch.Tensor) -> torch.Tensor:
    results = [np.asarray(function(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images]
    return torch.from_numpy(np.stack(results)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("color", ImageEnhance.Color),
        ("contrast", ImageEnhance.Contrast),
        ("brightness", ImageEnhance.Brightness),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
def test_blends(name: str, enhance: Any, level: float, sign: float) -> None:
    """Up to what Pillow cuts off: it rounds the base and then the result."""
    factor = 1 + 0.9 * level * sign
    wanted = by_pillow(lambda image: enhance(image).enhance(factor), pictures())
    difference = (one(name, pictures(), level, sign).int() - wanted.int()).abs()
    assert difference.max() <= 2


@pytest.mark.parametrize(
    ("name", "level", "function"),
    [
        ("equalize", 0.3, ImageOps.equalize),
        ("posterize", 0.0, lambda image: image),
        ("posterize", 0.5, lambda image: ImageOps.posterize(image, 6)),
        ("posterize", 1.0, lambda image: ImageOps.posterize(image, 4)),
        ("solarize", 0.0, lambda image: image),
        ("solarize", 0.5, lambda image: ImageOps.solarize(image, 127.5)),
        ("solarize", 1.0, lambda image: ImageOps.solarize(image, 0)),
        ("identity", 1.0, lambda image: image),
    ],
)
def test_tables(name: str, level: float, function: Any) -> None:
    result = one(name, pictures(), level)
    assert torch.equal(result, by_pillow(function, pictures()))


def test_contrast_of_each_channel() -> None:
    wanted = by_pillow(ImageOps.autocontrast, pictures())
    assert (one("autocontrast", pictures(), 0.5).int() - wanted.int()).abs().max() <= 1
    flat = torch.full((1, 3, 4, 4), 7, dtype=torch.uint8)
    assert torch.equal(one("autocontrast", flat, 1.0), flat)
    assert torch.equal(one("equalize", flat, 1.0), flat)


def test_numbers_of_the_paper() -> None:
    pixel = torch.tensor([200, 90], dtype=torch.uint8).view(2, 1, 1, 1)
    assert one("posterize", pixel, 1.0).flatten().tolist() == [192, 80]
    assert one("solarize", pixel, 127 / 255).flatten().tolist() == [55, 90]


@pytest.mark.parametrize("name", GEOMETRIC)
@pytest.mark.parametrize("shape", [(24, 24), (16, 32)])
def test_pixels_move_by_the_strength(name: str, shape: tuple[int, int]) -> None:
    height, width = shape
    assert torch.equal(one(name, pictures(), 0.0), pictures())
    place_y, place_x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    # A blob, whose centre is measured.
    y0, x0 = height * 0.55, width * 0.6
    blob = 250 * torch.exp(-((place_y - y0) ** 2 + (place_x - x0) ** 2) / 4)
    images = blob.expand(1, 1, height, width).to(torch.uint8)
    level = 0.3
    result = one(name, images, level)[0, 0].double()
    centre = torch.stack([(result * p).sum() / result.sum() for p in (place_y, place_x)])
    dy, dx = y0 - (height - 1) / 2, x0 - (width - 1) / 2
    angle = torch.tensor(0.3 * torch.pi / 6).double()
    moved = {
        "rotate": (dy * angle.cos() + dx * angle.sin(), dx * angle.cos() - dy * angle.sin()),
        "shear_x": (dy, dx - 0.09 * dy),
        "shear_y": (dy - 0.09 * dx, dx),
        "translate_x": (dy, dx - 0.135 * width),
        "translate_y": (dy - 0.135 * height, dx),
    }[name]
    wanted = torch.tensor([float(moved[0]) + (height - 1) / 2, float(moved[1]) + (width - 1) / 2]).double()
    torch.testing.assert_close(centre, wanted, atol=0.25, rtol=0)


def test_each_image_has_its_own() -> None:
    images = pictures(len(NAMES))
    pixels = as_pixels(images, None, None, "f", checks=True)
    level = torch.linspace(0.1, 1, len(NAMES))
    together = operated(pixels, NAMES, torch.arange(len(NAMES)), level, torch.ones(len(NAMES)))
    for number in range(len(NAMES)):
        rows = slice(number, number + 1)
        alone = operated(pixels[rows], NAMES, torch.tensor([number]), level[rows], torch.ones(1))
        torch.testing.assert_close(together[rows], alone)


def test_dtypes_and_normalization() -> None:
    floats = pictures().float() / 255
    normalized = (floats - 0.5) / 0.25
    half: Any = (normalized.half(), (0.5,) * 3, [0.25] * 3)
    for images, mean, std in ((floats, None, None), (normalized, 0.5, 0.25), half):
        pixels = as_pixels(images, mean, std, "f", checks=True)
        torch.testing.assert_close(pixels, pictures().float(), atol=0.1, rtol=0)
        back = from_pixels(pixels, images, mean, std, before=pixels)
        assert torch.equal(back, images)
        back = from_pixels(pixels, images, mean, std, before=pixels + 1)
        assert back.dtype is images.dtype
        torch.testing.assert_close(back, images, atol=2e-3, rtol=1e-3)
    with pytest.raises(pl.DataError, match=r"values from .* to .*Say what they were normalized with, f\(mean=, std=\)"):
        as_pixels(normalized, None, None, "f", checks=True)
    for wrong in (torch.zeros(3, 4, 4), torch.zeros(1, 3, 4, 4, dtype=torch.int64)):
        with pytest.raises(pl.DataError, match=r"of uint8, or of floats from 0 to 1, is needed"):
            as_pixels(wrong, None, None, "f", checks=True)


@pytest.mark.parametrize("level", [0.25, 0.5, 1.0])
def test_floats_have_the_steps_of_bytes(level: float) -> None:
    """Also where denormalized values lie a little below a whole number."""
    bytes_ = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    mean, std = 0.4734, 0.2515
    normalized = (bytes_.float() / 255 - mean) / std
    pixels = as_pixels(normalized, mean, std, "f", checks=True)
    choice = torch.tensor([NAMES.index("posterize")])
    result = operated(pixels, NAMES, choice, torch.tensor([level]), torch.ones(1))
    torch.testing.assert_close(result, one("posterize", bytes_, level).float(), atol=0.01, rtol=0)
