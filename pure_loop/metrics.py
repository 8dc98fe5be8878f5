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

from pure_loop._weights import counted_loss, is_number, wide, wide_dtype
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.task import OnTargets, Task

__all__ = ["DEFAULT_NAMES", "Metric", "accuracy", "as_metrics", "class_axes", "default_metrics", "loss", "mean"]


@attrs.frozen
class Metric:
    """A metric of ``(outputs, batch)``, accumulated over batches.

    Args:
        name: its key in ``state.metrics[label]``.
        init: ``() -> accumulator``, any pytree.
        update: ``(accumulator, outputs, batch) -> accumulator``; pure.
        compute: ``accumulator -> value``.
        of_loss: ``update`` is given ``(loss, weight)`` of each microbatch in place of the outputs, of those alone whose
            weight is not 0. A weight that only a device knows is a tensor, and the loss is 0 where it is 0. It is None
            where the loss is one of torch's with ``reduction="sum"``.
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


def _add(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    return one[0] + other[0], one[1] + other[1]


def _quotient(accumulator: tuple[Any, Any]) -> Any:
    total, count = accumulator
    if is_number(count) and count == 0:
        return torch.tensor(float("nan"))  # a mean over nothing
    return total / count


def loss(name: str = "loss") -> Metric:
    """The loss of the run's task: the mean over microbatches, weighed as in training.

    Where it is one of torch's losses with ``reduction="sum"``, the sum over all data. Microbatches of weight 0 count
    for nothing; where there are no others the mean is NaN.

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
        found = _quotient(accumulator)
        return found.to(total.dtype) if isinstance(total, Tensor) else found

    def merge(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        weights = one[1], other[1]
        return one[0] + other[0], None if None in weights else sum(weights)

    return Metric(name, lambda: (0.0, 0.0), update, compute, of_loss=True, merge=merge)


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
        return accumulator[0] + values.sum(dtype=wide_dtype(values)), accumulator[1] + values.numel()

    return Metric(name, lambda: (0.0, 0), update, _quotient, merge=_add)


_INDICES = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)


def class_axes(outputs: Any, batch: Any) -> tuple[int, ...]:
    """The axes of outputs along which classes may lie, 1 or the last one, as the shape of class indices allows.

    Args:
        outputs: scores of classes, of shape (n, classes, ...) or (n, ..., classes); anything else has no axes.
        batch: ``(inputs, targets)`` with class indices of shape (n, ...).

    >>> class_axes(torch.zeros(2, 3, 5), (None, torch.zeros(2, 5).long()))
    (1,)
    >>> class_axes(torch.zeros(2, 5, 5), (None, torch.zeros(2, 5).long()))
    (1, 2)
    """
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        return ()
    targets = batch[1]
    if not (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.is_floating_point()
        and targets.dtype in _INDICES
        and outputs.ndim == targets.ndim + 1
        and outputs.ndim > 1
    ):
        return ()
    shape = outputs.shape
    axes = dict.fromkeys((1, outputs.ndim - 1))
    return tuple(axis for axis in axes if shape[axis] > 1 and shape[:axis] + shape[axis + 1 :] == targets.shape)


def accuracy(name: str = "accuracy", *, ignore_index: int | None = -100, axis: int | None = None) -> Metric:
    """The fraction of targets whose highest score is at the right class.

    Outputs are scores of shape (n, classes, ...) or (n, ..., classes), targets class indices of shape (n, ...).
    Evaluators without ``metrics`` measure it by themselves where batches look like that; they ignore the targets that
    the loss ignores.

    Args:
        name: the metric's name.
        ignore_index: the class index of targets that do not count, as in torch's losses; None: all count.
        axis: where classes lie in outputs, such as 1 or -1; None: where the shape of the targets says.

    Raises:
        ArgumentTypeError: (a TypeError) ignore_index or axis that is no whole number.
        DataError: (a ValueError, in evaluation) outputs or targets of another shape, or of a shape that both axes fit.

    >>> import torch
    >>> metric = accuracy()
    >>> scores, classes = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0, -100])
    >>> metric.compute(metric.update(metric.init(), scores, (None, classes)))
    tensor(0.5000)
    """
    for argument, value in (("ignore_index", ignore_index), ("axis", axis)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ArgumentTypeError(f"accuracy({argument}={value!r}): give a whole number, or None.")

    def update(accumulator: tuple[Any, Any], outputs: Any, batch: Any) -> tuple[Any, Any]:
        targets: Any = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        right: Tensor = outputs.argmax(dim=_axis(outputs, batch, axis)) == targets
        if ignore_index is None:
            return accumulator[0] + right.sum(), accumulator[1] + right.numel()
        counted = targets != ignore_index
        return accumulator[0] + (right & counted).sum(), accumulator[1] + counted.sum()

    return Metric(name, lambda: (0, 0), update, _quotient, merge=_add)


def _axis(outputs: Any, batch: Any, axis: int | None) -> int:
    """Where classes lie.

    Raises:
        DataError: nowhere, or it can't be told.
    """
    fitting = class_axes(outputs, batch)
    if axis is not None and isinstance(outputs, Tensor):
        fitting = tuple(each for each in fitting if each == axis % outputs.ndim)
    if len(fitting) == 1:
        return fitting[0]
    given = ""
    if isinstance(outputs, Tensor):
        given = f", and outputs have shape {tuple(outputs.shape)}"
        if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
            given += f", targets {tuple(batch[1].shape)} and dtype {batch[1].dtype}"
    if fitting:
        raise DataError(
            f"accuracy: classes may lie along axis 1 or along the last one{given}. Say which: metrics="
            "[pl.metrics.loss(), pl.metrics.accuracy(axis=-1)] of pl.Evaluator, or axis=1."
        )
    raise DataError(
        "accuracy needs outputs of scores, (n, classes, ...) or (n, ..., classes), and a batch (inputs, targets) with "
        f"class indices, (n, ...){given}. For anything else write pl.metrics.mean(lambda outputs, batch: ..., "
        "'accuracy')."
    )


DEFAULT_NAMES = ("loss", "accuracy")
"""What :func:`default_metrics` may be named."""


def default_metrics(outputs: Any, batch: Any, task: Task) -> tuple[Metric, ...]:
    """What an evaluator without ``metrics`` measures, judging by its first outputs and by what the loss implies."""
    if not class_axes(outputs, batch):
        return (loss(),)
    implied = task.loss.implied if isinstance(task.loss, OnTargets) else None
    if implied is None or implied.ignore_index is None:
        return loss(), accuracy()
    # The loss has its classes along axis 1, whatever other axis would fit, too.
    return loss(), accuracy(ignore_index=implied.ignore_index, axis=1)


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
