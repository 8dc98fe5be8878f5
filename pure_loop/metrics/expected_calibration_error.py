"""How far confidence and accuracy are apart: the expected calibration error."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch, Outputs
from pure_loop._internal.weights import wide
from pure_loop.metrics._base import Metric, summed
from pure_loop.metrics._classes import class_axis
from pure_loop.ranges import AtLeast, Name, Number, checked

__all__ = ["expected_calibration_error"]


@checked
def expected_calibration_error(
    bins: Annotated[int, AtLeast(1)] = 15,
    *,
    probabilities: bool = False,
    ignore_index: Annotated[int | None, Number()] = -100,
    axis: Annotated[int | None, Number()] = None,
    name: Annotated[str, Name()] = "expected_calibration_error",
) -> Metric:
    """The mean distance between confidence and accuracy, in bins of equal width (arXiv 1706.04599).

    The confidence is the highest probability of a class. In each bin the mean confidence and the fraction of right
    predictions are compared; bins count by how many targets fall into them.

    Outputs are logits of shape (n, classes, ...) or (n, ..., classes), targets class indices of shape (n, ...).

    Args:
        bins: into how many bins confidences from 0 to 1 fall.
        probabilities: whether outputs are probabilities, and not logits.
        ignore_index: the class index of targets that do not count; None: all count.
        axis: where classes lie in outputs, such as 1 or -1; None: where the shape of the targets says.
        name: the metric's name.

    Raises:
        ArgumentError, ArgumentTypeError: a setting out of range, or of another type.
        DataError: (a ValueError, in evaluation) outputs or targets that do not fit.

    >>> import torch
    >>> metric = expected_calibration_error(probabilities=True)
    >>> sure, half = torch.tensor([[0.9, 0.1], [0.1, 0.9]]), torch.tensor([0, 0])
    >>> metric.compute(metric.update(metric.init(), sure, (None, half)))
    tensor(0.4000)
    """

    def count(outputs: Outputs, batch: Batch) -> Tensor:
        """How many targets count, their confidences and how many are right, by bin: (3, bins)."""
        along, targets = class_axis("expected_calibration_error", outputs, batch, axis), batch[1]
        scores = wide(outputs)
        confidences, predicted = (scores if probabilities else scores.softmax(dim=along)).max(dim=along)
        counted = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
        edges = torch.linspace(0, 1, bins + 1, dtype=scores.dtype, device=scores.device)[1:-1]
        index = torch.bucketize(confidences.contiguous(), edges, right=True).flatten()
        values = torch.stack([counted, confidences * counted, (predicted == targets) & counted]).flatten(1)
        return torch.zeros(3, bins, dtype=values.dtype, device=values.device).index_add(1, index, values)

    def compute(totals: Tensor) -> Tensor:
        targets, confidence, right = totals
        error: Tensor = ((confidence - right).abs().sum() / targets.sum()).float()
        return error

    return summed(name, count, compute)
