"""The loss of the task, over all data of an evaluator."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from pure_loop._internal.weights import counted_loss, wide, wide_dtype
from pure_loop.metrics._base import Metric, quotient
from pure_loop.ranges import Name, checked

__all__ = ["loss"]


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

    def update(accumulator: tuple[Any, Any], measured: Any, batch: Any) -> tuple[Any, Any]:
        value, weight = measured
        value = value.to(wide_dtype(value))
        if weight is None:
            return accumulator[0] + value, None
        if isinstance(weight, Tensor):
            return accumulator[0] + counted_loss(value, weight) * weight.to(value.dtype), accumulator[1] + wide(weight)
        return accumulator[0] + value * weight, accumulator[1] + weight

    def compute(accumulator: tuple[Any, Any]) -> Any:
        total, weight = accumulator
        if weight is None:
            return total
        result = quotient(accumulator)
        return result.to(total.dtype) if isinstance(total, Tensor) else result

    def merge(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        weights = one[1], other[1]
        return one[0] + other[0], None if None in weights else sum(weights)

    return Metric(name, lambda: (0.0, 0.0), update, compute, of_loss=True, merge=merge)
