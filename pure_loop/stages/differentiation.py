"""Gradients for scripts of your own, and what to write where a forward differentiates and there is no graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from pure_loop._internal.autograd import gradient_of
from pure_loop.errors import LossError, ModelError
from pure_loop.frozendict import FrozenDict
from pure_loop.stages.loss import detached

T = TypeVar("T")


def value_and_grad(
    function: Callable[[FrozenDict[str, Tensor]], T], params: FrozenDict[str, Tensor]
) -> tuple[T, FrozenDict[str, Any]]:
    """``function(params)`` and its gradient, for scripts of your own: eager autograd, no ``.grad`` written.

    Args:
        function: of a mapping of names to tensors; gives a scalar tensor, or ``(tensor, anything)``.
        params: the point.

    Returns:
        What the function gave, without a graph, and the gradient by name (None where it has no part).

    Raises:
        LossError: the value is not a scalar tensor that depends on the parameters.

    >>> value, grads = value_and_grad(lambda p: p["x"] ** 2, FrozenDict(x=torch.tensor(3.0)))
    >>> value, grads["x"]
    (tensor(9.), tensor(6.))
    """
    leaves = FrozenDict((name, tensor.detach().requires_grad_()) for name, tensor in params.items())
    with torch.set_grad_enabled(True):
        result = function(leaves)
        value: Any = result[0] if isinstance(result, tuple) else result
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            raise LossError(
                f"value_and_grad: the function gave {value!r}, and what is differentiated is a tensor of shape () that "
                "depends on the parameters it was given: return loss, or (loss, anything)."
            )
        results = gradient_of(value, list(leaves.values()))
    return detached(result), FrozenDict(zip(leaves, results, strict=True))


@contextmanager
def refusing_to_differentiate(what: str, gradients: bool) -> Iterator[None]:
    """Say what to write, where torch says that there is no graph.

    Raises:
        ModelError: the forward or the loss of an evaluation differentiates.
    """
    try:
        yield
    except RuntimeError as error:
        inference = torch.is_inference_mode_enabled()
        if "does not require grad" not in str(error) or (gradients and not inference):
            raise
        advice = (
            "run the stream outside of torch.inference_mode()"
            if inference
            else "ask for gradients, pl.Evaluator(data, gradients=True) or pl.predict(..., gradients=True)"
        )
        raise ModelError(
            f"the {what} differentiates (torch.autograd.grad), and in evaluation and prediction there is no graph by "
            f"default: {advice}."
        ) from error
