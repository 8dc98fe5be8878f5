"""Any metric of torchmetrics, with its state in the State and merged over ranks."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch, Outputs
from pure_loop.errors import ArgumentTypeError, MissingExtraError
from pure_loop.metrics._base import Metric
from pure_loop.metrics._torchmetrics import Measure, Own, States, emptied, machinery
from pure_loop.model.kept import Kept
from pure_loop.random.seeds import seeded_all
from pure_loop.ranges import Name, checked

__all__ = ["from_torchmetrics"]


@checked
def from_torchmetrics(
    metric: Measure,
    *,
    outputs: Callable[[Outputs], Outputs] | None = None,
    targets: Callable[[Batch], object] | None = None,
    name: Annotated[str | None, Name()] = None,
) -> Metric:
    """A metric, or collection, of torchmetrics: ``metric.update(outputs, targets)`` for each microbatch.

    Its state is the accumulator, so it is a value as any other: the object that was passed stays as it was, and ranks
    are merged here and not by torchmetrics. That holds for what it declares (``add_state``), and for numbers, tensors
    and lists in plain attributes and buffers, also of metrics in it. A metric of which a state can't be merged (it is
    reduced by a mean or by a function of its own, or isn't declared) serves on one rank. Metrics of a collection are
    each updated (no ``compute_groups``).

    A value that is a mapping, such as that of a collection or of ``MeanAveragePrecision``, has several names in
    loggers.

    Args:
        metric: an instance, such as ``torchmetrics.classification.MulticlassAUROC(10)``.
        outputs: ``outputs -> predictions``, what ``update`` is called with first; None: the outputs as they are.
        targets: ``batch -> targets``, what comes second; None: the targets of a batch ``(inputs, targets)``. Where they
            are None ``update`` is called with the predictions alone.
        name: the metric's name; None: that of its class.

    Raises:
        ArgumentTypeError: ``metric`` is no instance of a metric of torchmetrics.
        ArgumentError: it keeps what no accumulator can hold: metrics in a plain list, an object, a value that it
            compares with the next one (``MinMaxMetric``), something outside of its attributes. A trial of two updates
            with random numbers shows it; where none fit the metric, the first updates and values do.
        MissingExtraError: torchmetrics is not installed: ``pip install 'pure_loop[torchmetrics]'``.

    >>> import torch, torchmetrics
    >>> metric = from_torchmetrics(torchmetrics.MeanSquaredError())
    >>> metric.compute(metric.update(metric.init(), torch.tensor([1.0, 3.0]), (None, torch.zeros(2))))
    tensor(5.)
    """
    for function, what in ((outputs, "outputs"), (targets, "targets")):
        if function is not None and not callable(function):
            raise ArgumentTypeError(f"from_torchmetrics: {what}={function!r} is not a function.")
    _refuse_others(metric)
    class_name = type(metric).__name__
    own = Own.of(metric)

    def update(states: States, outputs_of_model: Outputs, batch: Batch) -> States:
        predictions = outputs_of_model if outputs is None else outputs(outputs_of_model)
        right = batch[1] if targets is None else targets(batch)
        return own.updated(states, (predictions,) if right is None else (predictions, right))

    def compute(states: States) -> object:
        return own.computed(states) if states else torch.tensor(float("nan"))  # there was no microbatch

    with seeded_all(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a trial on a few random numbers
        tried = _try(metric, own)
    return Metric(name or class_name, dict, update, compute, merge=own.merged if own.are_mergeable(tried) else None)


def _refuse_others(metric: object) -> None:
    """
    Raises:
        ArgumentTypeError, MissingExtraError: it is no metric of torchmetrics, which may not be installed.
    """
    package = sys.modules.get("torchmetrics")
    if package is None:
        from importlib.util import find_spec

        if find_spec("torchmetrics") is None:
            raise MissingExtraError(
                "from_torchmetrics needs the package 'torchmetrics', which is not installed: "
                "pip install 'pure_loop[torchmetrics]'."
            )
    elif isinstance(metric, package.Metric | package.MetricCollection):
        return
    text = f"the class {metric.__name__}" if isinstance(metric, type) else f"{metric!r} of type {type(metric).__name__}"
    raise ArgumentTypeError(
        f"from_torchmetrics: metric is {text}; give an instance of a metric of torchmetrics, such as "
        "torchmetrics.classification.MulticlassAUROC(10)."
    )


def _try(metric: Measure, own: Own) -> States:
    """Two updates and a value, twice, of numbers that the metric may be of; where none fit, batches will show it.

    Returns:
        The states; none if no numbers fit.

    Raises:
        ArgumentError: it keeps states where they can't be carried, or has another value than by itself.
    """
    for module in metric.modules():
        for name, value in vars(module).items():
            if name not in machinery() and _has_metric(value):
                raise own.refusal(
                    f"it keeps metrics in the {type(value).__name__} self.{name}, where their states are not found: "
                    "use a torch.nn.ModuleList, or a ModuleDict."
                )
    for arguments in _trials(metric):
        alone = emptied(metric)
        try:
            with seeded_all(0), torch.no_grad():
                alone.update(*arguments)
                alone.update(*arguments)
                wanted = alone.compute()
        except Exception:  # these are no predictions and targets of this metric
            continue
        for _ in range(2):  # the second time nothing is left of the first one
            with seeded_all(0):
                states = own.updated(own.updated({}, arguments), arguments)
                value = own.computed(states)
            if Kept.of({"value": wanted}, ()).changed({"value": value}, ()):
                raise own.refusal(
                    f"two updates and a value come to {value!r} from its states, and to {wanted!r} by itself: it keeps "
                    "something outside of its attributes. Declare it, self.add_state(...)."
                )
        return states
    return {}


def _has_metric(value: object) -> bool:
    """Whether a container holds a metric."""
    if isinstance(value, dict):
        value = list(value.values())
    package = sys.modules["torchmetrics"]
    kinds = package.Metric | package.MetricCollection
    return isinstance(value, list | tuple | set | deque) and any(isinstance(v, kinds) or _has_metric(v) for v in value)


def _trials(metric: Measure) -> Iterator[tuple[Tensor, ...]]:
    """Predictions and targets of 4 samples, as metrics of classes, of numbers and of one tensor take them."""
    settings = [vars(module) for module in metric.modules()]
    sizes = [values.get(name) for values in settings for name in ("num_classes", "num_labels", "num_outputs")]
    for size in dict.fromkeys([*(size for size in sizes if type(size) is int and 0 < size < 100), 3]):
        classes = torch.arange(4) % size
        yield torch.rand(4, size).softmax(dim=1), classes
        yield torch.rand(4, size), torch.randint(2, (4, size))
        yield torch.rand(4, size), torch.rand(4, size)
    yield torch.rand(4), torch.tensor([0, 1, 1, 0])
    yield torch.rand(4), torch.rand(4)
    yield (torch.rand(4),)
