"""Metrics in training: ``fit(train_metrics=)`` as an algorithm, which measures what the step has computed anyway.

At AFTER_BACKWARD outputs, loss and microbatch are still there, so no forward runs twice. The accumulators are the
algorithm state: they begin anew with each epoch, are in checkpoints, and resume bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.hooks import HandlerFunction
from pure_loop.metrics._base import Metric, updated
from pure_loop.stages.loss import measured_loss, weighed_loss
from pure_loop.state import State

if TYPE_CHECKING:
    from pure_loop.loop.batch import LoopStages

Accumulators: TypeAlias = FrozenDict[str, PyTree]

NAME = "train_metrics"
# Under which values stand in ``state.metrics``.
LABEL = "train"
# Accumulators of the epoch, equal on all ranks, and of the batch under way, those of this rank; nothing: no data yet.
_NOTHING: FrozenDict[str, object] = FrozenDict(epoch=FrozenDict(), batch=FrozenDict())


def measuring(metrics: tuple[Metric, ...], ranks: int) -> Algorithm:
    """The algorithm that measures them.

    Raises:
        ArgumentError: there are several ranks, and a metric has no ``merge``.
    """
    for metric in metrics:
        if ranks > 1 and metric.merge is None:
            raise ArgumentError(
                f"train_metrics: the metric {metric.name!r} of {ranks} ranks can't be put together: give it "
                "pl.Metric(..., merge=lambda one, other: ...), one accumulator from two."
            )

    of_loss = any(metric.of_loss for metric in metrics)

    def begin(state: State) -> State:
        before = state.algorithm_state[NAME]["epoch"]
        if not before:
            return state.remember(NAME, _NOTHING)
        first = {metric.name: metric.init() for metric in metrics}
        alike = {name: _alike(value, before.get(name)) for name, value in first.items()}
        return state.remember(NAME, FrozenDict(epoch=FrozenDict(alike), batch=FrozenDict()))

    def update(state: State, stages: LoopStages) -> State:
        if stages.engine.padding or stages.engine.repeats:
            return state  # a rank without data: its weight is 0, and ranks take equally many steps
        memory = state.algorithm_state[NAME]
        where = "epoch" if stages.engine.ranks == 1 else "batch"
        measured = None
        if of_loss:
            measured = weighed_loss(measured_loss(state.loss, stages.task), stages.task, state.microbatch)
        seen = stages.task.measured(state.outputs, state.microbatch)
        result = updated(metrics, memory[where], *seen, measured)
        return state.remember(NAME, FrozenDict({**memory, where: FrozenDict(result)}))

    def end(state: State, stages: LoopStages) -> State:
        memory = state.algorithm_state[NAME]
        if stages.engine.ranks > 1:
            of_batch = stages.engine.merge_metrics(metrics, dict(memory["batch"]), state)
            memory = FrozenDict(epoch=_merged(metrics, memory["epoch"], of_batch), batch=FrozenDict())
            state = state.remember(NAME, memory)
        values = {metric.name: metric.value_of(memory["epoch"][metric.name]) for metric in metrics}
        return state.replace(metrics={**state.metrics, LABEL: FrozenDict(values)})

    handlers: dict[Event, HandlerFunction] = {
        Event.EPOCH_START: begin,
        Event.AFTER_BACKWARD: update,
        Event.BATCH_END: end,
    }
    algorithm = Algorithm(NAME, handlers, init=lambda state: _NOTHING)
    return algorithm.made_by(NAME, {"metrics": metrics})


def _alike(first: PyTree, before: PyTree) -> PyTree:
    """A first accumulator, with tensors of shape () in the places of numbers where the epoch before ended with such.

    A compiled step is a graph for one structure of the State.
    """
    leaves, structure = optree.tree_flatten(first, namespace=NAMESPACE)
    last_leaves, last_structure = optree.tree_flatten(before, namespace=NAMESPACE)
    if structure != last_structure:
        return first
    return optree.tree_unflatten(structure, map(_as_tensor, leaves, last_leaves))


def _as_tensor(first: object, before: object) -> object:
    if not isinstance(before, Tensor) or before.ndim or not isinstance(first, int | float):
        return first
    fits = isinstance(first, int) or before.is_floating_point()
    return torch.full_like(before, first) if fits else first


def _merged(
    metrics: tuple[Metric, ...], epoch: Mapping[str, PyTree], batch: Mapping[str, PyTree]
) -> FrozenDict[str, object]:
    """The accumulators of the epoch, with those of a batch of all ranks."""
    merged = {}
    for metric in metrics:
        name, merge = metric.name, metric.merge
        assert merge is not None
        merged[name] = merge(epoch[name], batch[name]) if name in epoch else batch[name]
    return FrozenDict(merged)
