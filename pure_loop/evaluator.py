"""Evaluators: data to evaluate on, when, and what to measure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs

from pure_loop._internal.arguments import check_flag, positive_or_none
from pure_loop._internal.reprs import call, data, shown
from pure_loop.cadence import Cadence, CadenceLike, Predicate, as_predicate
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.event import Event
from pure_loop.metrics._base import Metric, MetricsLike, as_metrics
from pure_loop.ranges import checked
from pure_loop.state import Loss, State
from pure_loop.task import OnTargets, Task, check_loss_function
from pure_loop.time import Time, TimeUnit

if TYPE_CHECKING:
    from torch import nn

    from pure_loop.data.source import Source

__all__ = [
    "BoundEvaluator",
    "Evaluator",
    "EvaluatorsLike",
    "bind_evaluators",
    "measure_loss",
    "refuse_empty",
    "with_own_tasks",
]


_OF_AN_INTERVAL = tuple(unit for unit in TimeUnit if unit is not TimeUnit.ITERATION)


@checked
@attrs.frozen(init=False, repr=False)
class Evaluator:
    """Data to evaluate on, with an interval and metrics of its own.

    Args:
        dataloader: any iterable of batches.
        metrics: metrics, by name or in a list; None: the loss, and the accuracy where outputs are scores of
            classes and targets class indices.
        interval: how often, such as ``"1ep"`` or ``"100ba"``; None: ``eval_interval`` of ``fit``; 0: never.
        batches: how many batches of the data to use; None: all.
        microbatch_size: the samples of a forward, at most; None: the whole batch.
        loss: a loss of its own, which the metric ``loss`` measures instead of that of training: a function of
            ``(outputs, targets)``; or a :class:`pure_loop.Task`, which also says what is done with the batches of this
            data. None: that of the call.
        gradients: whether the forward or the loss differentiates in evaluation, with ``torch.autograd.grad`` (forces,
            equations as losses). If True, they run with a graph, of which nothing is kept; if False, without, which
            takes less memory.

    >>> Evaluator([1, 2], interval="10ba", batches=1).batches
    1
    """

    dataloader: Iterable[Any]
    metrics: MetricsLike
    interval: CadenceLike | None
    batches: int | None
    microbatch_size: int | None
    loss: Callable[[Any, Any], Loss] | Task | None
    gradients: bool

    def __init__(
        self,
        dataloader: Iterable[Any],
        *,
        metrics: MetricsLike = None,
        interval: CadenceLike | None = None,
        batches: int | None = None,
        microbatch_size: int | None = None,
        loss: Callable[[Any, Any], Loss] | Task | None = None,
        gradients: bool = False,
    ) -> None:
        if loss is not None and not isinstance(loss, Task):
            check_loss_function(loss, "Evaluator: ")
        self.__attrs_init__(
            dataloader,
            metrics,
            as_predicate(interval, "Evaluator interval", _OF_AN_INTERVAL),
            positive_or_none("batches", batches, where="Evaluator"),
            positive_or_none("microbatch_size", microbatch_size, where="Evaluator"),
            loss,
            check_flag("gradients", gradients, where="Evaluator"),
        )

    def __repr__(self) -> str:
        fields = attrs.asdict(self, recurse=False)
        dataloader = fields.pop("dataloader")
        settings = {name: value for name, value in fields.items() if value is not None and value is not False}
        text = call("Evaluator", settings).removeprefix("Evaluator(")
        return f"Evaluator({data(dataloader)}{', ' if settings else ''}{text}"


EvaluatorsLike: TypeAlias = "Evaluator | Iterable[Any] | Mapping[str, Evaluator | Iterable[Any]] | None"
"""One evaluator or dataloader, or a mapping of labels to several."""


@attrs.frozen
class BoundEvaluator:
    """An evaluator of one run: labelled, with its data opened."""

    label: str
    source: Source
    metrics: tuple[Metric, ...] | None
    interval: Predicate
    microbatch_size: int | None
    gradients: bool
    loss: Callable[[Any, Any], Loss] | Task | None
    # What the loss makes of the task of the call; None where there is no loss of its own.
    task: Task | None = None

    @property
    def described(self) -> str:
        """A description that has to be equal on all ranks."""
        metrics = None if self.metrics is None else [metric.name for metric in self.metrics]
        loss = "" if self.loss is None else f", loss={shown(self.loss)}"
        size = self.microbatch_size
        return f"{self.label} of {self.source.described}, metrics={metrics}, microbatch_size={size}{loss}"

    def due(self, state: State, event: Event) -> bool:
        """Whether it runs at this event, BATCH_END or EPOCH_END."""
        if isinstance(self.interval, Cadence):
            return self.interval.at(state, event)
        return bool(self.interval(state if state.event is event else state.replace(event=event)))

    def due_at_end(self, state: State) -> bool:
        """Whether it is due once more before FIT_END: unless it ran at this very batch, or never runs."""
        if isinstance(self.interval, Cadence) and not self.interval.interval:
            return False
        epoch_ended = state.timestamp.batch_in_epoch == 0
        return not (self.due(state, Event.BATCH_END) or (epoch_ended and self.due(state, Event.EPOCH_END)))


def bind_evaluators(
    evaluators: EvaluatorsLike,
    eval_interval: CadenceLike,
    seed: int,
    max_duration: Time | None = None,
    *,
    sources: Callable[..., Source],
) -> tuple[BoundEvaluator, ...]:
    """The evaluators of an ``evaluators=`` argument: None, a dataloader, or a mapping of labels to dataloaders.

    ``sources`` makes a Source of a dataloader.

    Raises:
        ArgumentTypeError: a label that is not a text, an interval that can't be read, data that can't be iterated.
        ArgumentError: an interval in iterations.
        DataError: data that says that it has no batch.
    """
    if eval_interval is None:
        raise ArgumentTypeError('eval_interval=None: write an interval such as "1ep"; 0 means never.')
    default = as_predicate(eval_interval, "eval_interval", _OF_AN_INTERVAL)
    if evaluators is None:
        return ()
    if type(evaluators) in (list, tuple) and any(map(_is_data, cast("Iterable[Any]", evaluators))):
        raise ArgumentTypeError(
            "evaluators is a list of evaluators; each needs a label, under which its metrics are found: "
            'evaluators={"val": ..., "test": ...}.'
        )
    _refuse_pairs(evaluators)
    labelled: Mapping[str, Any] = evaluators if isinstance(evaluators, Mapping) else {"eval": evaluators}
    bound = []
    for label, value in labelled.items():
        if not isinstance(label, str):
            raise ArgumentTypeError(f'evaluators: the label {label!r} is not a text; write {{"{label}": ...}}.')
        evaluator = value if isinstance(value, Evaluator) else Evaluator(value)
        interval: Any = default if evaluator.interval is None else evaluator.interval
        if isinstance(interval, Cadence) and _counts_iterations(interval.interval, max_duration):
            raise ArgumentError(
                f'evaluator {label!r}: interval "{interval.interval}" counts iterations, at which nothing is '
                'evaluated; write it in epochs ("1ep"), batches ("10ba"), samples, tokens or seconds.'
            )
        try:
            data = sources(evaluator.dataloader, seed=seed, stream=f"eval/{label}", batches_per_epoch=evaluator.batches)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"evaluator {label!r}: {error}") from None
        refuse_empty(data, f"evaluator {label!r}")
        metrics, size = as_metrics(evaluator.metrics, f"evaluator {label!r}"), evaluator.microbatch_size
        bound.append(BoundEvaluator(label, data, metrics, interval, size, evaluator.gradients, evaluator.loss))
    return tuple(bound)


def _refuse_pairs(evaluators: Any) -> None:
    """
    Raises:
        ArgumentError: a label has two evaluators.
        ArgumentTypeError: pairs of a label and data, which are no mapping.
    """
    pairs: Any = list(evaluators.items()) if isinstance(evaluators, Mapping) else evaluators
    if type(pairs) not in (list, tuple) or not pairs or not all(map(_is_labelled, pairs)):
        return
    labels = [label for label, _ in pairs]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ArgumentError(
            f"evaluators has the label {twice!r} twice, and state.metrics has one place for each label; write other "
            f'labels: evaluators={{"{twice}": ..., "{twice}_2": ...}}.'
        )
    if not isinstance(evaluators, Mapping):
        raise ArgumentTypeError(
            "evaluators is a list of pairs; write a mapping of labels to evaluators: evaluators="
            f"{{{', '.join(f'{label!r}: ...' for label in labels)}}}."
        )


def _is_labelled(item: Any) -> bool:
    """Whether it is a pair of a label and what is evaluated, and not a batch."""
    pair = type(item) is tuple and len(item) == 2 and isinstance(item[0], str)
    return pair and (_is_data(item[1]) or isinstance(item[1], list))


def with_own_tasks(evaluators: Iterable[BoundEvaluator], task: Task, model: nn.Module) -> tuple[BoundEvaluator, ...]:
    """The evaluators, of which those with a loss have a task: their own, or that of the call with this loss."""
    result = []
    for evaluator in evaluators:
        loss = evaluator.loss
        if loss is not None:
            own = loss.of_model(model) if isinstance(loss, Task) else attrs.evolve(task, loss=OnTargets(loss))
            evaluator = attrs.evolve(evaluator, task=own)
        result.append(evaluator)
    return tuple(result)


def measure_loss(evaluators: Iterable[BoundEvaluator], *, of_call: bool = False) -> bool:
    """Whether any of them measures the loss; ``of_call``: that of the call, and not one of its own."""
    return any(
        evaluator.metrics is None or any(metric.of_loss for metric in evaluator.metrics)
        for evaluator in evaluators
        if evaluator.loss is None or not of_call
    )


def refuse_empty(data: Source, name: str) -> None:
    """Refuse data that says of itself that it has no batch, before anything runs.

    Raises:
        DataError: its length is 0.
    """
    if data.length == 0:
        raise DataError(
            f"{name}: its dataloader has 0 batches. Is the dataset empty, or smaller than one batch with "
            "drop_last=True?"
        )


def _counts_iterations(interval: Time, max_duration: Time | None) -> bool:
    if interval.unit is TimeUnit.DURATION and max_duration is not None:
        return bool(interval) and max_duration.unit is TimeUnit.ITERATION
    return interval.unit is TimeUnit.ITERATION


def _is_data(value: object) -> bool:
    """Whether something in a list is an evaluator or a DataLoader, not a batch; without importing DataLoader."""
    module = sys.modules.get("torch.utils.data")
    return isinstance(value, Evaluator) or (module is not None and isinstance(value, module.DataLoader))
