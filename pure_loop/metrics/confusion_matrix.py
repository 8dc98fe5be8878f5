"""How often targets of each class were predicted as each class, as a matrix."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from pure_loop.metrics._base import Metric, summed
from pure_loop.metrics._classes import Reading
from pure_loop.ranges import AtLeast, Name, Number, checked

__all__ = ["confusion_matrix"]


@checked
def confusion_matrix(
    classes: Annotated[int | None, AtLeast(2)] = None,
    *,
    normalize: Literal["true", "pred", "all"] | None = None,
    threshold: Annotated[float | None, Number()] = None,
    ignore_index: Annotated[int | None, Number()] = -100,
    axis: Annotated[int | None, Number()] = None,
    name: Annotated[str, Name()] = "confusion_matrix",
) -> Metric:
    """How often targets of each class, a row, were predicted as each class, a column.

    Its value is a tensor of shape (classes, classes), int64 or, normalized, float32; loggers are given it as a table.
    Outputs are scores of shape (n, classes, ...) or (n, ..., classes), or class indices of the targets' shape; targets
    are class indices of shape (n, ...).

    Args:
        classes: how many there are; None: as many as outputs have scores.
        normalize: ``"true"``: each row is divided by its sum, ``"pred"``: each column, ``"all"``: the matrix; where a
            sum is 0 there are zeros. None: numbers of targets.
        threshold: for outputs that are one score for each target, of the same shape: class 1 is predicted where the
            score is larger, such as 0.0 for logits and 0.5 for probabilities.
        ignore_index: the class index of targets that do not count; None: all count.
        axis: where classes lie in outputs, such as 1 or -1; None: where the shape of the targets says.
        name: the metric's name.

    Raises:
        ArgumentError, ArgumentTypeError: a setting out of range, or of another type.
        DataError: (a ValueError, in evaluation) outputs or targets that do not fit, or a target that is no class.

    >>> import torch
    >>> metric = confusion_matrix(classes=2)
    >>> metric.compute(metric.update(metric.init(), torch.tensor([0, 0, 1, 1]), (None, torch.tensor([0, 1, 1, 1]))))
    tensor([[1, 0],
            [1, 2]])
    """
    read = Reading(where="confusion_matrix", classes=classes, threshold=threshold, ignore_index=ignore_index, axis=axis)

    def compute(matrix: Tensor) -> Tensor:
        if normalize is None:
            return matrix
        axes = {"true": [1], "pred": [0], "all": [0, 1]}[normalize]
        return matrix.float() / matrix.sum(dim=axes, keepdim=True).clamp(min=1)

    def of_nothing() -> Tensor:
        return torch.full((classes or 0, classes or 0), float("nan"))

    return summed(name, lambda outputs, batch: read(outputs, batch).confusion(), compute, of_nothing)
