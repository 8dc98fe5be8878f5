"""The loss of the task, over all data of an evaluator.

:func:`default_metrics` is what an evaluator without metrics of its own measures.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from torch import Tensor

from pure_loop._internal.pytree import Batch, Outputs
from pure_loop._internal.weights import counted_loss, wide, wide_dtype
from pure_loop.metrics._base import Metric, Scalar, quotient
from pure_loop.metrics._classes import class_axes
from pure_loop.ranges import Name, checked
from pure_loop.task import OnTargets, Task

__all__ = ["loss"]

DEFAULT_NAMES = ("loss", "accuracy")
"""What :func:`default_metrics` may be named."""

# The loss so far, and its weight; None: of a sum, which has none.
Sum: TypeAlias = "tuple[Scalar, Scalar | None]"


@checked
def loss(name: Annotated[str, Name()] = "loss") -> Metric:
    """The loss of the run's task: the mean over microbatches, weighed as in training.

    Where it is one of torch's losses with ``reduction="sum"``, the sum over all data. Microbatches of weight 0 count
    for nothing; where there are no others the mean is NaN.

    Evaluators without ``metrics`` measure it by themselves; with ``metrics`` of their own it is listed with them.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.metrics import mean
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> both = [loss(), mean(lambda outputs, batch: (outputs - batch[1]).abs(), "mae")]
    >>> state = pl.run(pl.evaluate(torch.nn.Linear(2, 1), {"test": pl.Evaluator(data, metrics=both)},
    ...                            loss=torch.nn.functional.mse_loss))
    >>> list(state.metrics["test"])
    ['loss', 'mae']
    """

    def update(accumulator: Sum, measured: tuple[Tensor, Scalar | None], batch: Batch) -> Sum:
        (total, before), (value, weight) = accumulator, measured
        value = value.to(wide_dtype(value))
        if weight is None:
            return total + value, None
        assert before is not None  # a loss has weights at all batches or at none
        if isinstance(weight, Tensor):
            return total + counted_loss(value, weight) * weight.to(value.dtype), before + wide(weight)
        return total + value * weight, before + weight

    def compute(accumulator: Sum) -> Scalar:
        total, weight = accumulator
        if weight is None:
            return total
        mean = quotient((total, weight))
        return mean.to(total.dtype) if isinstance(mean, Tensor) and isinstance(total, Tensor) else mean

    def merge(a: Sum, b: Sum) -> Sum:
        total = a[0] + b[0]
        return total, None if a[1] is None or b[1] is None else a[1] + b[1]

    return Metric(name, lambda: (0.0, 0.0), update, compute, of_loss=True, merge=merge)


def default_metrics(outputs: Outputs, batch: Batch, task: Task) -> tuple[Metric, ...]:
    """What an evaluator without ``metrics`` measures, judging by its first outputs and by what the loss implies."""
    if not class_axes(outputs, batch):
        return (loss(),)
    from pure_loop.metrics.accuracy import accuracy  # not every run has classes

    implied = task.loss.implied if isinstance(task.loss, OnTargets) else None
    if implied is None or implied.ignore_index is None:
        return loss(), accuracy()
    # The loss has its classes along axis 1, whatever other axis would fit, too.
    return loss(), accuracy(ignore_index=implied.ignore_index, axis=1)
