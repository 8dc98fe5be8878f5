"""How often the class of a target is among the k highest scores."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from pure_loop.errors import DataError
from pure_loop.metrics._base import Metric
from pure_loop.metrics._classes import fraction_of_targets
from pure_loop.ranges import AtLeast, Name, Number, checked

__all__ = ["top_k"]


@checked
def top_k(
    k: Annotated[int, AtLeast(1)] = 5,
    *,
    ignore_index: Annotated[int | None, Number()] = -100,
    axis: Annotated[int | None, Number()] = None,
    name: Annotated[str, Name()] = "top_k",
) -> Metric:
    """The fraction of targets with a class among the ``k`` highest scores; with ``k=1`` it is the accuracy.

    Outputs are scores of shape (n, classes, ...) or (n, ..., classes), targets class indices of shape (n, ...).

    Args:
        k: how many of the highest scores, at least 1.
        ignore_index: the class index of targets that do not count; None: all count.
        axis: where classes lie in outputs, such as 1 or -1; None: where the shape of the targets says.
        name: the metric's name.

    Raises:
        ArgumentError, ArgumentTypeError: a setting out of range, or of another type.
        DataError: (a ValueError, in evaluation) outputs or targets that do not fit, or fewer than ``k`` classes.

    >>> import torch
    >>> metric = top_k(2)
    >>> scores, classes = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2])
    >>> metric.compute(metric.update(metric.init(), scores, (None, classes)))
    tensor(0.5000)
    """

    def right(scores: Tensor, targets: Tensor, along: int) -> Tensor:
        if scores.shape[along] < k:
            raise DataError(
                f"top_k(k={k}): outputs of shape {tuple(scores.shape)} have {scores.shape[along]} classes along axis "
                f"{along}, which are fewer: write metrics=[pl.metrics.top_k({scores.shape[along] - 1})]."
            )
        return (scores.topk(k, dim=along).indices == targets.unsqueeze(along)).any(dim=along)

    return fraction_of_targets("top_k", right, ignore_index, axis, name)
