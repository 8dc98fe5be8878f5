"""Threshold stopping: training ends where a metric is as good as it has to be.

With the value ``v``::

    stop:  v <= threshold     (mode="min"; v >= threshold for "max")

Time to a quality is measured like this: https://arxiv.org/abs/1910.01500 (MLPerf).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from pure_loop._internal.pytree import PyTree
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._monitored import BOUNDARIES, Memory, Monitored, watcher
from pure_loop.callback import Run
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.ranges import Name, Number, OneOf, checked
from pure_loop.state import State

__all__ = ["threshold_stopping"]


@checked
def threshold_stopping(
    metric: Annotated[str, Name(typical=("train/loss",))] = "val/accuracy",
    threshold: Annotated[float, Number(typical=(-2000.0, -1000.0))] = 0.9,
    mode: Annotated[Literal["min", "max"] | None, OneOf("min", "max", typical=())] = None,
    at: Annotated[Literal["eval", "batch"], OneOf("eval", "batch", typical=("batch",))] = "eval",
    *,
    name: str = "threshold_stopping",
) -> Algorithm:
    """Stops training where a metric reaches ``threshold``.

    The metric is compared at EVAL_END of its evaluator, and training ends at the checkpoint event that follows, as if
    ``max_duration`` were reached. The decision is in ``algorithm_state``: a run that is resumed in between stops, too.

    Args:
        metric: ``"<label>/<metric>"`` of an evaluator, as it is logged; with ``at="batch"`` ``"train/loss"``, or
            ``"train/<metric>"`` of ``fit(train_metrics=)``, which is that of the batches so far in the epoch.
        threshold: the value that stops training; it is reached where it is equalled.
        mode: whether less is better, ``"min"``, or more, ``"max"``. None: known for losses, accuracies and the like.
        at: ``"eval"``: compare at evaluations; ``"batch"``: compare the loss or metric of training after each
            batch, for which each BATCH_CHECKPOINT waits for the device.
        name: another one, if there are several.

    Raises:
        ArgumentError: a setting out of range; by ``fit``: an evaluator or metric that there is not.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...     optimizer=pl.optim.sgd(lr=0.1), max_duration="100ep", evaluators={"val": data},
    ...     algorithms=[threshold_stopping("val/loss", 0.01)])
    >>> pl.run(stream).timestamp.epoch < 100
    True
    """
    monitored = Monitored.read("threshold_stopping", metric, mode)
    if (monitored.of_training and at == "eval") or (monitored.label != "train" and at == "batch"):
        right = 'at="batch"' if monitored.of_training else f'metric="train/loss", or "train/{metric.partition("/")[2]}"'
        raise ArgumentError(f"threshold_stopping: metric={metric!r} with at={at!r}: write {right}.")

    def bind(run: Run) -> None:
        monitored.bind(run)
        if at == "eval" and monitored.label == "train" and run.train_metrics:
            raise ArgumentError(f'threshold_stopping: metric={metric!r} is one of training: write at="batch".')
        if at == "batch" and not monitored.of_training and not run.train_metrics:
            raise ArgumentError(f'threshold_stopping: metric={metric!r} is one of an evaluator: write at="eval".')

    def start(state: State, **totals: PyTree) -> Memory:
        return FrozenDict(
            **totals, value=torch.tensor(torch.nan, dtype=torch.float64, device=state.device), stop=False, why=""
        )

    def is_reached(value: float) -> bool:
        return value <= threshold if monitored.mode == "min" else value >= threshold

    def compare(state: State, memory: Memory, value: float) -> Memory:
        why = f"{metric} is {value:.4g}, and threshold={threshold:g} is reached" if is_reached(value) else ""
        return {"stop": is_reached(value), "why": why}

    def stop(state: State) -> State:
        return state.replace(stop=True)

    def note(state: State) -> State:
        memory = state.algorithm_state[name]
        value = monitored.loss(state).detach().to(memory["value"])
        return state.remember(name, FrozenDict({**memory, "value": value}))

    def compare_batch(state: State) -> State:
        loss = float(state.algorithm_state[name]["value"]) if monitored.of_training else None
        changes = compare(state, {}, monitored.value(state) if loss is None else loss)
        if not changes["stop"]:
            return state
        return stop(state.remember(name, FrozenDict({**start(state), "why": changes["why"]})))

    if at == "eval":
        return watcher(name, monitored, start, compare, "stop", stop, bind=bind)
    notes = {Event.BATCH_END: note} if monitored.of_training else {}
    return Algorithm(name, {**notes, BOUNDARIES: compare_batch}, init=start, bind=bind)
