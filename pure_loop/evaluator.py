"""Evaluators: data to evaluate on, when, and what to measure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from pure_loop.cadence import Cadence, CadenceLike, Predicate, as_predicate
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.event import Event
from pure_loop.metrics import Metric, MetricsLike, as_metrics
from pure_loop.sources import Source, source
from pure_loop.state import State
from pure_loop.time import Time, TimeUnit

__all__ = ["BoundEvaluator", "Evaluator", "bind_evaluators", "check_gradients", "measure_loss", "refuse_empty"]


_OF_AN_INTERVAL = tuple(unit for unit in TimeUnit if unit is not TimeUnit.ITERATION)


def _positive(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r}: give a whole number of at least 1, or None.")
    if value < 1:
        raise ArgumentError(f"{name}={value!r}: give a whole number of at least 1, or None.")
    return value


def check_gradients(value: Any, where: str) -> bool:
    """
    Raises:
        ArgumentTypeError: not a bool.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{where}(gradients={value!r}): write True or False.")
    return value


@attrs.frozen(init=False)
class Evaluator:
    """Data to evaluate on, with an interval and metrics of its own.

    Args:
        dataloader: any iterable of batches.
        metrics: metrics, by name or in a list; None: the loss, and the accuracy where outputs are scores of
            classes and targets class indices.
        interval: how often, such as ``"1ep"`` or ``"100ba"``; None: ``eval_interval`` of ``fit``; 0: never.
        batches: how many batches of the data to use; None: all.
        microbatch_size: samples a forward; None: the whole batch.
        gradients: whether the forward or the loss differentiates in evaluation, with ``torch.autograd.grad`` (forces,
            equations as losses): they run with a graph then, of which nothing is kept. Without, there is none, which
            takes less memory.

    >>> Evaluator([1, 2], interval="10ba", batches=1).batches
    1
    """

    dataloader: Any
    metrics: MetricsLike
    interval: CadenceLike | None
    batches: int | None
    microbatch_size: int | None
    gradients: bool

    def __init__(
        self,
        dataloader: Any,
        *,
        metrics: MetricsLike = None,
        interval: CadenceLike | None = None,
        batches: int | None = None,
        microbatch_size: int | None = None,
        gradients: bool = False,
    ) -> None:
        self.__attrs_init__(
            dataloader,
            metrics,
            as_predicate(interval, "Evaluator interval", _OF_AN_INTERVAL),
            _positive(batches, "Evaluator batches"),
            _positive(microbatch_size, "Evaluator microbatch_size"),
            check_gradients(gradients, "pl.Evaluator"),
        )


@attrs.frozen
class BoundEvaluator:
    """An evaluator of one run: labelled, with its data opened."""

    label: str
    source: Source
    metrics: tuple[Metric, ...] | None
    interval: Predicate
    microbatch_size: int | None
    gradients: bool

    @property
    def described(self) -> str:
        """What has to be equal on all ranks."""
        metrics = None if self.metrics is None else [metric.name for metric in self.metrics]
        return f"{self.label} of {self.source.described}, metrics={metrics}, microbatch_size={self.microbatch_size}"

    def due(self, state: State, event: Event) -> bool:
        """Whether it is asked for at this event, BATCH_END or EPOCH_END."""
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
    evaluators: Any,
    eval_interval: CadenceLike,
    seed: int,
    max_duration: Time | None = None,
    *,
    sources: Callable[..., Source] = source,
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
    if type(evaluators) in (list, tuple) and any(_is_data(each) for each in evaluators):
        raise ArgumentTypeError(
            "evaluators is a list of evaluators; each needs a label, under which its metrics are found: "
            'evaluators={"val": ..., "test": ...}.'
        )
    if not isinstance(evaluators, Mapping):
        evaluators = {"eval": evaluators}
    bound = []
    for label, given in evaluators.items():
        if not isinstance(label, str):
            raise ArgumentTypeError(f'evaluators: the label {label!r} is not a text; write {{"{label}": ...}}.')
        evaluator = given if isinstance(given, Evaluator) else Evaluator(given)
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
        metrics, size = as_metrics(evaluator.metrics, label), evaluator.microbatch_size
        bound.append(BoundEvaluator(label, data, metrics, interval, size, evaluator.gradients))
    return tuple(bound)


def measure_loss(evaluators: Iterable[BoundEvaluator]) -> bool:
    """Whether any of them asks for the loss."""
    return any(each.metrics is None or any(metric.of_loss for metric in each.metrics) for each in evaluators)


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


def _is_data(given: Any) -> bool:
    """Whether something in a list is an evaluator or a DataLoader, not a batch; without importing DataLoader."""
    module = sys.modules.get("torch.utils.data")
    return isinstance(given, Evaluator) or (module is not None and isinstance(given, module.DataLoader))
