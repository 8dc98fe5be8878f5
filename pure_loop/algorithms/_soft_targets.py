"""Targets as probabilities of classes, smoothed or not: what label smoothing and mixed samples share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["IGNORED", "soft_targets"]

IGNORED = -100


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
    plain = isinstance(smoothing, float | int) and not smoothing
    if plain and targets.is_floating_point() and targets.shape == outputs.shape:
        return targets
    axis = 1 if outputs.ndim > 1 else 0
    classes = outputs.shape[axis] if outputs.ndim else 1
    if classes < 2:
        raise ArgumentError(
            f"{where}: outputs of shape {tuple(outputs.shape)} score {classes} class; (n, C, ...) is needed, "
            "with C of two or more."
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
        # Weighed by their sum, so that positions without a target, whose probabilities are all 0, stay without.
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
