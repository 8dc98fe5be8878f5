"""AugMix: each image is mixed with a mean of chains of random operations on it.

With ``width`` chains of one to three operations, with levels that are uniform from 0.1 to ``severity`` of 10::

    w ~ Dirichlet(alpha, ..., alpha),   m ~ Beta(alpha, alpha)
    x' = (1 - m) x + m (w_1 chain_1(x) + ... + w_k chain_k(x))         https://arxiv.org/abs/1912.02781

With ``consistency``, a sample and two such images of it have to get like probabilities p::

    loss + consistency (KL(p_0 | M) + KL(p_1 | M) + KL(p_2 | M)) / 3,   M = (p_0 + p_1 + p_2) / 3
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from pure_loop._internal.processes import data_rank
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part, rows_of
from pure_loop.algorithms._images import OPERATIONS, SAFE, Normalization, as_pixels, from_pixels, image_of, operated
from pure_loop.errors import ArgumentError, DataError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, with_part
from pure_loop.random import derive, seeded
from pure_loop.ranges import Above, AtLeast, Index, Within, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

if TYPE_CHECKING:
    from pure_loop.callback import Run

__all__ = ["augmix", "augmix_images", "jensen_shannon"]

SERVES = "images from 0 to 1"

EXPECTED_FAILURES = dict.fromkeys(["rank_agreement", "world_size"], "each rank draws for its own samples")

_DEPTH = 3


def jensen_shannon(*probabilities: Tensor) -> Tensor:
    """How much distributions differ: the mean of their divergences from their mean.

    Args:
        probabilities: of classes, (n, C, ...) each, or (C,).

    Returns:
        The mean over samples, 0-d; in nats.

    >>> jensen_shannon(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]))
    tensor(0.4621)
    """
    axis = 1 if probabilities[0].ndim > 1 else 0
    mean = torch.stack(probabilities).mean(0)
    logarithm = mean.clamp(min=1e-7).log()
    parts = [(torch.xlogy(part, part) - part * logarithm).sum(axis).mean() for part in probabilities]
    return torch.stack(parts).mean()


def _augmented(
    pixels: Tensor, severity: float | Tensor, width: int, depth: int | None, alpha: float, names: Sequence[str]
) -> Tensor:
    """Draws from torch's global generator of the device."""
    n, device = len(pixels), pixels.device
    zero = torch.zeros((), dtype=pixels.dtype, device=device)
    concentration = torch.full((n, width), alpha, device=device, dtype=pixels.dtype)
    weights = torch.distributions.Dirichlet(concentration, validate_args=False).sample()
    share = torch.distributions.Beta(concentration[:, 0], concentration[:, 0], validate_args=False).sample()
    most = zero + severity
    mixture = torch.zeros_like(pixels)
    for number in range(width):
        chain = pixels
        length = torch.randint(1, _DEPTH + 1, (n,), device=device) if depth is None else None
        for step in range(_DEPTH if depth is None else depth):
            choice = torch.randint(1, len(names), (n,), device=device)
            if length is not None:
                choice = torch.where(step < length, choice, 0)  # the identity
            level = (0.1 + torch.rand(n, device=device, dtype=pixels.dtype) * (most - 0.1)).clamp(min=0.0) / 10
            sign = (2 * torch.randint(2, (n,), device=device) - 1).to(pixels.dtype)
            chain = operated(chain, names, choice, torch.minimum(level, most / 10), sign)
        mixture = mixture + weights[:, number].view(-1, 1, 1, 1) * chain
    share = torch.where(most > 0, share, zero).view(-1, 1, 1, 1)
    return (1 - share) * pixels + share * mixture


