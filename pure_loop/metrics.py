"""Metrics as values: an accumulator goes in, another comes out, and a number at the end.

Accumulators are tensors on the device, so evaluating waits for nothing; a metric is read where it is
used. Every metric weighs samples equally, so the result does not depend on how they were batched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError

__all__ = ["DEFAULT_NAMES", "Metric", "accuracy", "as_metrics", "default_metrics", "is_classification", "loss", "mean"]


@attrs.frozen
class Metric:
    """A metric of ``(outputs, batch)``, accumulated over batches.

    Args:
        name: its key in ``state.metrics[label]``.
        init: ``() -> accumulator``, any pytree.
        update: ``(accumulator, outputs, batch) -> accumulator``; pure.
        compute: ``accumulator -> value``.
        of_loss: ``update`` is given ``(loss, weight)`` of each microbatch in place of the outputs.
        merge: ``(accumulator, accumulator) -> accumulator``, of two parts of the data; what several ranks need.

    >>> import torch
    >>> worst = Metric("worst", lambda: torch.tensor(-torch.inf),
    ...                lambda acc, outputs, batch: torch.maximum(acc, (outputs - batch[1]).abs().max()),
    ...                lambda acc: acc, merge=torch.maximum)
    >>> worst.compute(worst.update(worst.init(), torch.tensor([1.0, 5.0]), (None, torch.tensor([1.0, 2.0]))))
    tensor(3.)
    """

    name: str
    init: Callable[[], Any]
    update: Callable[[Any, Any, Any], Any]
    compute: Callable[[Any], Any]
    of_loss: bool = False
    merge: Callable[[Any, Any], Any] | None = None


MetricsLike: TypeAlias = "Mapping[str, Metric] | Sequence[Metric] | Metric | None"


def _wide(values: Tensor) -> torch.dtype:
    """What sums are kept in: half precision would lose small numbers, and float64 is not to be rounded."""
    return torch.float64 if values.dtype is torch.float64 else torch.float32


def _add(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    return one[0] + other[0], one[1] + other[1]


def _quotient(accumulator: tuple[Any, Any]) -> Any:
    return accumulator[0] / accumulator[1]


def loss(name: str = "loss") -> Metric:
    """The loss of the run's task: the mean over microbatches, weighed as in training.

    Evaluators without ``metrics`` measure it by themselves; with ``metrics`` of their own it is listed with them.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> both = [loss(), mean(lambda outputs, batch: (outputs - batch[1]).abs(), "mae")]
    >>> state = pl.run(pl.evaluate(torch.nn.Linear(2, 1), {"test": pl.Evaluator(data, metrics=both)},
    ...                            loss=torch.nn.functional.mse_loss))
    >>> list(state.metrics["test"])
    ['loss', 'mae']
    """

    def update(accumulator: tuple[Any, Any], measured: Any, batch: Any) -> tuple[Any, Any]:
        value, weight = measured
        return accumulator[0] + value.to(_wide(value)) * weight, accumulator[1] + weight

    return Metric(name, lambda: (0.0, 0.0), update, _quotient, of_loss=True, merge=_add)


def mean(function: Callable[[Any, Any], Tensor], name: str) -> Metric:
    """The mean over all samples of a function that gives one number a sample.

    Args:
        function: ``(outputs, batch) -> tensor``, of shape (n,) or more; every element counts the same.
        name: the metric's name.

    Raises:
        ArgumentTypeError: (a TypeError) where the function gives one number for the whole batch.

    >>> import torch
    >>> error = mean(lambda outputs, batch: (outputs - batch[1]).abs(), "mae")
    >>> acc = error.update(error.init(), torch.tensor([1.0, 4.0]), (None, torch.tensor([1.0, 2.0])))
    >>> error.compute(acc)
    tensor(1.)
    """

    def update(accumulator: tuple[Any, Any], outputs: Any, batch: Any) -> tuple[Any, Any]:
        values = function(outputs, batch)
        if not isinstance(values, Tensor) or not values.ndim:
            what = "a tensor of shape ()" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise ArgumentTypeError(
                f"metric {name!r}: its function gave {what}, and what it gives is one number a sample, of shape (n,): "
                "leave out its .mean(), which would count a smaller last batch as much as the others."
            )
        return accumulator[0] + values.sum(dtype=_wide(values)), accumulator[1] + values.numel()

    return Metric(name, lambda: (0.0, 0), update, _quotient, merge=_add)


def is_classification(outputs: Any, batch: Any) -> bool:
    """Whether outputs are scores of classes, (n, classes, ...), and targets class indices, (n, ...)."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        return False
    targets = batch[1]
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.is_floating_point()
        and targets.dtype in (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)
        and outputs.ndim == targets.ndim + 1
        and outputs.shape[1] > 1
        and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    )


def accuracy(name: str = "accuracy") -> Metric:
    """The fraction of samples whose highest score is at the right class.

    Outputs are scores of shape (n, classes, ...), targets class indices of shape (n, ...). Evaluators
    without ``metrics`` measure it by themselves where batches look like that.

    >>> import torch
    >>> metric = accuracy()
    >>> scores, classes = torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0])
    >>> metric.compute(metric.update(metric.init(), scores, (None, classes)))
    tensor(0.5000)
    """

    def right(outputs: Any, batch: Any) -> Tensor:
        if not is_classification(outputs, batch):
            raise DataError(
                "accuracy needs outputs of scores, (n, classes, ...), and a batch (inputs, targets) with class "
                "indices, (n, ...). For anything else write pl.metrics.mean(lambda outputs, batch: ..., 'accuracy')."
            )
        matches: Tensor = outputs.argmax(dim=1) == batch[1]
        return matches

    return mean(right, name)


DEFAULT_NAMES = ("loss", "accuracy")
"""What :func:`default_metrics` may be named."""


def default_metrics(outputs: Any, batch: Any) -> tuple[Metric, ...]:
    """What an evaluator without ``metrics`` measures, judging by its first outputs."""
    return (loss(), accuracy()) if is_classification(outputs, batch) else (loss(),)


def as_metrics(given: MetricsLike, label: str) -> tuple[Metric, ...] | None:
    """An evaluator's ``metrics=`` as a tuple; None means the loss, and accuracy where it is defined."""
    if given is None:
        return None
    if isinstance(given, Metric):
        return (given,)
    if not isinstance(given, Mapping | list | tuple):
        _refuse_metric(given, label)
    if isinstance(given, Mapping):
        for metric in given.values():
            if not isinstance(metric, Metric):
                _refuse_metric(metric, label)
        given = [attrs.evolve(metric, name=name) for name, metric in given.items()]
    metrics = tuple(given)
    for metric in metrics:
        if not isinstance(metric, Metric):
            _refuse_metric(metric, label)
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise ArgumentError(f"evaluator {label!r} has two metrics of one name: {names}.")
    return metrics


def _refuse_metric(given: object, label: str) -> NoReturn:
    raise ArgumentTypeError(
        f"evaluator {label!r}: {given!r} in metrics is no metric. Write metrics=[pl.metrics.accuracy()], or "
        "pl.metrics.mean(function, 'name') of a function of (outputs, batch) that gives one number a sample."
    )
