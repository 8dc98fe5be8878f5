"""Progressive resizing: training begins with small images, which grow until they have their size.

With ``t``, the part of training that is over, images of both sides multiplied by ``s``::

    t < delay:   s = initial
    later:       s = initial + (1 - initial) min(1, (t - delay) / (1 - finetune - delay))

Sides are rounded to multiples of ``increment``. A method of fast.ai; https://arxiv.org/abs/2104.00298, section 4.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part
from pure_loop.algorithms._images import image_of
from pure_loop.algorithms._spans import as_span, part_of_training
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, part_of, with_part
from pure_loop.random import generator
from pure_loop.ranges import AtLeast, Index, Within, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State
from pure_loop.time import TimeLike

__all__ = ["progressive_resizing", "resized", "side_of"]

SERVES = "images of any size"

Interpolation: TypeAlias = Literal["bilinear", "bicubic", "nearest", "area"]


def side_of(side: int, scale: float, increment: int = 4) -> int:
    """A side of ``side`` pixels, scaled and rounded to a multiple of ``increment``, from ``increment`` to ``side``.

    >>> [side_of(32, scale) for scale in (0.5, 2 / 3, 0.75, 1.0)]
    [16, 20, 24, 32]
    """
    if scale >= 1:
        return side
    return min(side, max(increment, int(side * scale / increment + 0.5) * increment))


def resized(
    images: Tensor, height: int, width: int, interpolation: Interpolation = "bilinear", antialias: bool = True
) -> Tensor:
    """Images of another size.

    Args:
        images: (n, channels, height, width), of any dtype; integers are rounded.
        height, width: of the result, in pixels.
        interpolation: how pixels are computed; ``"nearest"`` for maps of classes.
        antialias: filter before images become smaller, with ``"bilinear"`` and ``"bicubic"``.

    Returns:
        (n, channels, ``height``, ``width``), of the dtype of ``images``.

    >>> resized(torch.tensor([[[[0, 2], [4, 6]]]]), 1, 1)
    tensor([[[[3]]]])
    """
    smooth = interpolation in ("bilinear", "bicubic")
    has_integers = not images.is_floating_point()
    computed = functional.interpolate(
        images.float() if has_integers and interpolation != "nearest" else images.double() if has_integers else images,
        size=(height, width),
        mode=interpolation,
        align_corners=False if smooth else None,
        antialias=antialias and smooth,
    )
    if not has_integers:
        return computed
    if images.dtype is torch.uint8:
        computed = computed.clamp(0, 255)
    return computed.round().to(images.dtype)


@checked
def progressive_resizing(
    initial: Annotated[float, Within(0.01, 1, typical=(0.4, 0.8))] = 0.5,
    *,
    delay: TimeLike = "0.5dur",
    finetune: TimeLike = "0.2dur",
    increment: Annotated[int, AtLeast(1, typical=(1, 2))] = 4,
    size: Annotated[Strength | None, Within(0.01, 1, typical=())] = None,
    mode: Literal["resize", "crop"] = "resize",
    interpolation: Interpolation = "bilinear",
    antialias: bool = True,
    targets: bool = False,
    input_key: Annotated[BatchKey, Index()] = 0,
    target_key: Annotated[BatchKey, Index()] = 1,
    name: str = "progressive_resizing",
) -> Algorithm:
    """Progressive resizing of training images, at AFTER_DATALOADER; evaluation sees whole images.

    The size is a function of the timestamp, so that it is the same on all ranks and when training resumes. Compiled,
    each size is another graph: at most ``(1 - initial) side / increment + 1`` of them.

    Args:
        initial: the scale of a side at the beginning.
        delay: how long it stays: a part of the duration such as ``"0.5dur"``, or a time in the unit of
            ``max_duration``; 0: it grows at once.
        finetune: how long before the end images have their size.
        increment: sides are multiples of it, in pixels.
        size: the scale instead of ``initial``, ``delay`` and ``finetune``: a number, or a schedule.
        mode: ``"resize"``: the whole image, smaller; ``"crop"``: a part of it, at a place that is drawn for the batch.
        interpolation: how pixels are computed.
        antialias: filter before images become smaller.
        targets: whether the targets are maps of the height and width of the images, to be resized as well, with the
            nearest class for a pixel.
        input_key, target_key: where in a batch its images, (n, channels, height, width), and targets are: an index, a
            key or a :class:`pure_loop.Lens`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a setting out of range, or ``delay`` and ``finetune`` that leave no time to grow; in training:
            times in another unit than ``max_duration``.
        ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without images there.

    >>> import pure_loop as pl
    >>> images, time = torch.ones(2, 3, 32, 32), pl.Timestamp(max_duration=pl.Time("100ba"))
    >>> state = pl.State.create(torch.nn.Linear(2, 1)).replace(batch=(images, torch.zeros(2)))
    >>> resize = progressive_resizing()
    >>> [resize(state.replace(timestamp=time.replace(batch=batch))).batch[0].shape[-1] for batch in (0, 60, 65, 80)]
    [16, 20, 24, 32]
    """
    begins, left = (
        as_span(delay, "delay", "progressive_resizing"),
        as_span(finetune, "finetune", "progressive_resizing"),
    )
    if size is None and begins.unit is left.unit and str(begins.unit.value) == "dur" and (begins + left).value >= 1:
        raise ArgumentError(
            f"progressive_resizing: delay={str(begins)!r} and finetune={str(left)!r} are all of training, so that "
            "images would have no time to grow. Write smaller ones."
        )

    def scale_at(state: State) -> float:
        timestamp = state.timestamp
        if size is not None:
            return strength_at(size, timestamp)
        start, rest = (part_of_training(time, timestamp, "progressive_resizing") for time in (begins, left))
        elapsed = timestamp.elapsed or 0.0
        if elapsed < start:
            return initial
        growing = 1 - rest - start
        return initial + (1 - initial) * (min(1.0, (elapsed - start) / growing + 1e-9) if growing > 0 else 1.0)

    @by_part
    def resize(state: State) -> State:
        images = image_of(state.batch, input_key, "progressive_resizing")
        scale = scale_at(state)
        full = images.shape[-2:]
        height, width = (side_of(side, scale, increment) for side in full)
        if (height, width) == tuple(full):
            return state
        if mode == "crop":
            random = generator(state.seed, name, state.timestamp.batch)
            top, left_edge = (
                int(torch.randint(side - length + 1, (), generator=random))
                for side, length in zip(full, (height, width), strict=True)
            )

            def smaller(tensor: Tensor, nearest: bool) -> Tensor:
                return tensor[..., top : top + height, left_edge : left_edge + width]
        else:

            def smaller(tensor: Tensor, nearest: bool) -> Tensor:
                if nearest and tensor.ndim == 3:
                    return resized(tensor.unsqueeze(1), height, width, "nearest").squeeze(1)
                return resized(tensor, height, width, "nearest" if nearest else interpolation, antialias)

        batch = with_part(state.batch, input_key, smaller(images, False))
        if targets:
            maps = part_of(state.batch, target_key, "progressive_resizing", "target_key")
            batch = with_part(batch, target_key, smaller(maps, True))
        return state.replace(batch=batch)

    return Algorithm(name, {Event.AFTER_DATALOADER: resize})
