"""The Dice coefficient of classes, and a loss of it, as in segmentation."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from pure_loop.errors import DataError
from pure_loop.metrics._base import Metric
from pure_loop.metrics._classes import INDICES, Reading, in_words, of_counts, refuse_outside
from pure_loop.ranges import AtLeast, Name, Number, checked

__all__ = ["dice", "dice_loss"]


@checked
def dice(
    classes: Annotated[int | None, AtLeast(2)] = None,
    *,
    average: Literal["macro", "micro"] | None = "macro",
    threshold: Annotated[float | None, Number()] = None,
    ignore_index: Annotated[int | None, Number()] = -100,
    axis: Annotated[int | None, Number()] = None,
    name: Annotated[str, Name()] = "dice",
) -> Metric:
    """The Dice coefficient of a class, ``2 right / (predicted + targets)``; its mean.

    Outputs and targets are those of :func:`confusion_matrix`; counts are summed over all data before anything is
    divided. Its value is float32, of shape () or, without an average, (classes,).

    Args:
        classes: how many there are; None: as many as outputs have scores.
        average: ``"macro"``: the mean over the classes that occur in targets or predictions; ``"micro"``: of the
            counts of all classes; None: a score for each class, 0 for one that does not occur.
        threshold: for outputs that are one score for each target, of the same shape: class 1 is predicted where the
            score is larger, such as 0.0 for logits and 0.5 for probabilities.
        ignore_index: the class index of targets that do not count; None: all count.
        axis: where classes lie in outputs, such as 1 or -1; None: where the shape of the targets says.
        name: the metric's name.

    Raises:
        ArgumentError, ArgumentTypeError: a setting out of range, or of another type.
        DataError: (a ValueError, in evaluation) outputs or targets that do not fit, or a target that is no class.

    >>> import torch
    >>> outputs, targets = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])
    >>> metric = dice(classes=2, average=None)
    >>> metric.compute(metric.update(metric.init(), outputs, (None, targets)))
    tensor([0.6667, 0.8000])
    """
    read = Reading(where="dice", classes=classes, threshold=threshold, ignore_index=ignore_index, axis=axis)
    return of_counts(lambda right, predicted, targets: 2 * right / (predicted + targets), read, average, name)


@checked
def dice_loss(outputs: Tensor, targets: Tensor, *, smooth: Annotated[float, AtLeast(0)] = 1.0) -> Tensor:
    """One minus the Dice coefficient of probabilities, for ``fit(loss=pl.metrics.dice_loss)`` (arXiv 1606.04797).

    For each sample and class ``1 - (2 sum(p t) + smooth) / (sum(p) + sum(t) + smooth)`` over all positions, and
    the mean over samples and classes, so that it does not depend on how a batch is split.

    Args:
        outputs: probabilities, such as a softmax gives, of shape (n, classes, ...).
        targets: class indices of shape (n, ...), or probabilities of the outputs' shape.
        smooth: what keeps the quotient defined where a class does not occur; 0: nothing does.

    Returns:
        A tensor of shape (), in the dtype of the outputs, between 0 and 1.

    Raises:
        ArgumentError, ArgumentTypeError: ``smooth`` is no number of at least 0.
        DataError: (a ValueError) outputs and targets that do not fit.

    >>> import torch
    >>> dice_loss(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    tensor(0.)
    """
    fits = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.is_floating_point()
    if (
        fits
        and targets.dtype in INDICES
        and targets.shape == outputs.shape[:1] + outputs.shape[2:]
        and outputs.ndim > 1
    ):
        refuse_outside("dice_loss", "target", targets, outputs.shape[1], None)
        classes = torch.arange(outputs.shape[1], device=outputs.device).view(-1, *[1] * (targets.ndim - 1))
        expected = (targets.unsqueeze(1) == classes).to(outputs.dtype)
    elif fits and targets.is_floating_point() and targets.shape == outputs.shape and outputs.ndim > 1:
        expected = targets
    else:
        raise DataError(
            "dice_loss needs probabilities of shape (n, classes, ...), and targets that are class indices of shape "
            f"(n, ...) or probabilities of the same shape{in_words(outputs, (None, targets))}."
        )
    overlap = (outputs * expected).flatten(2).sum(2) if outputs.ndim > 2 else outputs * expected
    sizes = (outputs + expected).flatten(2).sum(2) if outputs.ndim > 2 else outputs + expected
    return (1 - (2 * overlap + smooth) / (sizes + smooth)).mean()
