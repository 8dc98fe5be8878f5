"""A metric of tensors, in parts, as an evaluation and several ranks measure it."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from hypothesis import strategies as st

from pure_loop.metrics import Metric

__all__ = ["measured", "splits"]

splits = st.lists(st.integers(1, 19), max_size=3)
"""Places where samples are cut into microbatches."""


def measured(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor, cuts: Any = ()) -> Any:
    """Its value, which has to be the same in the order of microbatches, in reverse and as ranks put it together."""
    places = sorted({cut for cut in cuts if cut < len(targets)})
    parts = list(zip(outputs.tensor_split(places), targets.tensor_split(places), strict=True))
    assert metric.merge is not None

    def update(accumulator: Any, part: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return metric.update(accumulator, part[0], (None, part[1]))

    values = [
        metric.compute(reduce(update, parts, metric.init())),
        metric.compute(reduce(update, reversed(parts), metric.init())),
        metric.compute(reduce(metric.merge, [update(metric.init(), part) for part in parts])),
    ]
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], equal_nan=True)
    return values[0]
