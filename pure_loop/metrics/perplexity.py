"""Perplexity: e to the mean negative log likelihood of a token, over all tokens."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch, Outputs
from pure_loop._internal.weights import wide_dtype
from pure_loop.metrics._base import Metric, Ratio, add, quotient
from pure_loop.metrics._classes import class_axes, class_axis, refuse_outside
from pure_loop.ranges import Name, Number, checked

__all__ = ["perplexity"]


@checked
def perplexity(
    *,
    ignore_index: Annotated[int | None, Number()] = -100,
    axis: Annotated[int | None, Number()] = None,
    name: Annotated[str, Name()] = "perplexity",
) -> Metric:
    """``exp(sum of negative log likelihoods / tokens)``: each token counts the same, however long its batch is.

    Outputs are logits of shape (n, tokens, classes) or (n, classes, tokens), or of any other that :func:`accuracy`
    takes; targets are class indices of shape (n, tokens). For a model that predicts the next token of its own inputs::

        pl.metrics.perplexity().on(
            outputs=lambda outputs: outputs.logits[:, :-1], targets=lambda batch: batch["labels"][:, 1:]
        )

    Args:
        ignore_index: the class index of targets that do not count, such as padding; None: all count.
        axis: where classes lie in outputs, such as 1 or -1; None: where the shape of the targets
            says, the last one where both fit.
        name: the metric's name.

    Raises:
        ArgumentError, ArgumentTypeError: a setting out of range, or of another type.
        DataError: (a ValueError, in evaluation) outputs or targets that do not fit, or a target that is no class.

    >>> import torch
    >>> metric = perplexity()
    >>> metric.compute(metric.update(metric.init(), torch.zeros(2, 3, 8), (None, torch.zeros(2, 3).long())))
    tensor(8.0000)
    """

    def update(accumulator: Ratio, outputs: Outputs, batch: Batch) -> Ratio:
        last = axis is None and len(class_axes(outputs, batch)) == 2
        along, targets = class_axis("perplexity", outputs, batch, -1 if last else axis), batch[1]
        counted = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
        refuse_outside("perplexity", "target", targets, outputs.shape[along], counted)
        scores = outputs.to(wide_dtype(outputs))
        index = torch.where(counted, targets, 0).to(torch.int64).unsqueeze(along)
        likelihoods = scores.gather(along, index).squeeze(along) - scores.logsumexp(dim=along)
        total = torch.where(counted, -likelihoods, 0).sum()
        return accumulator[0] + total, accumulator[1] + counted.sum()

    def compute(accumulator: Ratio) -> Tensor:
        return torch.as_tensor(quotient(accumulator)).exp()

    return Metric(name, lambda: (0.0, 0), update, compute, merge=add)
