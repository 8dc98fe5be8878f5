"""Metrics as values: an accumulator goes in, another comes out, and a number at the end.

Accumulators are tensors on the device, so evaluating waits for nothing; a metric is read where it is
used. Every metric weighs samples equally, so the result does not depend on how they were batched.

May import ``task`` and ``ranges``. Begin with ``_base.py``; ``make new-metric NAME=...`` writes a skeleton.
"""

# Generated from the modules by docs/generate.py (make docs); only the docstring is written by hand.

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily

if TYPE_CHECKING:
    from pure_loop.metrics._base import Metric
    from pure_loop.metrics.accuracy import accuracy
    from pure_loop.metrics.confusion_matrix import confusion_matrix
    from pure_loop.metrics.dice import dice, dice_loss
    from pure_loop.metrics.expected_calibration_error import expected_calibration_error
    from pure_loop.metrics.f1 import f1
    from pure_loop.metrics.from_torchmetrics import from_torchmetrics
    from pure_loop.metrics.loss import loss
    from pure_loop.metrics.mean import mean
    from pure_loop.metrics.mean_iou import mean_iou
    from pure_loop.metrics.perplexity import perplexity
    from pure_loop.metrics.top_k import top_k

__all__ = [
    "Metric",
    "accuracy",
    "confusion_matrix",
    "dice",
    "dice_loss",
    "expected_calibration_error",
    "f1",
    "from_torchmetrics",
    "loss",
    "mean",
    "mean_iou",
    "perplexity",
    "top_k",
]

if not TYPE_CHECKING:
    __getattr__ = _lazily(
        __name__,
        {
            "_base": ("Metric",),
            "dice": ("dice_loss",),
        },
        __all__,
    )


def __dir__() -> list[str]:
    return __all__
