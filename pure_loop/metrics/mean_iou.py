"""The intersection over union of classes, as in segmentation."""

from __future__ import annotations

from typing import Annotated, Literal

from pure_loop.metrics._base import Metric
from pure_loop.metrics._classes import Reading, of_counts
from pure_loop.ranges import AtLeast, Name, Number, checked

__all__ = ["mean_iou"]


@checked
def mean_iou(
    classes: Annotated[int | None, AtLeast(2)] = None,
    *,
    average: Literal["macro"] | None = "macro",
    threshold: Annotated[float | None, Number()] = None,
    ignore_index: Annotated[int | None, Number()] = -100,
    axis: Annotated[int | None, Number()] = None,
    name: Annotated[str, Name()] = "mean_iou",
) -> Metric:
    """The intersection over union of a class (Jaccard index), ``right / (predicted + targets - right)``; its mean.

    Outputs and targets are those of :func:`confusion_matrix`; counts are summed over all data before anything is
    divided. Its value is float32, of shape () or, without an average, (classes,).

    Args:
        classes: how many there are; None: as many as outputs have scores.
        average: ``"macro"``: the mean over the classes that occur in targets or predictions; None: a score for
            each class, 0 for one that does not occur.
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
    >>> metric = mean_iou(classes=2)
    >>> metric.compute(metric.update(metric.init(), outputs, (None, targets)))
    tensor(0.5833)
    """
    read = Reading(where="mean_iou", classes=classes, threshold=threshold, ignore_index=ignore_index, axis=axis)
    return of_counts(lambda right, predicted, targets: right / (predicted + targets - right), read, average, name)
