"""RandAugment: a few random operations on each image, all of one strength.

Of ``operations`` operations, drawn for each image from 14 with the same probability, each has the strength M of 30::

    rotate           by up to 30 degrees     color, contrast,        blended by a factor of
    shear x, y       by up to 0.3            brightness, sharpness   1 +- 0.9 M / 30
    translate x, y   by up to 0.45 of a side posterize               to 8 - 4 M / 30 bits
    autocontrast, equalize, identity         solarize                above 255 (1 - M / 30)

https://arxiv.org/abs/1909.13719
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from pure_loop._internal.processes import data_rank
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part
from pure_loop.algorithms._images import OPERATIONS, SAFE, Normalization, as_pixels, from_pixels, image_of, operated
from pure_loop.event import Event
from pure_loop.lens import BatchKey, with_part
from pure_loop.random import generator as generator_of
from pure_loop.ranges import AtLeast, Index, Within, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["randaugment", "randaugment_images"]

SERVES = "images from 0 to 1"

EXPECTED_FAILURES = dict.fromkeys(["rank_agreement", "world_size"], "each rank draws for its own samples")


def _augmented(
    pixels: Tensor,
    level: float | Tensor,
    count: int,
    names: Sequence[str],
    signed: bool,
    per_sample: bool,
    fill: float,
    random: torch.Generator | None,
) -> Tensor:
    n, device = len(pixels), pixels.device
    shape = (n,) if per_sample else (1,)
    strength = (torch.zeros((), dtype=pixels.dtype, device=device) + level).clamp(max=1.0).expand(n)
    for _ in range(count):
        choice = torch.randint(len(names), shape, generator=random, device=device).expand(n)
        coin = torch.randint(2, shape, generator=random, device=device).expand(n)
        sign = (2 * coin - 1 if signed else torch.ones_like(coin)).to(pixels.dtype)
        pixels = operated(pixels, names, choice, strength, sign, fill)
    return pixels


@checked
def randaugment_images(
    images: Tensor,
    operations: Annotated[int, AtLeast(1)] = 2,
    magnitude: Annotated[float, AtLeast(0)] = 9,
    *,
    bins: Annotated[int, AtLeast(2)] = 31,
    signs: Literal["random", "positive"] = "random",
    set: Literal["all", "safe"] = "all",
    per_sample: bool = True,
    fill: float = 0.0,
    mean: Normalization = None,
    std: Normalization = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Images with random operations, for a dataset or a loop of one's own.

    Args:
        images: (n, channels, height, width): uint8, or floats from 0 to 1.
        operations, magnitude, bins, signs, set, per_sample, fill, mean, std: as in :func:`randaugment`.
        generator: what draws, on the device of the images; None: torch's global generator.

    Returns:
        Of the shape and dtype of ``images``.

    Raises:
        ArgumentError: a number out of range.
        DataError: images of another dtype, number of dimensions or range.

    >>> images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    >>> randaugment_images(images).dtype
    torch.uint8
    """
    names = tuple(OPERATIONS) if set == "all" else SAFE
    pixels = as_pixels(images, mean, std, "randaugment", checks=True)
    level = magnitude / (bins - 1)
    changed = _augmented(pixels, level, operations, names, signs == "random", per_sample, fill, generator)
    return from_pixels(changed, images, mean, std, before=pixels)


@checked
def randaugment(
    operations: Annotated[int, AtLeast(1, typical=(1, 2))] = 2,
    magnitude: Annotated[Strength, Within(0, 30, typical=(1.0, 30.0))] = 9,
    *,
    bins: Annotated[int, AtLeast(2, typical=())] = 31,
    signs: Literal["random", "positive"] = "random",
    set: Literal["all", "safe"] = "all",
    per_sample: bool = True,
    fill: float = 0.0,
    mean: Normalization = None,
    std: Normalization = None,
    input_key: Annotated[BatchKey, Index()] = 0,
    name: str = "randaugment",
) -> Algorithm:
    """RandAugment of training images on their device, at BEFORE_TRAIN_BATCH; evaluation sees images as they are.

    All images of a batch go through each operation and take the result of their own, so that nothing waits for the
    device.

    Args:
        operations: how many an image goes through.
        magnitude: their strength, from 0 to 30; a number, or a schedule.
        bins: the number of strengths, counted from 0: a magnitude of ``bins - 1`` is the largest.
        signs: ``"random"``: operations with a direction go either way; ``"positive"``: one way.
        set: ``"all"`` operations; ``"safe"``: without color, contrast, brightness and sharpness.
        per_sample: draw operations for each image, and not for the batch.
        fill: the value of pixels that come from outside of an image, from 0 to 255.
        mean, std: what was subtracted from the pixels and what they were divided by: numbers, or one for each channel.
            Without them images are uint8, or floats from 0 to 1; the first batch is compared with that range.
        input_key: where in a batch its images, (n, channels, height, width), are: an index, a key or a
            :class:`pure_loop.Lens`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range.
        ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without images there, of another dtype, or out of range.

    >>> import pure_loop as pl
    >>> images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    >>> state = pl.State.create(torch.nn.Linear(2, 1)).replace(batch=(images, torch.zeros(4)))
    >>> randaugment()(state).batch[0].shape
    torch.Size([4, 3, 8, 8])
    """
    names = tuple(OPERATIONS) if set == "all" else SAFE

    @by_part
    def augment(state: State) -> State:
        images = image_of(state.batch, input_key, "randaugment")
        pixels = as_pixels(images, mean, std, "randaugment", checks=not state.timestamp.batch)
        path = (state.timestamp.batch, *((data_rank(),) if per_sample else ()))
        random = generator_of(state.seed, name, *path, device=images.device)
        level = strength_at(magnitude, state.timestamp) / (bins - 1)
        changed = _augmented(pixels, level, operations, names, signs == "random", per_sample, fill, random)
        augmented = from_pixels(changed, images, mean, std, before=pixels)
        return state.replace(batch=with_part(state.batch, input_key, augmented))

    return Algorithm(name, {Event.BEFORE_TRAIN_BATCH: augment})
