"""Cutout: a square of each image is filled with one value.

With images of H rows and W columns, and a centre that is drawn from the pixels::

    side = int(length min(H, W)),   x'[square] = value          https://arxiv.org/abs/1708.04552

What of the square lies outside of the image is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from pure_loop._internal.arguments import check_number
from pure_loop._internal.processes import data_rank
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part
from pure_loop.algorithms._images import box_mask, centres, image_of
from pure_loop.errors import ArgumentError, DataError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, with_part
from pure_loop.ranges import AtLeast, Between, Index, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["cutout", "fill"]

SERVES = "images"

EXPECTED_FAILURES = dict.fromkeys(["rank_agreement", "world_size"], "each rank draws for its own samples")


def fill(images: Tensor, mask: Tensor, value: float | Sequence[float] = 0.0) -> Tensor:
    """Images with one value where a mask is set.

    Args:
        images: (n, channels, height, width), of any dtype.
        mask: (height, width), or (n, height, width) for the images one by one; bool.
        value: a number, or one for each channel.

    Returns:
        Of the shape and dtype of ``images``.

    Raises:
        ArgumentError: as many values as there are no channels.

    >>> fill(torch.ones(1, 1, 1, 3), torch.tensor([[False, True, True]]))
    tensor([[[[1., 0., 0.]]]])
    """
    if mask.ndim == 3:
        mask = mask.unsqueeze(1)
    if isinstance(value, float | int):
        return images.masked_fill(mask, value)
    if len(value) != images.shape[1]:
        raise ArgumentError(
            f"cutout: value has {len(value)} numbers, and images of shape {tuple(images.shape)} have "
            f"{images.shape[1]} channels: give one number, or one for each channel."
        )
    # Made on the device: a copy would wait for it.
    values = torch.stack([images.new_full((), number) for number in value]).view(-1, 1, 1)
    return torch.where(mask, values, images)


@checked
def cutout(
    holes: Annotated[int, AtLeast(1)] = 1,
    length: Annotated[Strength, Between(0, 1, typical=(0.3, 0.6))] = 0.5,
    *,
    uniform_sampling: bool = False,
    value: float | Sequence[float] = 0.0,
    per_sample: bool = True,
    input_key: Annotated[BatchKey, Index()] = 0,
    name: str = "cutout",
) -> Algorithm:
    """Cutout: squares of each training image are filled with one value, at BEFORE_TRAIN_BATCH.

    Args:
        holes: how many squares.
        length: the side of a square, as a share of the shorter side of the image: below 1; 0 changes nothing; a
            number, or a schedule.
        uniform_sampling: draw the square from all places at which it covers a pixel, and not its centre from the
            pixels.
        value: what the squares are filled with: a number, or one for each channel; 0 is the mean of images that are
            normalised.
        per_sample: draw squares for each image, as the paper does, and not for the batch.
        input_key: where in a batch its images, (n, channels, height, width), are: an index, a key or a
            :class:`pure_loop.Lens`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a setting out of range; in training: squares smaller than a pixel, or as many values as there
            are no channels.
        ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without images there.

    >>> import torch, pure_loop as pl
    >>> images = torch.ones(2, 1, 4, 4)
    >>> state = pl.State.create(torch.nn.Linear(2, 1)).replace(batch=(images, torch.zeros(2)))
    >>> 12 <= cutout()(state).batch[0][0].sum() <= 15
    tensor(True)
    """
    for number in value if isinstance(value, Sequence) else (value,):
        check_number("value", number, where="cutout", example="cutout(value=0.5)")

    @by_part
    def cut(state: State) -> State:
        images = image_of(state.batch, input_key, "cutout")
        height, width = images.shape[-2:]
        share: Any = strength_at(length, state.timestamp)
        shortest = min(height, width)
        if isinstance(share, float | int):
            if not share:
                return state
            if int(share * shortest) < 1:
                raise DataError(
                    f"cutout: length={share:g} of images of {height} x {width} pixels is less than a pixel. Give a "
                    f"length of at least 1/{shortest}, or leave cutout out."
                )
        # Rounded down, but a product such as 0.29 * 100 is a little less than 29.
        side = (torch.zeros((), device=images.device) + share * shortest + 1e-4).long()
        path = (state.timestamp.batch, *((data_rank(),) if per_sample else ()))
        shape = (len(images), holes) if per_sample else (holes,)
        row = centres((name, "row", *path), state, shape, height, side, uniform_sampling)
        column = centres((name, "column", *path), state, shape, width, side, uniform_sampling)
        squares = box_mask(height, width, side.expand(shape), side.expand(shape), row, column)
        filled = fill(images, squares.any(-3), value)
        return state.replace(batch=with_part(state.batch, input_key, filled))

    return Algorithm(name, {Event.BEFORE_TRAIN_BATCH: cut})
