"""How often the class of a target has the highest score."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from pure_loop.metrics._base import Metric
from pure_loop.metrics._classes import fraction_of_targets
from pure_loop.ranges import Name, Number, checked

__all__ = ["accuracy"]


@checked
def accuracy(
    name: Annotated[str, Name()] = "accuracy",
    *,
    ignore_index: Annotated[int | None, Number()] = -100,
    axis: Annotated[int | None, Number()] = None,
) -> Metric:
    """The fraction of targets with the highest score at the right class.

    Outputs are scores of shape (n, classes, ...) or (n, ..., classes), targets class indices of shape (n, ...).
    Evaluators without ``metrics`` measure it by themselves where batches look like that; they ignore the targets that
    the loss ignores.

    Args:
        name: the metric's name.
        ignore_index: the class index of targets that do not count, as in torch's losses; None: all count.
        axis: where classes lie in outputs, such as 1 or -1; None: where the shape of the targets says.

    Raises:
        ArgumentTypeError: (a TypeError) ignore_index or axis that is no whole number.
        DataError: (a ValueError, in evaluation) outputs or targets of another shape, or of a shape that both axes fit.

    >>> import torch
    >>> metric = accuracy()
    >>> scores, classes = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0, -100])
    >>> metric.compute(metric.update(metric.init(), scores, (None, classes)))
    tensor(0.5000)
    """

    def right(scores: Tensor, targets: Tensor, along: int) -> Tensor:
        return scores.argmax(dim=along) == targets

    return fraction_of_targets("accuracy", right, ignore_index, axis, name)
