"""Metrics of classes: where outputs have them, which one they predict, how often each was right, and its score."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch, Outputs
from pure_loop._internal.weights import is_readable, wide
from pure_loop.errors import DataError
from pure_loop.metrics._base import Metric, Ratio, add, quotient, summed

# The dtypes of class indices.
INDICES = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)


def targets_of(batch: Batch) -> Tensor | None:
    """The targets of a batch ``(inputs, targets)``; None where it is another batch, or they are no tensor."""
    targets = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
    return targets if isinstance(targets, Tensor) else None


def class_axes(outputs: Outputs, batch: Batch) -> tuple[int, ...]:
    """The axes of outputs along which classes may lie, 1 or the last one, as the shape of class indices allows.

    Args:
        outputs: scores of classes, of shape (n, classes, ...) or (n, ..., classes); anything else has no axes.
        batch: ``(inputs, targets)`` with class indices of shape (n, ...).

    >>> class_axes(torch.zeros(2, 3, 5), (None, torch.zeros(2, 5).long()))
    (1,)
    >>> class_axes(torch.zeros(2, 5, 5), (None, torch.zeros(2, 5).long()))
    (1, 2)
    """
    targets = targets_of(batch)
    if not (
        isinstance(outputs, Tensor)
        and targets is not None
        and outputs.is_floating_point()
        and targets.dtype in INDICES
        and outputs.ndim == targets.ndim + 1
        and outputs.ndim > 1
    ):
        return ()
    shape = outputs.shape
    axes = dict.fromkeys((1, outputs.ndim - 1))
    return tuple(axis for axis in axes if shape[axis] > 1 and shape[:axis] + shape[axis + 1 :] == targets.shape)


def class_axis(where: str, outputs: Outputs, batch: Batch, axis: int | None) -> int:
    """The axis along which classes lie.

    Args:
        where: the metric, for errors.
        outputs, batch: as in :func:`class_axes`.
        axis: the one that the user names; None: the one that the shapes allow.

    Raises:
        DataError: there is none, or the shapes allow two.
    """
    fitting = class_axes(outputs, batch)
    if axis is not None and isinstance(outputs, Tensor):
        fitting = tuple(length for length in fitting if length == axis % outputs.ndim)
    if len(fitting) == 1:
        return fitting[0]
    shapes = in_words(outputs, batch)
    if fitting:
        raise DataError(
            f"{where}: classes may lie along axis 1 or along the last one{shapes}. Say which: metrics="
            f"[pl.metrics.loss(), pl.metrics.{where}(axis=-1)] of pl.Evaluator, or axis=1."
        )
    raise DataError(
        f"{where} needs outputs of scores, (n, classes, ...) or (n, ..., classes), and a batch (inputs, targets) with "
        f"class indices, (n, ...){shapes}. Where they are parts of what the model gives, or of a batch, write "
        f"pl.metrics.{where}().on(outputs=lambda outputs: ..., targets=lambda batch: ...), and for all metrics "
        "loss=pl.Task(loss=..., targets=lambda batch: ...); for anything else "
        f"pl.metrics.mean(lambda outputs, batch: ..., {where!r})."
    )


def in_words(outputs: Outputs, batch: Batch) -> str:
    """What outputs and targets are, for errors: ``", and outputs have shape (2, 3), targets (2,) and dtype int64"``."""
    if not isinstance(outputs, Tensor):
        return f", and outputs are a {type(outputs).__name__}"
    text = f", and outputs have shape {tuple(outputs.shape)} and dtype {_dtype(outputs)}"
    targets = targets_of(batch)
    return text if targets is None else f"{text}, targets {tuple(targets.shape)} and dtype {_dtype(targets)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@attrs.frozen
class Predictions:
    """The class that was predicted and the class that is right, for each target of a microbatch.

    Attributes:
        predicted, targets: int64, of the same shape.
        counted: which of them count, bool of the same shape; None: all.
        classes: how many there are.
    """

    predicted: Tensor
    targets: Tensor
    counted: Tensor | None
    classes: int

    def confusion(self) -> Tensor:
        """How often each class (a row) was predicted as each class (a column): int64, (classes, classes)."""
        size = self.classes
        return _histogram(self.targets * size + self.predicted, self.counted, size * size).reshape(size, size)

    def counts(self) -> Tensor:
        """How often each class was predicted and right, was predicted, and was right: int64, (3, classes)."""
        right = self.predicted == self.targets
        if self.counted is not None:
            right = right & self.counted
        return torch.stack(
            [
                _histogram(self.targets, right, self.classes),
                _histogram(self.predicted, self.counted, self.classes),
                _histogram(self.targets, self.counted, self.classes),
            ]
        )


def _histogram(index: Tensor, counted: Tensor | None, size: int) -> Tensor:
    """How often each index from 0 to ``size`` occurs among those that count; int64, (size,)."""
    # torch.bincount waits for the device, and has no shape that can be traced.
    if counted is None:
        ones = torch.ones_like(index)
    else:
        index, ones = torch.where(counted, index, 0), counted.to(torch.int64)
    return torch.zeros(size, dtype=torch.int64, device=index.device).index_add(0, index.flatten(), ones.flatten())


@attrs.frozen(kw_only=True)
class Reading:
    """How a metric of classes reads outputs and targets.

    Attributes:
        where: the metric, for errors.
        classes: how many there are; None: as many as outputs have scores.
        threshold: outputs are one score for each target, and larger ones predict class 1; None: scores of classes.
        ignore_index: the class index of targets that do not count; None: all count.
        axis: where classes lie in outputs; None: where the shapes say.
    """

    where: str
    classes: int | None = None
    threshold: float | None = None
    ignore_index: int | None = -100
    axis: int | None = None

    def __call__(self, outputs: Outputs, batch: Batch) -> Predictions:
        """What outputs predict and what is right.

        Outputs are scores of classes, as in :func:`class_axis`; or class indices of the targets' shape; or one score
        for each target, where there is a threshold.

        Raises:
            DataError: another shape, dtype or number of classes, or a target that is no class.
        """
        where, classes, targets = self.where, self.classes, targets_of(batch)
        if self.threshold is not None:
            predicted, targets = self._above(self.threshold, outputs, targets)
            classes = 2
        elif targets is not None and _are_indices(outputs, targets):
            if classes is None:
                raise DataError(
                    f"{where}: outputs are class indices, of shape {tuple(outputs.shape)}, which do not say how many "
                    f"classes there are: write pl.metrics.{where}(classes=10)."
                )
            predicted = outputs.to(torch.int64)
            refuse_outside(where, "output", predicted, classes, None)
        else:
            axis = class_axis(where, outputs, batch, self.axis)
            targets = targets_of(batch)
            assert targets is not None
            if classes is not None and outputs.shape[axis] != classes:
                raise DataError(
                    f"{where}(classes={classes}): outputs of shape {tuple(outputs.shape)} have {outputs.shape[axis]} "
                    f"classes along axis {axis}. Without classes= there are as many as outputs have."
                )
            classes, predicted = outputs.shape[axis], outputs.argmax(dim=axis)
        counted = those_that_count(targets, self.ignore_index)
        refuse_outside(where, "target", targets, classes, counted)
        return Predictions(predicted, targets.to(torch.int64), counted, classes)

    def _above(self, threshold: float, outputs: Outputs, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Class 1 where a score is above the threshold, in the targets' shape; and the targets."""
        if isinstance(outputs, Tensor) and targets is not None and outputs.is_floating_point():
            shape = outputs.shape
            if targets.shape in ((shape, shape[:-1]) if shape[-1:] == (1,) else (shape,)):
                return (outputs > threshold).reshape(targets.shape).to(torch.int64), targets
        raise DataError(
            f"{self.where}(threshold={threshold:g}) needs outputs with one score for each target, of the targets' "
            f"shape or with a further axis of length 1{in_words(outputs, (None, targets))}. Leave threshold out for "
            "scores of several classes."
        )


