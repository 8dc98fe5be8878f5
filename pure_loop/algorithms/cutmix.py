"""CutMix: a box of each image is that of another one, and the targets have the shares of the areas.

With images ``x`` of H rows and W columns, targets ``y``, a permutation ``p`` of the samples and a box, drawn for each
batch::

    lambda ~ Beta(alpha, alpha)
    box of int(H sqrt(1 - lambda)) rows and int(W sqrt(1 - lambda)) columns, cut off at the edges
    x'[box] = x[p][box],   w = area of the box / (H W)
    y' = (1 - w) y + w y[p]                          https://arxiv.org/abs/1905.04899
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.processes import data_rank
from pure_loop._internal.pytree import Batch
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._images import box_mask, centres, image_of
from pure_loop.algorithms._mixed import IGNORED, Interpolation, mixing, with_partners
from pure_loop.errors import DataError
from pure_loop.lens import BatchKey
from pure_loop.ranges import AtLeast, Index, Number, Within, checked
from pure_loop.ranges.strengths import Strength
from pure_loop.state import State

__all__ = ["cutmix", "paste"]

SERVES = "images"

CLAIMS = frozenset({"mixes targets"})

EXPECTED_FAILURES = dict.fromkeys(
    ["rank_agreement", "world_size"], "the partner of a sample is drawn from those of its rank"
)


def paste(images: Tensor, partner: Tensor, mask: Tensor) -> Tensor:
    """Images with the pixels of their partners where a mask is set.

    Args:
        images: (n, ..., height, width), of any dtype; class maps are images, too.
        partner: the index of each image's partner, (n,), of an integer dtype.
        mask: (height, width), or (n, height, width) for the images one by one; bool.

    Returns:
        Of the shape and dtype of ``images``.

    >>> paste(torch.tensor([[[1, 1]], [[2, 2]]]), torch.tensor([1, 0]), torch.tensor([[False, True]]))
    tensor([[[1, 2]],
    <BLANKLINE>
            [[2, 1]]])
    """
    if mask.ndim == 3:
        mask = mask.view(len(mask), *(1,) * (images.ndim - 3), *mask.shape[1:])
    return torch.where(mask, images[partner], images)


@checked
def cutmix(
    alpha: Annotated[Strength, AtLeast(0, typical=(0.1, 2.0))] = 1.0,
    *,
    interpolate: Interpolation = "targets",
    uniform_sampling: bool = False,
    probability: Annotated[Strength, Within(0, 1)] = 1.0,
    per_sample: bool = False,
    input_key: Annotated[BatchKey, Index()] = 0,
    target_key: Annotated[BatchKey, Index()] = 1,
    ignore_index: Annotated[int, Number(typical=())] = IGNORED,
    name: str = "cutmix",
) -> Algorithm:
    """CutMix: a box of each image comes from a partner in its batch; evaluation sees whole images.

    Images are cut at BEFORE_TRAIN_BATCH, once for a batch, whatever the microbatches are. The loss sees targets with
    the shares of the areas; metrics of training see those of the image itself. Targets that are maps of the height and
    width of the images (segmentation) are cut by the same box. Put ``label_smoothing`` before or after it; with
    ``interpolate="loss"`` before it.

    Args:
        alpha: of the distribution of areas: 0 cuts nothing, 1 draws them uniformly; a number, or a schedule.
        interpolate: ``"targets"``: the loss takes the mean of both targets, as probabilities where they are class
            indices; ``"loss"``: the mean of the loss for one and for the other, which serves any loss.
        uniform_sampling: draw the box from all places at which it covers a pixel, and not its centre from the pixels.
        probability: that of a batch to be cut, or of an image with ``per_sample``; a number, or a schedule.
        per_sample: draw a box for each image, and not one for the batch.
        input_key, target_key: where in a batch its images, (n, channels, height, width), and targets are: an index, a
            key or a :class:`pure_loop.Lens`.
        ignore_index: the class index of positions without a target, which stay without.
        name: another one, if there are several.

    Raises:
        ArgumentError: a setting out of range, or ``per_sample`` with ``interpolate="loss"``; in training: targets that
            are neither class indices nor floats of the shape of the outputs.
        ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without images or targets there, or maps of another size than the images.

    >>> import torch, pure_loop as pl
    >>> images = torch.stack([torch.zeros(1, 4, 4), torch.ones(1, 4, 4)])
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    >>> stream = pl.fit(net, [(images, torch.tensor([0, 1]))], loss=torch.nn.functional.cross_entropy,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="1ba", algorithms=[cutmix()])
    >>> for event, state in stream:
    ...     if event is pl.Event.BEFORE_LOSS:
    ...         inputs, targets = state.microbatch
    >>> torch.equal(inputs.mean((1, 2, 3)), targets[:, 1])
    True
    """

    def inputs_of(batch: Batch) -> Tensor:
        return image_of(batch, input_key, "cutmix", "target_key")

    def cut(state: State, images: Tensor, targets: Batch, partner: Tensor, areas: Tensor) -> tuple[Tensor, Batch]:
        height, width = images.shape[-2:]
        # Of lambda and 1 - lambda the distribution is the same.
        mask = _mask(state, name, height, width, areas, uniform_sampling)
        if not (isinstance(targets, Tensor) and targets.ndim > 2):
            weight = mask.to(torch.float32).mean((-2, -1))
            return paste(images, partner, mask), with_partners(targets, partner, weight, "cutmix")
        if targets.shape[-2:] != images.shape[-2:]:
            raise DataError(
                f"cutmix: targets of shape {tuple(targets.shape)} are no maps of images of shape "
                f"{tuple(images.shape)}: their last two dimensions have to be {height} and {width}."
            )
        return paste(images, partner, mask), paste(targets, partner, mask)

    return mixing(
        name,
        "cutmix",
        cut,
        inputs_of=inputs_of,
        alpha=alpha,
        probability=probability,
        interpolate=interpolate,
        per_sample=per_sample,
        input_key=input_key,
        target_key=target_key,
        ignore_index=ignore_index,
    )


def _mask(state: State, name: str, height: int, width: int, area: Tensor, uniform: bool) -> Tensor:
    """Boxes of drawn shares of an image, (height, width), or (n, height, width) of samples, which differ by rank."""
    side = area.sqrt()
    rows, columns = (height * side).long(), (width * side).long()
    path = (state.timestamp.batch, *((data_rank(),) if area.ndim else ()))
    shape = tuple(area.shape)
    row = centres((name, "row", *path), state, shape, height, rows, uniform)
    column = centres((name, "column", *path), state, shape, width, columns, uniform)
    return box_mask(height, width, rows, columns, row, column)
