"""The mean over samples of any function of outputs and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from torch import Tensor

from pure_loop._internal.arguments import check_function
from pure_loop._internal.pytree import Batch, Outputs
from pure_loop._internal.weights import wide_dtype
from pure_loop.errors import ArgumentTypeError, DataError
from pure_loop.metrics._base import Metric, Ratio, add, quotient
from pure_loop.ranges import Name, checked

__all__ = ["mean"]


@checked
def mean(function: Callable[[Outputs, Batch], Tensor], name: Annotated[str, Name()]) -> Metric:
    """The mean over all samples of a function that gives one number a sample.

    Args:
        function: ``(outputs, batch) -> tensor``, of shape (n,) or more; every element counts the same.
        name: the metric's name.

    Raises:
        ArgumentTypeError: (a TypeError) where the function doesn't take two arguments, or gives one number for the
            whole batch.
        DataError: (a ValueError, in evaluation) it gives a number for each pair of samples, shape (n, n), of outputs of
            shape (n, 1).

    >>> import torch
    >>> error = mean(lambda outputs, batch: (outputs - batch[1]).abs(), "mae")
    >>> acc = error.update(error.init(), torch.tensor([1.0, 4.0]), (None, torch.tensor([1.0, 2.0])))
    >>> error.compute(acc)
    tensor(1.)
    """

    check_function("what it averages", function, "outputs, batch", where=f"metric {name!r}")

    def update(accumulator: Ratio, outputs: Outputs, batch: Batch) -> Ratio:
        values = function(outputs, batch)
        if not isinstance(values, Tensor) or not values.ndim:
            what = "a tensor of shape ()" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise ArgumentTypeError(
                f"metric {name!r}: its function gave {what}, and what it gives is one number a sample, of shape (n,): "
                "leave out its .mean(), which would count a smaller last batch as much as the others."
            )
        _refuse_pairs(name, values, outputs)
        return accumulator[0] + values.sum(dtype=wide_dtype(values)), accumulator[1] + values.numel()

    return Metric(name, lambda: (0.0, 0), update, quotient, merge=add)


def _refuse_pairs(name: str, values: Tensor, outputs: Outputs) -> None:
    """Refuse what a difference of shapes (n, 1) and (n,) gives."""
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else ()
    if len(shape) == 2 and shape[0] > shape[1] == 1 and values.shape == (shape[0], shape[0]):
        raise DataError(
            f"metric {name!r}: its function gave a number for each pair of samples, shape {tuple(values.shape)}, as "
            f"outputs of shape {shape} and targets of shape ({shape[0]},) do: write outputs.squeeze(-1) in it, "
            "or return values.flatten() where pairs are meant."
        )
