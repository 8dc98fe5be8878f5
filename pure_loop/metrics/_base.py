"""``Metric``, and how an evaluator's ``metrics=`` is read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Number
from typing import ClassVar, NoReturn, TypeAlias

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.arguments import check_function
from pure_loop._internal.pytree import NAMESPACE, Batch, Outputs, PyTree
from pure_loop._internal.reprs import call
from pure_loop._internal.suggestions import advice_on
from pure_loop._internal.weights import is_number
from pure_loop.data.batch import is_array
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.random.authors import is_users
from pure_loop.ranges import checked

__all__ = ["Metric"]


_TAKEN = {
    "init": "",
    "update": "accumulator, outputs, batch",
    "compute": "accumulator",
    "merge": "accumulator, accumulator",
}


@checked
@attrs.frozen(repr=False)
class Metric:
    """A metric of ``(outputs, batch)``, accumulated over batches.

    Args:
        name: its key in ``state.metrics[label]``.
        init: ``() -> accumulator``, any pytree.
        update: ``(accumulator, outputs, batch) -> accumulator``; pure.
        compute: ``accumulator -> value``.
        of_loss: ``update`` receives ``(loss, weight)`` of each microbatch in place of the outputs; microbatches of
            weight 0 are left out. A weight that only a device knows is a tensor; if it is 0, so is the loss. It is None
            if the loss is one of torch's with ``reduction="sum"``.
        merge: ``(accumulator, accumulator) -> accumulator``, of two parts of the data; several ranks need it.

    Raises:
        ArgumentTypeError: a function that can't be called with these arguments; by the stream: an ``update`` that
            returns None.

    >>> import torch
    >>> worst = Metric("worst", lambda: torch.tensor(-torch.inf),
    ...                lambda acc, outputs, batch: torch.maximum(acc, (outputs - batch[1]).abs().max()),
    ...                lambda acc: acc, merge=torch.maximum)
    >>> worst.compute(worst.update(worst.init(), torch.tensor([1.0, 5.0]), (None, torch.tensor([1.0, 2.0]))))
    tensor(3.)
    """

    name: str
    init: Callable[[], PyTree]
    update: Callable[[PyTree, Outputs, Batch], PyTree]
    compute: Callable[[PyTree], PyTree]
    of_loss: bool = False
    merge: Callable[[PyTree, PyTree], PyTree] | None = None
    # The call that made it, for its repr: the arguments that were passed.
    shows_defaults: ClassVar[bool] = False
    _factory: str = attrs.field(default="", init=False, eq=False)
    _settings: Mapping[str, object] = attrs.field(factory=dict, init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        for field, arguments in _TAKEN.items():
            if getattr(self, field) is not None or field != "merge":
                check_function(field, getattr(self, field), arguments, where=f"pl.Metric({self.name!r})")

    def on(
        self, *, outputs: Callable[[Outputs], Outputs] | None = None, targets: Callable[[Batch], PyTree] | None = None
    ) -> Metric:
        """This metric of a part of the outputs, and of targets anywhere in the batch.

        Args:
            outputs: ``outputs -> outputs``: a function of the outputs; None: the outputs as they are.
            targets: ``batch -> targets``: the metric receives ``(None, targets)`` as batch; None: the batch as it is.

        Raises:
            ArgumentError: a metric of the loss, which is given no outputs.

        >>> import torch, pure_loop as pl
        >>> metric = pl.metrics.accuracy().on(outputs=lambda o: o["logits"], targets=lambda batch: batch["labels"])
        >>> outputs, batch = {"logits": torch.tensor([[2.0, 1.0]])}, {"labels": torch.tensor([0])}
        >>> metric.compute(metric.update(metric.init(), outputs, batch))
        tensor(1.)
        """
        if self.of_loss:
            raise ArgumentError(f"metric {self.name!r} is of the loss: it receives no outputs and no targets.")
        update = self.update

        def on_parts(accumulator: PyTree, model_outputs: Outputs, batch: Batch) -> PyTree:
            chosen = model_outputs if outputs is None else outputs(model_outputs)
            return update(accumulator, chosen, batch if targets is None else (None, targets(batch)))

        if is_users((outputs, targets)):
            on_parts.__module__ = "__main__"  # what it calls is the user's
        result = attrs.evolve(self, update=on_parts)
        return result.made_by(self._factory, self._settings) if self._factory else result

    def value_of(self, accumulator: PyTree) -> PyTree:
        """What ``compute`` gives, which loggers can record.

        Raises:
            ArgumentTypeError: it holds something else than numbers, tensors and arrays, such as a text.
        """
        value = self.compute(accumulator)
        for leaf in optree.tree_leaves(value, none_is_leaf=True, namespace=NAMESPACE):
            if not (isinstance(leaf, Tensor | Number) or is_array(leaf)):
                raise ArgumentTypeError(
                    f"the metric {self.name!r} ({self!r}) gave {leaf!r} of type {type(leaf).__name__}: its compute "
                    "returns a number or a tensor, or a mapping of such."
                )
        return value

    @property
    def parts_of_code(self) -> tuple[object, ...]:
        """What is called when it measures: its functions, and those that its factory was passed."""
        return (self.init, self.update, self.compute, self.merge, *self._settings.values())

    def made_by(self, factory: str, settings: Mapping[str, object]) -> Metric:
        """This metric, with the call that made it."""
        result = copy.copy(self)
        object.__setattr__(result, "_factory", factory)
        object.__setattr__(result, "_settings", settings)
        return result

    def renamed(self, name: str) -> Metric:
        """This metric under another name."""
        settings = {setting: value for setting, value in self._settings.items() if setting != "name"}
        return attrs.evolve(self, name=name).made_by(self._factory, {**settings, "name": name})

    def __repr__(self) -> str:
        return call(self._factory, self._settings) if self._factory else f"Metric({self.name!r})"


MetricsLike: TypeAlias = "Mapping[str, Metric] | Sequence[Metric] | Metric | None"


Scalar: TypeAlias = Tensor | float
"""A total or a count: a tensor, or a number of Python's, which waits for no device."""

