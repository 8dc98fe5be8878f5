"""What an evaluator without metrics of its own measures."""

from __future__ import annotations

from pure_loop._internal.pytree import Batch, Outputs
from pure_loop.metrics._base import Metric
from pure_loop.metrics._classes import class_axes
from pure_loop.metrics.loss import loss
from pure_loop.task import OnTargets, Task

__all__ = ["DEFAULT_NAMES", "default_metrics"]

DEFAULT_NAMES = ("loss", "accuracy")
"""What :func:`default_metrics` may be named."""


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
