"""Any metric of torchmetrics, with its state in the State and merged over ranks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from pure_loop.data.batch import tensors_in
from pure_loop.errors import ArgumentTypeError, MissingExtraError
from pure_loop.metrics._base import Metric
from pure_loop.ranges import Name, checked

__all__ = ["from_torchmetrics"]

# The tensors, and lists of tensors, of a metric and of the metrics in it, by the place of the metric and their name.
States: TypeAlias = dict[str, Any]


@checked
def from_torchmetrics(
    metric: Any,
    *,
    outputs: Callable[[Any], Any] | None = None,
    targets: Callable[[Any], Any] | None = None,
    name: Annotated[str | None, Name()] = None,
) -> Metric:
    """A metric, or collection, of torchmetrics: ``metric.update(outputs, targets)`` for each microbatch.

    Its state is the accumulator, so it is a value as any other: the object that was passed stays as it was, and ranks
    are merged here and not by torchmetrics. A metric of which a state can't be merged (it is reduced by a mean, or by a
    function of its own) serves on one rank.

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
    own = copy.deepcopy(metric)
    own.reset()
    for part in _parts(own).values():
        part.distributed_available_fn = _not_distributed  # ranks are merged by the engine

    def update(states: States, outputs_of_model: Any, batch: Any) -> States:
        predictions = outputs_of_model if outputs is None else outputs(outputs_of_model)
        right = batch[1] if targets is None else targets(batch)
        device = next((tensor.device for tensor in tensors_in((predictions, right))), None)
        if device is not None:
            own.to(device)
        own.reset()
        _put(own, states)
        with torch.no_grad():
            own.update(predictions) if right is None else own.update(predictions, right)
        return _taken(own)

    def compute(states: States) -> Any:
        if not states:
            return torch.tensor(float("nan"))  # there was no microbatch
        own.reset()
        _put(own, states)
        return own.compute()

    merges = {key: _merge_of(part._reductions[name], getattr(part, name)) for key, part, name in _states(own)}

    def merge(one: States, other: States) -> States:
        if not one or not other:
            return one or other
        return {key: merges[key](value, other[key]) for key, value in one.items()}  # type: ignore[misc]

    mergeable = None not in merges.values()
    return Metric(name or type(metric).__name__, dict, update, compute, merge=merge if mergeable else None)


def _refuse_others(metric: Any) -> None:
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


def _not_distributed() -> bool:
    return False


def _parts(metric: Any) -> dict[str, Any]:
    """The metric, and those in it if it is a collection or wraps others, by their places."""
    kind = sys.modules["torchmetrics"].Metric
    return {place: module for place, module in metric.named_modules() if isinstance(module, kind)}


def _states(metric: Any) -> Iterator[tuple[str, Any, str]]:
    """Of each state its key, the metric that has it, and its name there."""
    for place, part in _parts(metric).items():
        for name in part._reductions:
            yield (f"{place}.{name}" if place else name), part, name


def _put(metric: Any, states: States) -> None:
    """Give a metric these states, if there are any; it writes to its tensors, so it is given copies."""
    for key, part, name in _states(metric) if states else ():
        setattr(part, name, list(states[key]) if isinstance(states[key], list) else states[key].clone())
        part._update_count = 1


def _taken(metric: Any) -> States:
    """The states of a metric, which empties its lists when it is reset."""
    values = ((key, getattr(part, name)) for key, part, name in _states(metric))
    return {key: list(value) if isinstance(value, list) else value for key, value in values}


def _merge_of(reduction: Any, value: Any) -> Callable[[Any, Any], Any] | None:
    """How two of these states are put together; None: not known."""
    return _together if isinstance(value, list) else _MERGES.get(getattr(reduction, "__name__", ""))


def _together(one: Any, other: Any) -> Any:
    return [*one, *other] if isinstance(one, list) else torch.cat([one, other])


def _sum(one: Tensor, other: Tensor) -> Tensor:
    return one + other


# By the name of the function that torchmetrics reduces states of ranks with.
_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": _sum,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": _together,
}