def _are_indices(outputs: Outputs, targets: Tensor) -> bool:
    return (
        isinstance(outputs, Tensor)
        and outputs.dtype in INDICES
        and targets.dtype in INDICES
        and outputs.shape == targets.shape
    )


def _outside(indices: Tensor, classes: int, counted: Tensor | None) -> Tensor | None:
    """An index, or a number, that is no class; None: there is none, or only the device knows."""
    if not is_readable(indices):
        return None
    wrong = (indices < 0) | (indices >= classes)
    if indices.is_floating_point():
        wrong |= indices != indices.round()
    if counted is not None:
        wrong &= counted
    return indices[wrong][0] if wrong.any() else None


def refuse_outside(where: str, what: str, indices: Tensor, classes: int, counted: Tensor | None) -> None:
    """
    Raises:
        DataError: an index, or a number, that is no class.
    """
    index = _outside(indices, classes, counted)
    if index is not None:
        raise DataError(
            f"{where}: the {what} {index.item()} is no class: with {classes} classes they are 0 to {classes - 1}. "
            "Targets that do not count have the value of ignore_index."
        )


def those_that_count(targets: Tensor, ignore_index: int | None) -> Tensor | None:
    """Which targets count, bool in their shape; None: all."""
    return None if ignore_index is None else targets != ignore_index


def fraction_of_targets(
    where: str, right: Callable[[Tensor, Tensor, int], Tensor], ignore_index: int | None, axis: int | None, name: str
) -> Metric:
    """The fraction of the targets that count of which outputs are right.

    Args:
        where: the metric, for errors.
        right: ``(scores, targets, axis of the classes) -> bool`` in the shape of the targets.
        ignore_index: the class index of targets that do not count; None: all count.
        axis: where classes lie in outputs; None: where the shapes say.
        name: the metric's name.
    """

    def update(accumulator: Ratio, outputs: Outputs, batch: Batch) -> Ratio:
        along, targets = class_axis(where, outputs, batch, axis), batch[1]
        hits, counted = right(outputs, targets, along), those_that_count(targets, ignore_index)
        if counted is None:
            return accumulator[0] + hits.sum(), accumulator[1] + hits.numel()
        return accumulator[0] + (hits & counted).sum(), accumulator[1] + counted.sum()

    return Metric(name, lambda: (0, 0), update, quotient, merge=add)


def of_counts(
    score: Callable[[Tensor, Tensor, Tensor], Tensor], read: Reading, average: str | None, name: str
) -> Metric:
    """A metric of how far the targets of a class and its predictions overlap: a score of each class, and its mean.

    Args:
        score: of ``(right, predicted, targets)``, counts by class: the score of each, NaN where it is not defined.
        read: how outputs and targets are read.
        average: ``"macro"``: the mean over the classes that occur; ``"weighted"``: each by its targets; ``"micro"``:
            the score of all classes' counts together; ``"binary"``: that of class 1; None: a score for each class.
        name: the metric's.
    """

    def compute(counts: Tensor) -> Tensor:
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

    return summed(name, lambda outputs, batch: read(outputs, batch).counts(), compute)
