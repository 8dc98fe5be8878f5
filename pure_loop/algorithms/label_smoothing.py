"""Label smoothing: soft targets for the loss.

With C classes and the one-hot (or any other) distribution ``y`` of a sample's target::

    y' = (1 - smoothing) y + smoothing / C

https://arxiv.org/abs/1512.00567, section 7.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, part_of, with_part
from pure_loop.ranges import Between, Index, Number, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["label_smoothing", "smooth_labels"]

SERVES = "classes"

IGNORED = -100


@checked
def smooth_labels(
    outputs: Tensor,
    targets: Tensor,
    smoothing: Annotated[float, Between(0, 1, example="smooth_labels(outputs, targets, 0.1)")] = 0.1,
    *,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Targets as smoothed probabilities, as ``torch.nn.functional.cross_entropy`` takes them.

    Args:
        outputs: scores of C classes, (n, C, ...) or (C,); only their shape, dtype and device are used.
        targets: class indices, (n, ...) or (), of an integer dtype; or probabilities, of the shape of ``outputs``.
        smoothing: the part of the probability that is spread over all classes, in [0, 1).
        ignore_index: the class index of positions without a target. Their probabilities are all 0, and the others
            are scaled up so that a mean over all positions is the mean over those that have a target, as it is
            for indices. (``cross_entropy`` itself ignores nothing where it is given probabilities.)

    Returns:
        Probabilities of the shape of ``outputs``; float32, or float64 for float64 outputs. Targets that are
        probabilities keep their dtype.

    Raises:
        ArgumentError: targets whose shape or dtype is neither, a single class, or smoothing out of range.
        ArgumentTypeError: outputs or targets that are no tensor.

    >>> smooth_labels(torch.zeros(2, 4), torch.tensor([1, 3]), 0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500],
            [0.0500, 0.0500, 0.0500, 0.8500]])
    """
    return _smoothed(outputs, targets, smoothing, ignore_index)


def _smoothed(outputs: Tensor, targets: Tensor, smoothing: float, ignore_index: int) -> Tensor:
    """:func:`smooth_labels`, for a smoothing in range, which may be the stand-in for a number of a compiled step."""
    for name, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"smooth_labels: {name} is {type(value).__name__}, not a tensor. Pick the tensor of class scores and "
                "that of their targets out of it in an algorithm of your own, which calls smooth_labels on them."
            )
    axis = 1 if outputs.ndim > 1 else 0
    classes = outputs.shape[axis] if outputs.ndim else 1
    if classes < 2:
        raise ArgumentError(
            f"smooth_labels: outputs of shape {tuple(outputs.shape)} score {classes} class; (n, C, ...) is needed, "
            "with C of two or more."
        )
    if targets.is_floating_point() and targets.shape == outputs.shape:
        return targets * (1.0 - smoothing) + smoothing / classes
    indices = not (targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool)
    if not indices or targets.shape != outputs.shape[:axis] + outputs.shape[axis + 1 :]:
        raise ArgumentError(
            f"smooth_labels: targets have shape {tuple(targets.shape)} and dtype {targets.dtype}, and outputs have "
            f"shape {tuple(outputs.shape)}, which is read as (n, classes, ...). Give class indices, integers of shape "
            f"{tuple(outputs.shape[:axis] + outputs.shape[axis + 1 :])}, or probabilities, floats of the shape of "
            "outputs. Where classes come last, move them: outputs.movedim(-1, 1)."
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    present = targets != ignore_index
    # Without a branch on the data, so that a GPU is not waited for. The scale is exactly 1 if nothing is ignored.
    scale = present.numel() / present.sum(dtype=dtype)
    # As tensors, which the stand-in for a number becomes beside one.
    zero = torch.zeros((), dtype=dtype, device=outputs.device)
    spread, target = zero + smoothing / classes, zero + (1.0 - smoothing + smoothing / classes)
    index = targets.long().masked_fill(~present, 0).unsqueeze(axis)
    smoothed = spread.expand(outputs.shape).scatter(axis, index, target.expand(index.shape))
    return smoothed * (present * scale).unsqueeze(axis)


@checked
def label_smoothing(
    smoothing: Annotated[Strength, Between(0, 1, typical=(0.0, 0.5))] = 0.1,
    *,
    target_key: Annotated[BatchKey, Index()] = 1,
    ignore_index: Annotated[int, Number(typical=())] = IGNORED,
    name: str = "label_smoothing",
) -> Algorithm:
    """Label smoothing: the loss sees smoothed targets; nothing else does, and evaluation does not.

    It gives what ``cross_entropy(..., label_smoothing=smoothing)`` does, for any loss that takes probabilities, and
    together with algorithms that change targets. Targets are smoothed at BEFORE_LOSS and put back at AFTER_LOSS.
    They take the memory of the outputs for that long. A loss with class weights averages probabilities over the
    samples, and indices over the samples' weights: there use the loss's own ``label_smoothing``. With microbatches or
    ranks, class weights of a loss of torch are refused.

    Args:
        smoothing: the part of the probability that is spread over all classes, in [0, 1); a number, or a schedule.
        target_key: where in a batch its targets are: an index, a key or a :class:`pure_loop.Lens`.
        ignore_index: the class index of positions without a target, which stay without (:func:`smooth_labels`).
        name: another one, if there are several.

    Raises:
        ArgumentError: smoothing out of range; in training: targets that are neither class indices nor probabilities.
        ArgumentTypeError: a setting of another type; in training: outputs that are no tensor.
        DataError: in training: a batch without ``target_key``.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.eye(3), torch.tensor([0, 1, 2]))]
    >>> stream = pl.fit(torch.nn.Linear(3, 3), data, loss=torch.nn.functional.cross_entropy,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="1ba", algorithms=[label_smoothing(0.3)])
    >>> for event, state in stream:
    ...     if event in (pl.Event.BEFORE_LOSS, pl.Event.AFTER_LOSS):
    ...         print(state.microbatch[1][0])
    tensor([0.8000, 0.1000, 0.1000])
    tensor(0)
    """

    def smooth(state: State) -> State:
        targets = part_of(state.microbatch, target_key, "label_smoothing", "target_key")
        spread = strength_at(smoothing, state.timestamp)
        smoothed = _smoothed(state.outputs, targets, spread, ignore_index)
        return state.replace(microbatch=with_part(state.microbatch, target_key, smoothed)).remember(name, targets)

    def put_back(state: State) -> State:
        targets = state.algorithm_state[name]
        return state.replace(microbatch=with_part(state.microbatch, target_key, targets)).remember(name, None)

    return Algorithm(name, {Event.BEFORE_LOSS: smooth, Event.AFTER_LOSS: put_back}, init=lambda state: None)
