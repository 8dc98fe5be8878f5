"""Reduction on a plateau: lower learning rates where a metric no longer becomes better.

With the value ``v`` of an evaluation and the best one so far, ``b``::

    better:  v < b (1 - threshold)        (mode="min", threshold_mode="rel")
             v < b - threshold            ("abs"; with + and > for mode="max")
    reduce:  more than patience evaluations in a row were not better
             state.lr_scale = max(factor * state.lr_scale, min_scale)

It is ``torch.optim.lr_scheduler.ReduceLROnPlateau``, as a factor of the schedule and not in place of one.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch

from pure_loop._internal.pytree import PyTree
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._monitored import Memory, Monitored, watcher
from pure_loop.callback import Run
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.ranges import AtLeast, Between, Name, Number, checked
from pure_loop.state import State

__all__ = ["reduce_on_plateau"]


@checked
def reduce_on_plateau(
    metric: Annotated[str, Name(typical=("train/loss",))] = "val/loss",
    *,
    factor: Annotated[float, Number(above=0, below=1)] = 0.1,
    patience: Annotated[int, AtLeast(0)] = 10,
    mode: Literal["min", "max"] | None = None,
    threshold: Annotated[float, AtLeast(0)] = 1e-4,
    threshold_mode: Literal["rel", "abs"] = "rel",
    cooldown: Annotated[int, AtLeast(0)] = 0,
    min_scale: Annotated[float, Between(0, 1)] = 0.0,
    name: str = "reduce_on_plateau",
) -> Algorithm:
    """Multiplies every learning rate by ``factor`` where a metric has not become better for a while.

    The metric is compared at EVAL_END of its evaluator, and ``state.lr_scale`` changes at the checkpoint event that
    follows, for the next batch on. All counts are in ``algorithm_state``, so a resumed run reduces where it would have
    reduced.

    Args:
        metric: ``"<label>/<metric>"`` of an evaluator, as it is logged; ``"train/loss"``: the mean loss of the batches
            of each epoch, weighted by their samples; ``"train/<metric>"``: that of ``fit(train_metrics=)``.
        factor: what learning rates are multiplied by.
        patience: how many evaluations in a row may be without a better value; the one after them reduces.
        mode: whether less is better, ``"min"``, or more, ``"max"``. None: known for losses, accuracies and the like.
        threshold: by how much a value has to be better.
        threshold_mode: ``"rel"``: by this part of the best value; ``"abs"``: by this number.
        cooldown: evaluations after a reduction that are not counted.
        min_scale: the least factor.
        name: another one, if there are several.

    Raises:
        ArgumentError: a setting out of range; by ``fit``: an evaluator or metric that there is not, or an optimizer
            that does not take ``state.lr_scale``.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...     optimizer=pl.optim.sgd(lr=0.0), max_duration="4ep", evaluators={"val": data},
    ...     algorithms=[reduce_on_plateau("val/loss", patience=2)])
    >>> pl.run(stream).lr_scale
    tensor(0.1000, dtype=torch.float64)
    """
    monitored = Monitored.read("reduce_on_plateau", metric, mode)

    def bind(run: Run) -> None:
        monitored.bind(run)
        if run.optimizer is not None and not run.optimizer.takes_lr_scale:
            raise ArgumentError(
                f"reduce_on_plateau: optimizer {run.optimizer.name!r} does not take state.lr_scale: read its learning "
                "rate as pl.optim.rate_at(name, lr, timestamp), and write Optimizer(..., takes_lr_scale=True)."
            )

    def start(state: State, **totals: PyTree) -> Memory:
        return {
            "best": torch.tensor(torch.nan, dtype=torch.float64),
            "bad": 0,
            "cooldown": 0,
            "reduce": False,
            **totals,
        }

    def compare(state: State, memory: Memory, value: float) -> Memory:
        best, bad, rest = memory["best"], memory["bad"] + 1, memory["cooldown"]
        if monitored.is_better(value, float(best), _margin(float(best))):
            best, bad = torch.tensor(value, dtype=torch.float64), 0
        if rest:
            rest, bad = rest - 1, 0
        if bad > patience:
            return {"best": best, "bad": 0, "cooldown": cooldown, "reduce": True}
        return {"best": best, "bad": bad, "cooldown": rest}

    def _margin(best: float) -> float:
        if math.isnan(best) or threshold_mode == "abs":
            return threshold
        # As torch has it: of a negative best value, a relative threshold allows worse ones.
        return best * threshold

    def reduce(state: State) -> State:
        before = 1.0 if state.lr_scale is None else float(state.lr_scale)
        scale = torch.tensor(max(before * factor, min(before, min_scale)), dtype=torch.float64)
        return state.replace(lr_scale=scale)

    return watcher(name, monitored, start, compare, "reduce", reduce, of_batches=(Event.EPOCH_END,), bind=bind)
