"""What F1, Dice and intersection over union share: a score of each class from three counts, and its mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.weights import wide
from pure_loop.metrics._base import Metric, plus
from pure_loop.metrics._classes import Reading

__all__ = ["of_overlap"]


def of_overlap(
    read: Reading, score: Callable[[Tensor, Tensor, Tensor], Tensor], average: str | None, name: str
) -> Metric:
    """A metric of how far the targets of a class and its predictions overlap.

    Args:
        read: how outputs and targets are read.
        score: of ``(right, predicted, targets)``, counts by class: the score of each, NaN where it is not defined.
        average: ``"macro"``: the mean over the classes that occur; ``"weighted"``: each by its targets; ``"micro"``:
            the score of all classes' counts together; ``"binary"``: that of class 1; None: a score for each class.
        name: the metric's.
    """

    def update(counts: Any, outputs: Any, batch: Any) -> Any:
        return counts + read(outputs, batch).counts()

    def compute(counts: Any) -> Any:
        if not isinstance(counts, Tensor):
            return torch.tensor(float("nan"))  # there was no microbatch
        counts = wide(counts)
        if average == "micro":
            return score(*counts.sum(dim=1)).float()
        scores = score(*counts)
        defined = ~scores.isnan()
        scores = torch.where(defined, scores, 0)
        if average is None or average == "binary":
            return (scores if average is None else scores[1]).float()
        weights = counts[2] if average == "weighted" else defined.to(scores.dtype)
        return ((weights * scores).sum() / weights.sum()).float()

    return Metric(name, lambda: 0, update, compute, merge=plus)
