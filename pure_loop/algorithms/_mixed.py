"""Targets as probabilities, smoothed or not, and those of samples that are mixed with others.

A mixer puts a :class:`Mixed` in the place of the targets at BEFORE_TRAIN_BATCH, so that it is cut with the batch into
microbatches and reaches each forward that algorithms such as SAM repeat. At BEFORE_LOSS it becomes what the loss
takes, and at AFTER_LOSS the targets of the samples themselves, which metrics of training read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal import pytree
from pure_loop._internal.processes import data_rank
from pure_loop._internal.pytree import Batch, Outputs
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part
from pure_loop.data.batch import describe, map_tensors, tensors_in
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, part_of, with_part
from pure_loop.random import derive, generator, seeded
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import Loss, State

if TYPE_CHECKING:
    from pure_loop.loop.batch import LoopStages

Interpolation: TypeAlias = Literal["targets", "loss"]

CLAIMS = frozenset({"mixes targets"})
IGNORED = -100


@attrs.frozen(eq=False)
class Mixed:
    """The targets of mixed samples, in the place of the targets of a batch.

    Attributes:
        first: targets of the samples themselves, (n, ...).
        second: those of their partners, (n, ...).
        weight: the share of ``second``, from 0 to 1: 0-d, or (n,) where each sample has its own.
    """

    first: Batch
    second: Batch
    weight: Tensor


pytree.register(
    Mixed,
    lambda mixed: ((mixed.first, mixed.second, mixed.weight), None, ("first", "second", "weight")),
    lambda _, children: Mixed(*children),
    attributes=True,
)


def share(alpha: Strength, probability: Strength, name: str, state: State, count: int | None) -> Tensor:
    """A draw of Beta(alpha, alpha) with the probability that there is one, else 0.

    Args:
        alpha, probability: numbers, or schedules.
        name: the name of the algorithm, which is part of the path of the seed.
        count: draws for samples, which differ by rank; None: one for the batch, the same on all ranks.

    Returns:
        (count,) or 0-d, float64 on a CPU and else float32.
    """
    place = () if count is None else (data_rank(),)
    shape = () if count is None else (count,)
    dtype = torch.float64 if state.device.type == "cpu" else torch.float32
    with seeded(derive(state.seed, name, "share", state.timestamp.batch, *place), state.device):
        zero = torch.zeros(shape, dtype=dtype, device=state.device)
        concentration = zero + strength_at(alpha, state.timestamp)
        # Above 0, where the distribution is defined; what is drawn for 0 is not used.
        positive = concentration.clamp(min=torch.finfo(dtype).tiny)
        # Without validation, which would wait for a GPU.
        drawn = torch.distributions.Beta(positive, positive, validate_args=False).sample()
        mixes = torch.rand(shape, dtype=dtype, device=state.device) < zero + strength_at(probability, state.timestamp)
    return torch.where(mixes & (concentration > 0), drawn, zero)


def partners(name: str, state: State, count: int) -> Tensor:
    """A permutation of the samples of this rank, (count,), int64."""
    random = generator(state.seed, name, "partners", state.timestamp.batch, data_rank(), device=state.device)
    return torch.randperm(count, generator=random, device=state.device)


def with_partners(targets: Batch, partner: Tensor, weight: Tensor, where: str) -> Mixed:
    """The targets of samples and of their partners.

    Args:
        targets: a tensor, (n, ...), or a nesting of such tensors.
        partner: the index of each sample's partner, (n,).
        weight: the share of the partner, 0-d or (n,).
        where: the function that an error names.

    Raises:
        DataError: there is no tensor, or one that has not one row for each sample.
    """
    tensors = tensors_in(targets)
    if not tensors or any(tensor.ndim == 0 or len(tensor) != len(partner) for tensor in tensors):
        raise DataError(
            f"{where}: the targets are {describe(targets)}, and of {len(partner)} samples they are tensors with a row "
            f'for each. Say where in a batch they are: {where}(target_key="label"), or a pl.Lens(get, put).'
        )
    return Mixed(targets, map_tensors(lambda tensor: tensor[partner], targets), weight)


def by_sample(weight: Tensor, tensor: Tensor) -> Tensor:
    """A weight for the batch, or (n,) for its samples, in the shape in which it weighs ``tensor``, (n, ...)."""
    return weight.view(-1, *(1,) * (tensor.ndim - 1)) if weight.ndim else weight


def mixing(
    name: str,
    factory: str,
    mix: Callable[[State, Tensor, Batch, Tensor, Tensor], tuple[Tensor, Batch]],
    *,
    inputs_of: Callable[[Batch], Tensor],
    alpha: Strength,
    probability: Strength,
    interpolate: Interpolation,
    per_sample: bool,
    input_key: BatchKey,
    target_key: BatchKey,
    ignore_index: int,
) -> Algorithm:
    """An algorithm that mixes samples, and their targets for the loss.

    Args:
        name: the name of the algorithm.
        factory: the function that an error names.
        mix: ``(state, inputs, targets, partners, shares) -> (inputs, targets)`` at BEFORE_TRAIN_BATCH. Partners are
            indices, (n,), and shares drawn numbers; the new targets are a :class:`Mixed`, or maps that are mixed.
        inputs_of: the inputs of a batch.
        alpha, probability: of the distribution of shares, and that there is one; numbers, or schedules.
        interpolate: ``"targets"``: the loss takes the mean of both as probabilities; ``"loss"``: it is taken for both.
        per_sample: whether each sample has a weight of its own.
        input_key, target_key: where inputs and targets are.
        ignore_index: the class index of positions without a target.

    Raises:
        ArgumentError: weights of samples for the loss of a batch.
    """
    if per_sample and interpolate == "loss":
        raise ArgumentError(
            f'{factory}: per_sample=True with interpolate="loss": a loss is one number for a batch, which weights of '
            'samples can\'t weigh. Write interpolate="targets", or leave per_sample out.'
        )

    off = any(isinstance(strength, float | int) and not strength for strength in (alpha, probability))

    @by_part
    def mixed(state: State) -> State:
        if off:
            return state  # bit for bit
        inputs = inputs_of(state.batch)
        targets = part_of(state.batch, target_key, factory, "target_key")
        shares = share(alpha, probability, name, state, len(inputs) if per_sample else None)
        inputs, targets = mix(state, inputs, targets, partners(name, state, len(inputs)), shares)
        batch = with_part(state.batch, input_key, inputs)
        return state.replace(batch=with_part(batch, target_key, targets))

    def with_targets(state: State, targets: Batch) -> State:
        return state.replace(microbatch=with_part(state.microbatch, target_key, targets))

    def expose(state: State) -> State:
        record = part_of(state.microbatch, target_key, factory, "target_key")
        if not isinstance(record, Mixed):
            return state
        targets = record.first if interpolate == "loss" else _mean(record, state.outputs, ignore_index, factory)
        return with_targets(state, targets).remember(name, record)

    def put_back(state: State, stages: LoopStages) -> State:
        record = state.algorithm_state[name]
        if record is None:
            return state
        if interpolate == "loss":
            second = stages.loss(with_targets(state, record.second)).loss
            assert state.loss is not None
            assert second is not None
            state = state.replace(loss=_mean_loss(state.loss, second, record.weight))
        # Metrics of training read the microbatch after the backward, and know targets only.
        return with_targets(state, record.first).remember(name, None)

    return Algorithm(
        name,
        {
            Event.BEFORE_TRAIN_BATCH: mixed,
            Event.BEFORE_LOSS: expose,
            Event.AFTER_LOSS: put_back,
        },
        init=lambda state: None,
        claims=CLAIMS,
    )


def _mean(record: Mixed, outputs: Outputs, ignore_index: int, factory: str) -> Tensor:
    """The mean of both targets, as probabilities where they are not floats of the shape of the outputs already."""
    for name, value in (("outputs", outputs), ("targets", record.first)):
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"{factory}: {name} is {type(value).__name__}, not a tensor, so that there are no probabilities of "
                f'classes to mix. Write {factory}(interpolate="loss"), which takes the loss for both targets.'
            )
    first = soft_targets(outputs, record.first, 0.0, ignore_index, where=factory)
    second = soft_targets(outputs, record.second, 0.0, ignore_index, where=factory)
    # Not in half precision, where the two shares may have another sum than 1.
    weight = by_sample(record.weight.to(first.dtype), first)
    mixed: Tensor = (1 - weight) * first + weight * second
    return mixed


def _mean_loss(first: Loss, second: Loss, weight: Tensor) -> Loss:
    """The mean of two losses: tensors, or mappings of the same names to tensors."""

    def mean(a: Tensor, b: Tensor) -> Tensor:
        part = weight.to(a.dtype)
        return (1 - part) * a + part * b

    if isinstance(first, Mapping):
        assert isinstance(second, Mapping)
        return {name: mean(loss, second[name]) for name, loss in first.items()}
    assert not isinstance(second, Mapping)
    return mean(first, second)


def soft_targets(
    outputs: Tensor,
    targets: Tensor,
    smoothing: float = 0.0,
    ignore_index: int = IGNORED,
    prior: Sequence[float] | None = None,
    *,
    where: str,
) -> Tensor:
    """Class indices, or probabilities, as smoothed probabilities; see :func:`pure_loop.algorithms.smooth_labels`.

    Args:
        outputs: scores of C classes, (n, C, ...) or (C,); only their shape, dtype and device are used.
        targets: class indices, or floats of the shape of ``outputs``.
        smoothing: in [0, 1), which may be the stand-in for a number of a compiled step.
        ignore_index: the class index of positions without a target.
        prior: C probabilities over which ``smoothing`` is spread; None: all classes alike.
        where: the function that an error names.

    Raises:
        ArgumentError: targets of another shape or dtype, a single class, or a prior of another number of classes.
        ArgumentTypeError: outputs or targets that are no tensor.
    """
    for name, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"{where}: {name} is {type(value).__name__}, not a tensor. Pick the tensor of class scores and "
                f"that of their targets out of it in an algorithm of your own, which calls smooth_labels on them."
            )
    is_zero = type(smoothing) in (float, int) and not smoothing  # not one that a graph traces
    if is_zero and targets.is_floating_point() and targets.shape == outputs.shape:
        return targets
    axis = 1 if outputs.ndim > 1 else 0
    classes = outputs.shape[axis] if outputs.ndim else 1
    if classes < 2:
        raise ArgumentError(
            f"{where}: outputs of shape {tuple(outputs.shape)} score {classes} class; (n, C, ...) is needed, "
            "with C of two or more: two classes take two outputs and cross_entropy. For one output a sample, mixup and "
            'cutmix take interpolate="loss", and label_smoothing does not apply.'
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    spread: float | Tensor = smoothing / classes
    if prior is not None:
        if len(prior) != classes:
            raise ArgumentError(
                f"{where}: prior has {len(prior)} probabilities, and outputs of shape {tuple(outputs.shape)}, which "
                f"is read as (n, classes, ...), score {classes} classes."
            )
        # Made on the device: a copy would wait for it.
        column = torch.stack([torch.full((), number, dtype=dtype, device=outputs.device) for number in prior])
        spread = smoothing * column.view(-1, *(1,) * (outputs.ndim - axis - 1))
    if targets.is_floating_point() and targets.shape == outputs.shape:
        # Weighed by their sum, so that positions without a target, with probabilities of 0 alone, stay without.
        return targets * (1.0 - smoothing) + spread * targets.sum(axis, keepdim=True)
    indices = not (targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool)
    if not indices or targets.shape != outputs.shape[:axis] + outputs.shape[axis + 1 :]:
        raise ArgumentError(
            f"{where}: targets have shape {tuple(targets.shape)} and dtype {targets.dtype}, and outputs have "
            f"shape {tuple(outputs.shape)}, which is read as (n, classes, ...). Give class indices, integers of shape "
            f"{tuple(outputs.shape[:axis] + outputs.shape[axis + 1 :])}, or probabilities, floats of the shape of "
            "outputs. Where classes come last, move them: outputs.movedim(-1, 1)."
        )
    present = targets != ignore_index
    # Without a branch on the data, so that a GPU is not waited for. The scale is exactly 1 if nothing is ignored.
    scale = present.numel() / present.sum(dtype=dtype)
    # As tensors, which the stand-in for a number becomes beside one.
    zero = torch.zeros((), dtype=dtype, device=outputs.device)
    index = targets.long().masked_fill(~present, 0).unsqueeze(axis)
    background = (zero + spread).expand(outputs.shape)
    if prior is None:
        target = zero + (1.0 - smoothing + spread)
        smoothed = background.scatter(axis, index, target.expand(index.shape))
    else:
        smoothed = background.scatter_add(axis, index, (zero + (1.0 - smoothing)).expand(index.shape))
    return smoothed * (present * scale).unsqueeze(axis)
