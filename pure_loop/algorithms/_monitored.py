"""A metric that an algorithm watches: which one, where its value is, which of two is better, and what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal.pytree import PyTree
from pure_loop._internal.recordable import losses, recordable
from pure_loop._internal.suggestions import nearest
from pure_loop.algorithm import Algorithm
from pure_loop.callback import Run
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.metrics.loss import DEFAULT_NAMES
from pure_loop.state import State

Mode: TypeAlias = Literal["min", "max"]
Memory: TypeAlias = Mapping[str, Any]
"""The algorithm state of one that watches a metric."""

# Where a stop is set: EPOCH_END serves order="2021", which has no checkpoint events.
BOUNDARIES = (Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)

_MODES: dict[str, Mode] = {
    **dict.fromkeys(("loss", "perplexity", "expected_calibration_error", "error", "mse", "mae", "nll"), "min"),
    **dict.fromkeys(("accuracy", "top_k", "f1", "dice", "mean_iou", "map", "auroc", "precision", "recall"), "max"),
}


def known_mode(name: str) -> Mode | None:
    """Whether less or more of a metric is better, from its name without the evaluator's label; None: not known."""
    return next((_MODES[part] for part in reversed(name.split("/")) if part in _MODES), None)


@attrs.frozen
class Monitored:
    """The metric that an algorithm compares.

    Attributes:
        where: the algorithm's factory, for errors.
        name: the metric: ``"val/accuracy"`` of the evaluator ``val``; of training ``"train/loss"``,
            ``"train/loss/<part>"``, and ``"train/<metric>"`` of ``fit(train_metrics=)``.
        mode: whether less is better, or more.
    """

    where: str
    name: str
    mode: Mode

    @classmethod
    def read(cls, where: str, metric: str, mode: Mode | None) -> Monitored:
        """
        Raises:
            ArgumentError: a name without a label, or a metric of which it isn't known which value is better.
        """
        label, _, inside = metric.partition("/")
        if not label or not inside:
            raise ArgumentError(
                f"{where}: metric={metric!r}: write the evaluator's label and the metric's name, \"val/loss\", or "
                '"train/loss".'
            )
        mode = mode or known_mode(inside)
        if mode is None:
            near = nearest(inside, _MODES) or next((name for name in _MODES if name.startswith(inside)), None)
            meant = "" if near is None else f" If {label + '/' + near!r} is meant, write that."
            raise ArgumentError(
                f'{where}: metric={metric!r}: whether less or more of it is better is not known; write mode="min" or '
                f'mode="max".{meant}'
            )
        return cls(where, metric, mode)

    @property
    def of_training(self) -> bool:
        """Whether it is the loss of training, and not a metric of it."""
        return self.name == "train/loss" or self.name.startswith("train/loss/")

    @property
    def label(self) -> str:
        """That of the evaluator."""
        return self.name.partition("/")[0]

    def bind(self, run: Run) -> None:
        """Refuse a run that has no such metric, as far as that can be told before it begins.

        Raises:
            ArgumentError: names the metrics that there are.
        """
        if self.of_training and run.function == "fit":
            return
        metrics = {**run.metrics, **({"train": run.train_metrics} if run.train_metrics else {})}
        names = {
            label: DEFAULT_NAMES if listed is None else [metric.name for metric in listed]
            for label, listed in metrics.items()
        }
        inside = self.name.partition("/")[2]
        if any(inside == name or inside.startswith(f"{name}/") for name in names.get(self.label, ())):
            return
        there = ["train/loss"] if run.function == "fit" else []
        there += [f"{label}/{name}" for label, listed in names.items() for name in listed]
        if self.name in there:
            raise ArgumentError(
                f"{self.where}: metric={self.name!r}: the label of its evaluator contains a slash, which separates a "
                "label from a metric: give the evaluator a label without one."
            )
        advice = "" if names else f' It is measured by an evaluator: fit(evaluators={{"{self.label}": dataloader}}).'
        if self.label == "train" not in names:
            advice = " Metrics of training are those of fit(train_metrics=)."
        raise ArgumentError(f"{self.where}: there is no metric {self.name!r}{self._instead(there)}{advice}")

    def value(self, state: State) -> float:
        """The metric's value at EVAL_END of its evaluator, or of the epoch's batches so far; waits for the device.

        Raises:
            ArgumentError: there is none, or it is no number; names those that there are.
        """
        numbers: dict[str, float] = {}
        for name, value in state.metrics.get(self.label, {}).items():
            numbers |= recordable(f"{self.label}/{name}", value)[0]
        measured: Mapping[str, object] = state.metrics.get(self.label, {})
        kind = measured.get(self.name.partition("/")[2])
        if self.name not in numbers and kind is not None:
            raise ArgumentError(
                f"{self.where}: the metric {self.name!r} is no number but a {type(kind).__name__}"
                f"{f' of shape {tuple(kind.shape)}' if isinstance(kind, Tensor) else ''}: monitor a number, such as "
                f"'{self.label}/loss'."
            )
        if self.name not in numbers:
            raise ArgumentError(f"{self.where}: there is no number {self.name!r}{self._instead(list(numbers))}")
        return float(numbers[self.name])

    def values(self, state: State) -> Tensor:
        """As :meth:`value`, of each member; float64, shape (members,), on the CPU."""
        return torch.tensor([self.value(state.member(number)) for number in range(state.members)], dtype=torch.float64)

    def loss(self, state: State) -> Tensor:
        """The loss of the batch that ended; shape (), or (members,).

        Raises:
            ArgumentError: the loss has no such part.
        """
        parts = losses(state.loss)
        if self.name not in parts:
            raise ArgumentError(f"{self.where}: the loss has no part {self.name!r}{self._instead(list(parts))}")
        loss: Tensor = parts[self.name]
        return loss

    def _instead(self, there: list[str]) -> str:
        near = nearest(self.name, there)
        return f"{f'; did you mean {near!r}?' if near else ';'} there is {', '.join(map(repr, there)) or 'none'}."

    def is_better(self, value: float, best: float, min_delta: float = 0.0) -> bool:
        """Whether a value is better than the best so far by more than ``min_delta``.

        One that isn't finite never is, and every one that is finite is better than it.

        >>> Monitored("early_stopping", "val/loss", "min").is_better(0.5, 0.6, 0.2)
        False
        """
        if not (math.isfinite(value) and math.isfinite(best)):
            return math.isfinite(value)
        return value < best - min_delta if self.mode == "min" else value > best + min_delta

    def best_first(self, values: Tensor, numbers: Sequence[int]) -> list[int]:
        """These members, that with the best value first; those whose value isn't finite last; else by number.

        >>> Monitored("f", "val/loss", "min").best_first(torch.tensor([0.3, torch.nan, 0.3, 0.1]), range(4))
        [3, 0, 2, 1]
        """
        sign = 1.0 if self.mode == "min" else -1.0
        by_value = {number: float(values[number]) for number in numbers}

        def place(number: int) -> tuple[bool, float, int]:
            value = by_value[number]
            return (False, sign * value, number) if math.isfinite(value) else (True, 0.0, number)

        return sorted(numbers, key=place)