Ratio: TypeAlias = tuple[Scalar, Scalar]
"""The accumulator of a mean: a total, and how many are in it."""


def add(a: Ratio, b: Ratio) -> Ratio:
    return a[0] + b[0], a[1] + b[1]


def plus(a: Scalar, b: Scalar) -> Scalar:
    """The sum of two totals; 0 is that of no data."""
    return a + b


def summed(
    name: str,
    count: Callable[[Outputs, Batch], Tensor],
    compute: Callable[[Tensor], Tensor],
    of_nothing: Callable[[], Tensor] = lambda: torch.tensor(float("nan")),
) -> Metric:
    """A metric of a sum over all data: counts, from which its value is computed.

    Args:
        name: the metric's.
        count: what a microbatch adds, a tensor of the same shape each time.
        compute: ``sum -> value``.
        of_nothing: gives its value where there was no microbatch.
    """

    def update(total: Scalar, outputs: Outputs, batch: Batch) -> Scalar:
        return total + count(outputs, batch)

    def value(total: Scalar) -> Tensor:
        return compute(total) if isinstance(total, Tensor) else of_nothing()

    return Metric(name, lambda: 0, update, value, merge=plus)


def quotient(accumulator: Ratio) -> Scalar:
    total, count = accumulator
    if is_number(count) and count == 0:
        return torch.tensor(float("nan"))  # a mean over nothing
    return total / count


def updated(
    metrics: Sequence[Metric],
    before: Mapping[str, PyTree],
    outputs: Outputs,
    batch: Batch,
    measured: tuple[Tensor, Scalar | None] | None,
    *,
    guard: Callable[[Metric], AbstractContextManager[None]] = lambda metric: nullcontext(),
) -> dict[str, PyTree]:
    """The accumulators after one microbatch, by name.

    Args:
        metrics: what is measured.
        before: the accumulators by name; a metric that has none begins with its first one.
        outputs: those of the microbatch.
        batch: the microbatch.
        measured: its loss and weight; None where no metric is of the loss.
        guard: what a metric is called in.
    """
    # What is a mean over nothing is left out. Where only a device knows whether it is, its loss is 0.
    nothing = measured is not None and is_number(measured[1]) and measured[1] == 0
    result = {}
    for metric in metrics:
        with guard(metric):
            old = before[metric.name] if metric.name in before else metric.init()
            value = measured if metric.of_loss else outputs
            result[metric.name] = old if nothing and metric.of_loss else metric.update(old, value, batch)
            if old is not None and result[metric.name] is None:
                raise ArgumentTypeError(
                    f"the metric {metric.name!r} ({metric!r}) has an update that returned None: it returns the next "
                    "accumulator; is a `return` missing?"
                )
    return result


def as_metrics(value: MetricsLike, where: str) -> tuple[Metric, ...] | None:
    """Metrics in a list or by name as a tuple; None: None.

    Raises:
        ArgumentTypeError: something in it is no metric; names ``where``.
        ArgumentError: two have one name.
    """
    if value is None:
        return None
    if isinstance(value, Metric):
        return (value,)
    if not isinstance(value, Mapping | list | tuple):
        _refuse_metric(value, where)
    if isinstance(value, Mapping):
        for metric in value.values():
            if not isinstance(metric, Metric):
                _refuse_metric(metric, where)
        value = [metric if metric.name == name else metric.renamed(name) for name, metric in value.items()]
    metrics = tuple(value)
    for metric in metrics:
        if not isinstance(metric, Metric):
            _refuse_metric(metric, where)
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise ArgumentError(f"{where} has two metrics of one name: {names}; give one of them another, name=...")
    return metrics


def _refuse_metric(value: object, where: str) -> NoReturn:
    if type(value).__module__.partition(".")[0] == "torchmetrics":
        raise ArgumentTypeError(
            f"{where}: {value!r} in metrics is a metric of torchmetrics; write "
            f"pl.metrics.from_torchmetrics({type(value).__name__}(...))."
        )
    text = advice_on("metrics", value) or (
        "write [pl.metrics.accuracy()], or pl.metrics.mean(function, 'name') of a function of (outputs, batch) that "
        "gives one number a sample"
    )
    name = f"the function {value.__name__!r}" if hasattr(value, "__name__") else repr(value)
    raise ArgumentTypeError(f"{where}: {name} in metrics is no metric; {text}.")
