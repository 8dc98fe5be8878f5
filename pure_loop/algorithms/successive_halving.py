"""Successive halving: of the members of an ensemble the worst stop, rung after rung.

Rung ``r = 0, 1, 2, ...`` is at the first evaluation after ``interval * factor**r`` of training. There, of ``n`` members
that still train::

    go on:  the best max(least, n // factor)
    stop:   the others

Each rung costs all members together as much as the one before it: Non-stochastic Best Arm Identification and
Hyperparameter Optimization, https://arxiv.org/abs/1502.07943 (Jamieson and Talwalkar, 2016); one bracket of Hyperband,
https://arxiv.org/abs/1603.06560 (Li et al., 2018).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from pure_loop._internal.pytree import PyTree
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._monitored import Memory, Monitored, watcher
from pure_loop.algorithms._spans import Counted
from pure_loop.frozendict import FrozenDict
from pure_loop.members.stacking import running, stop_members
from pure_loop.ranges import AtLeast, Name, checked
from pure_loop.state import State
from pure_loop.time import Time

__all__ = ["successive_halving"]

SERVES = "members"


@checked
def successive_halving(
    metric: Annotated[str, Name(typical=("train/loss",))] = "val/loss",
    *,
    mode: Literal["min", "max"] | None = None,
    interval: Annotated[str | Time, Counted(typical=("1ba", "1ep"))] = "1ep",
    factor: Annotated[int, AtLeast(2)] = 2,
    least: Annotated[int, AtLeast(1)] = 1,
    name: str = "successive_halving",
) -> Algorithm:
    """Stops the worst members of an ensemble at each rung, so that ``1 / factor`` of them go on.

    The metric is compared at EVAL_END of its evaluator, where it is read from the device, and members stop at the
    checkpoint event that follows. A value that isn't finite is worse than any other; of equal ones the member with the
    smaller number is better. Members that have stopped keep their numbers and are masked, which takes the time of
    those that train: ``state.members(numbers)`` of those that go on trains faster.

    Args:
        metric: ``"<label>/<metric>"`` of an evaluator, as it is logged, or ``"train/loss"``: the mean loss of the
            batches since the last rung, weighted by their samples; or ``"train/<metric>"`` of
            ``fit(train_metrics=)``: that of the batches so far in the epoch.
        mode: whether less is better, ``"min"``, or more, ``"max"``. None: known for losses, accuracies and the like.
        interval: the training before the first rung: ``"1ep"``, ``"100ba"``; rung ``r`` is after ``factor**r`` of it.
        factor: of so many members one goes on.
        least: how many go on at least.
        name: another one, if there are several.

    State: ``rungs`` (how many there were), ``value`` (of each member when it was last compared; float64, shape
    (members,), NaN before the first rung), ``batch`` (after which batch each was stopped; int64, shape (members,), -1
    of those that go on) and ``drop`` (a bool: whether members stop at the next checkpoint event).

    Raises:
        ArgumentError: a setting out of range; by ``fit``: an evaluator or metric that there is not, or no ensemble.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> models = pl.ensemble(lambda: torch.nn.Linear(2, 1), seeds=[0, 0, 0, 0])
    >>> state = pl.run(pl.fit(models, data, loss=torch.nn.functional.mse_loss, max_duration="4ep",
    ...     optimizer=pl.optim.sgd(lr=pl.each([0.0, 0.02, 0.05, 0.01])), evaluators={"val": data},
    ...     algorithms=[successive_halving("val/loss")]))
    >>> state.algorithm_state["successive_halving"]["batch"]
    tensor([ 3,  6, -1,  3])
    """
    monitored = Monitored.read("successive_halving", metric, mode)
    first = Time.parse(interval)

    def is_due(state: State) -> bool:
        return bool(_rungs(state, first, factor) > state.algorithm_state[name]["rungs"])

    def start(state: State, **totals: PyTree) -> Memory:
        return {
            "rungs": 0,
            "value": torch.full((state.members,), torch.nan, dtype=torch.float64),
            "batch": torch.full((state.members,), -1),
            "drop": False,
            **totals,
        }

    def compare(state: State, memory: Memory, values: Tensor) -> Memory:
        if not is_due(state):
            return {}
        value = memory["value"].clone()
        training = running(state)
        value[training] = values[training]
        return {"rungs": _rungs(state, first, factor), "value": value, "drop": True}

    def drop(state: State) -> State:
        memory, training = state.algorithm_state[name], running(state)
        worst = monitored.best_first(memory["value"], training)[max(least, len(training) // factor) :]
        batch = memory["batch"].clone()
        batch[worst] = state.timestamp.batch
        return stop_members(state.remember(name, FrozenDict({**memory, "batch": batch})), worst)

    return watcher(name, monitored, start, compare, "drop", drop, is_due=is_due, across_members=True)


def _rungs(state: State, first: Time, factor: int) -> int:
    """How many rungs there are up to now."""
    finished, rungs = state.timestamp.get(first.unit), 0
    while finished >= first.value * factor**rungs:
        rungs += 1
    return rungs