def watcher(
    name: str,
    monitored: Monitored,
    start: Callable[..., Memory],
    compare: Callable[[State, Memory, Any], Memory],
    flag: str,
    act: Callable[[State], State],
    *,
    of_batches: tuple[Event, ...] = BOUNDARIES,
    is_due: Callable[[State], bool] = lambda state: True,
    bind: Callable[[Run], None] | None = None,
    begin: Callable[[State], State] | None = None,
    across_members: bool = False,
) -> Algorithm:
    """An algorithm that compares each value of a metric, and acts at the next checkpoint event where it has to.

    The value is that of an evaluation, at EVAL_END; or of training the mean loss of batches, weighted by their samples,
    or a metric of the batches so far in the epoch.

    Args:
        name: of the algorithm.
        monitored: the metric.
        start: ``(state, **totals)`` to the first algorithm state; the totals, of training, are a part of it.
        compare: ``(state, memory, value) -> changes`` of the algorithm state; the value is a float, or those of all
            members, a float64 tensor of shape (members,).
        flag: its key in the algorithm state: whether to act.
        act: what follows; the flag is False again, so that a State that trains on acts anew.
        of_batches: where a value of training is compared.
        is_due: when it is, and the next mean begins.
        bind: as that of an algorithm; default: refuses a run without the metric.
        begin: what is done at FIT_START.
        across_members: as that of an algorithm.
    """

    measure = monitored.values if across_members else monitored.value

    def compared(state: State, value: float | Tensor) -> State:
        memory = state.algorithm_state[name]
        return state.remember(name, FrozenDict({**memory, **compare(state, memory, value)}))

    def evaluated(state: State) -> State:
        return compared(state, measure(state)) if state.evaluator == monitored.label else state

    def add_up(state: State) -> State:
        memory = state.algorithm_state[name]
        totals, samples = memory["totals"], state.timestamp.sample - state.previous_timestamp.sample
        loss = totals["loss"]
        if monitored.of_training:
            loss = loss + samples * monitored.loss(state).detach().to(loss)
        totals = FrozenDict(loss=loss, samples=totals["samples"] + samples)
        return state.remember(name, FrozenDict({**memory, "totals": totals}))

    def compare_training(state: State) -> State:
        totals = state.algorithm_state[name]["totals"]
        is_measured = monitored.of_training or "train_metrics" in state.algorithm_state
        if not (is_measured and totals["samples"] and is_due(state)):
            return state
        # Reads the sum of losses, and so waits for the device.
        if monitored.of_training:
            mean = totals["loss"].cpu() / totals["samples"]
            state = compared(state, mean if across_members else float(mean))
        else:
            state = compared(state, measure(state))
        return state.remember(name, FrozenDict({**state.algorithm_state[name], "totals": _no_losses(state)}))

    def act_once(state: State) -> State:
        memory = state.algorithm_state[name]
        return act(state.remember(name, FrozenDict({**memory, flag: False}))) if memory[flag] else state

    def first(state: State) -> FrozenDict[str, PyTree]:
        totals = {"totals": _no_losses(state)} if monitored.label == "train" else {}
        return FrozenDict(start(state, **totals))

    handlers: dict[object, Any] = {} if monitored.of_training else {Event.EVAL_END: evaluated}
    if begin is not None:
        handlers[Event.FIT_START] = begin
    if monitored.label == "train":  # which may be an evaluator's, too
        handlers[Event.BATCH_END] = add_up
        handlers |= dict.fromkeys(of_batches, (compare_training, act_once))
    handlers |= {event: act_once for event in BOUNDARIES if event not in handlers}
    bound = bind or monitored.bind
    return Algorithm(name, handlers, init=first, bind=bound, across_members=across_members)


def _no_losses(state: State) -> FrozenDict[str, Tensor | int]:
    """The sum of no batch's losses, float64 of shape (), or (members,), on the State's device, and their samples."""
    shape = (state.members,) if state.members else ()
    return FrozenDict(loss=torch.zeros(shape, dtype=torch.float64, device=state.device), samples=0)