@checked
def augmix_images(
    images: Tensor,
    severity: Annotated[float, Within(0, 10)] = 3.0,
    width: Annotated[int, AtLeast(1)] = 3,
    depth: Annotated[int | None, AtLeast(1)] = None,
    alpha: Annotated[float, Above(0)] = 1.0,
    operations: Literal["all", "safe"] = "all",
    *,
    mean: Normalization = None,
    std: Normalization = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Images mixed with chains of random operations, for a dataset or a loop of one's own.

    Args:
        images: (n, channels, height, width): uint8, or floats from 0 to 1.
        severity, width, depth, alpha, operations, mean, std: as in :func:`augmix`.
        generator: of which one number seeds what is drawn; None: torch's global generator draws.

    Returns:
        Of the shape and dtype of ``images``.

    Raises:
        ArgumentError: a number out of range.
        DataError: images of another dtype, number of dimensions or range.

    >>> images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    >>> torch.equal(augmix_images(images, 0.0), images)
    True
    """
    if not severity:
        return images
    names = tuple(OPERATIONS) if operations == "all" else SAFE
    pixels = as_pixels(images, mean, std, "augmix", checks=True)
    drawing: AbstractContextManager[object] = nullcontext()
    if generator is not None:
        number = torch.randint(2**62, (), generator=generator, device=generator.device)
        drawing = seeded(int(number), images.device)
    with drawing:
        changed = _augmented(pixels, severity, width, depth, alpha, names)
    return from_pixels(changed, images, mean, std, before=pixels)


@checked
def augmix(
    severity: Annotated[Strength, Within(0, 10, typical=(1.0, 10.0))] = 3.0,
    width: Annotated[int, AtLeast(1, typical=(1, 2))] = 3,
    depth: Annotated[int | None, AtLeast(1, typical=(1, 2))] = None,
    alpha: Annotated[float, Above(0, typical=(0.5, 1.0))] = 1.0,
    operations: Literal["all", "safe"] = "all",
    consistency: Annotated[Strength | None, AtLeast(0, typical=())] = None,
    *,
    mean: Normalization = None,
    std: Normalization = None,
    input_key: Annotated[BatchKey, Index()] = 0,
    name: str = "augmix",
) -> Algorithm:
    """AugMix of training images on their device, at BEFORE_TRAIN_BATCH; evaluation sees images as they are.

    Args:
        severity: the largest level of an operation, from 0 to 10; 0 changes nothing; a number, or a schedule.
        width: the number of chains.
        depth: the number of operations of a chain; None: one to three, drawn.
        alpha: of the distributions of the shares.
        operations: ``"all"``; ``"safe"``: without color, contrast, brightness and sharpness.
        consistency: the weight of the divergence between the probabilities of an image and of two mixed ones, 12 in the
            paper: a number, or a schedule. The forward runs on three images for each sample, side by side, so a
            ``microbatch_size`` has to be a multiple of 3; the loss itself, and metrics, see the image as it is. Outputs
            are scores of classes, (n, C, ...). None: the model is trained on mixed images, one for each sample.
        mean, std: what was subtracted from the pixels and what they were divided by: numbers, or one for each channel.
            Without them images are uint8, or floats from 0 to 1; the first batch is compared with that range.
        input_key: where in a batch its images, (n, channels, height, width), are: an index, a key or a
            :class:`pure_loop.Lens`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range; by fit: a ``microbatch_size`` that parts the three images of a sample.
        ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without images there, of another dtype, or out of range.

    >>> import pure_loop as pl
    >>> images = torch.rand(4, 3, 8, 8)
    >>> state = pl.State.create(torch.nn.Linear(2, 1)).replace(batch=(images, torch.zeros(4)))
    >>> augmix()(state).batch[0].shape
    torch.Size([4, 3, 8, 8])
    """
    names = tuple(OPERATIONS) if operations == "all" else SAFE

    @by_part
    def augment(state: State) -> State:
        if isinstance(severity, float | int) and not severity and consistency is None:
            return state
        images = image_of(state.batch, input_key, "augmix")
        pixels = as_pixels(images, mean, std, "augmix", checks=not state.timestamp.batch)
        most = strength_at(severity, state.timestamp)
        with seeded(derive(state.seed, name, state.timestamp.batch, data_rank()), state.device):
            drawn = [
                from_pixels(_augmented(pixels, most, width, depth, alpha, names), images, mean, std, before=pixels)
                for _ in range(1 if consistency is None else 2)
            ]
        if consistency is None:
            return state.replace(batch=with_part(state.batch, input_key, drawn[0]))
        count = len(images)

        thrice = torch.arange(count, device=images.device).repeat_interleave(3)
        three = torch.stack([images, *drawn], 1).flatten(0, 1)
        return state.replace(batch=with_part(rows_of(state.batch, thrice, count), input_key, three))

    if consistency is None:
        return Algorithm(name, {Event.BEFORE_TRAIN_BATCH: augment})
    weight: Strength = consistency

    def show_first(state: State) -> State:
        scores = state.outputs
        if not isinstance(scores, Tensor) or scores.ndim < 2:
            raise DataError(
                "augmix: with consistency= the outputs have to be a tensor of scores of classes, (n, C, ...), and are "
                f"{f'of shape {tuple(scores.shape)}' if isinstance(scores, Tensor) else type(scores).__name__}."
            )
        count = len(scores)

        first = torch.arange(0, count, 3, device=scores.device)
        microbatch = rows_of(state.microbatch, first, count)
        changed = state.replace(outputs=scores.index_select(0, first), microbatch=microbatch)
        return changed.remember(name, scores)

    def add(state: State) -> State:
        scores = state.algorithm_state[name]
        probabilities = scores.float().unflatten(0, (-1, 3)).softmax(2)
        more = strength_at(weight, state.timestamp) * jensen_shannon(*probabilities.unbind(1))
        loss = state.loss
        assert loss is not None
        loss = {**loss, "total": loss["total"] + more} if isinstance(loss, dict) else loss + more
        return state.replace(loss=loss).remember(name, None)

    return Algorithm(
        name,
        {Event.BEFORE_TRAIN_BATCH: augment, Event.BEFORE_LOSS: show_first, Event.AFTER_LOSS: add},
        init=lambda state: None,
        bind=_refuse_parts,
    )


def _refuse_parts(run: Run) -> None:
    """
    Raises:
        ArgumentError: microbatches that part the three images of a sample.
    """
    if run.microbatch_size is not None and run.microbatch_size % 3:
        raise ArgumentError(
            f"augmix: with consistency= each sample is three images, and microbatch_size={run.microbatch_size} parts "
            f"them: write a multiple of 3, microbatch_size={3 * max(1, round(run.microbatch_size / 3))}."
        )
