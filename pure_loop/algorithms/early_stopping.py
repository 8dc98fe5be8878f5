"""Early stopping: training ends where a metric has not become better for a while.

With the value ``v`` of an evaluation and the best one so far, ``b``::

    better:  v < b - min_delta     (mode="min"; v > b + min_delta for "max")
    stop:    patience or more has passed since the evaluation of b

Early stopping as a regulariser: https://doi.org/10.1007/3-540-49430-8_3 (Prechelt, 1998).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import attrs
import torch

from pure_loop._internal.arguments import is_integer
from pure_loop._internal.pytree import PyTree
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._monitored import Memory, Monitored, watcher
from pure_loop.cadence import every
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.members.stacking import over_members
from pure_loop.ranges import AtLeast, Duration, Name, Range, Setting, checked
from pure_loop.state import State, refuse_no_state
from pure_loop.time import Time, TimeUnit

__all__ = ["early_stopping", "restored"]


_COUNTED = (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN, TimeUnit.ITERATION)


@attrs.frozen
class Patience(Range):
    """A whole number of evaluations, or an amount of training; never 0."""

    typical: tuple[object, ...] | None = None

    def read(self, setting: Setting, value: object) -> int | Time:
        where = f"{setting.where}: {setting.name}={value!r}"
        if isinstance(value, Time | str):
            try:
                time = Time.parse(value)
            except ArgumentError:
                time = None  # what Time.parse says of a number, that it needs a unit, isn't so here
            if not time or time.unit not in _COUNTED:
                raise ArgumentError(
                    f'{where}: write a number of evaluations, 3, or an amount of training such as "3ep" or "1000ba".'
                )
            return time
        if not is_integer(value):
            raise ArgumentTypeError(f'{where}: write a whole number of evaluations, or a time such as "3ep".')
        if value < 1:
            raise ArgumentError(f"{where}: it is at least 1 evaluation.")
        return int(value)

    def in_words(self, setting: Setting) -> str:
        return 'evaluations, or a time above 0 such as `"3ep"`'

    def outside(self, setting: Setting) -> tuple[object, ...]:
        return 0, -1, "0ep", "soon", 1.5, True, "10s", "0.5dur"


@checked
def early_stopping(
    metric: Annotated[str, Name(typical=("train/loss",))] = "val/loss",
    *,
    mode: Literal["min", "max"] | None = None,
    patience: Annotated[int | str | Time, Patience(typical=(1000,))] = "3ep",
    min_delta: Annotated[float, AtLeast(0)] = 0.0,
    best: Literal["keep"] | None = "keep",
    interval: Annotated[str | Time, Duration(typical=("1ba", "1ep"))] = "1ep",
    name: str = "early_stopping",
) -> Algorithm:
    """Stops training where a metric has not become better for ``patience``; :func:`restored` gives the best State.

    The metric is compared at EVAL_END of its evaluator, where it is read from the device, and training ends at the
    checkpoint event that follows, as if ``max_duration`` were reached. The best value, when it was, and the parameters
    of that evaluation are in ``algorithm_state``: a run that is resumed stops where it would have stopped. A State that
    has stopped trains on after ``state.replace(stop=False)``.

    Args:
        metric: ``"<label>/<metric>"`` of an evaluator, as it is logged, or ``"train/loss"``: the mean loss of the
            batches in each ``interval``, weighted by their samples; or ``"train/<metric>"`` of
            ``fit(train_metrics=)``: that of the batches so far in the epoch.
        mode: whether less is better, ``"min"``, or more, ``"max"``. None: known for losses, accuracies and the like.
        patience: evaluations without a better value after which training ends, or how much training: ``"3ep"``.
        min_delta: by how much a value has to be better.
        best: ``"keep"``: keep the best parameters and buffers, those that were evaluated; None: the values alone.
        interval: how often the loss or metric of training is compared; of no effect on evaluators.
        name: another one, if there are several.

    State: ``best`` (float64, shape (), NaN before the first value), ``since`` (what was finished at that evaluation,
    and the ``evaluations`` after it), ``stop`` (a bool), ``why`` (a text, empty until it stops training, which
    ``state.why_ended()`` gives), and with ``best="keep"`` ``params`` and ``buffers``.

    Raises:
        ArgumentError: a setting out of range; by ``fit``: an evaluator or metric that there is not.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...     optimizer=pl.optim.sgd(lr=0.0), max_duration="100ep", evaluators={"val": data},
    ...     algorithms=[early_stopping("val/loss", patience=2)])
    >>> pl.run(stream).timestamp.epoch
    3
    """
    monitored = Monitored.read("early_stopping", metric, mode)
    read_patience = Time.parse(patience) if isinstance(patience, str) else patience
    cadence = every(interval)

    def kept(state: State) -> Memory:
        return {"params": state.params, "buffers": state.buffers} if best == "keep" else {}

    def start(state: State, **totals: PyTree) -> Memory:
        best_value = torch.tensor(torch.nan, dtype=torch.float64)
        return {"best": best_value, "since": _now(state, 0), "stop": False, "why": "", **totals, **kept(state)}

    def compare(state: State, memory: Memory, value: float) -> Memory:
        if monitored.is_better(value, float(memory["best"]), min_delta):
            best_value = torch.tensor(value, dtype=torch.float64)
            return {"best": best_value, "since": _now(state, 0), "why": "", **kept(state)}
        since = memory["since"]
        evaluations = since["evaluations"] + 1
        if isinstance(read_patience, Time):
            over = _has_passed(read_patience, since, state)
        else:
            over = evaluations >= read_patience
        return {"since": FrozenDict({**since, "evaluations": evaluations}), "stop": over, "why": ""}

    def is_due(state: State) -> bool:
        return cadence.at(state, Event.BATCH_END if state.event is Event.BATCH_CHECKPOINT else Event.EPOCH_END)

    def stop(state: State) -> State:
        memory = state.algorithm_state[name]
        value, since = float(memory["best"]), memory["since"]
        best_value = f"the best is {value:.4g}, after epoch {since['epoch']} (batch {since['batch']})"
        best_value = best_value if math.isfinite(value) else "it was never finite"
        passed = str(read_patience) if isinstance(read_patience, Time) else f"{read_patience} evaluations"
        why = f"{metric} has not become better for {passed}: {best_value}"
        return state.remember(name, FrozenDict({**memory, "why": why})).replace(stop=True)

    return watcher(name, monitored, start, compare, "stop", stop, is_due=is_due)


def _now(state: State, evaluations: int) -> FrozenDict[str, int | float]:
    """How much training is finished, by unit, and the evaluations since the best one."""
    counts = {unit.name.lower(): state.timestamp.get(unit) for unit in _COUNTED}
    return FrozenDict({**counts, "evaluations": evaluations})


def _has_passed(patience: Time, since: Mapping[str, int | float], state: State) -> bool:
    """Whether so much training has passed since these counts."""
    return state.timestamp.get(patience.unit) - since[patience.unit.name.lower()] >= patience.value


def restored(state: State, name: str = "early_stopping") -> State:
    """The State with the best parameters and buffers that :func:`early_stopping` kept, of each member its own.

    Raises:
        ArgumentError: the State has kept none under this name: there was no evaluation yet, or the metric was never
            finite.
        ArgumentTypeError: the first argument is no State.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...     optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", evaluators={"val": data},
    ...     algorithms=[early_stopping("val/loss")]))
    >>> restored(state).module()
    Linear(in_features=2, out_features=1, bias=True)
    """
    refuse_no_state(state, f"restored(state, {name!r})")
    if state.members:
        return over_members(lambda one: restored(one, name), stopped=True)(state)
    memory = state.algorithm_state.get(name)
    if not isinstance(memory, Mapping) or not {"params", "buffers", "best", "since"} <= memory.keys():
        raise ArgumentError(
            f"this State has no best parameters under {name!r}: it has algorithm state of "
            f"{sorted(state.algorithm_state)}. Train with algorithms=[pl.algorithms.early_stopping(best='keep')]."
        )
    if not math.isfinite(float(memory["best"])):
        evaluations = memory["since"]["evaluations"]
        what = (
            f"its metric was not finite in any of its {evaluations} evaluations"
            if evaluations
            else "its metric was not evaluated yet, and what it holds are the parameters that training began with"
        )
        raise ArgumentError(
            f"this State has no best parameters under {name!r}: {what}. Take a State after an evaluation, with "
            "fit(..., eval_interval=...) shorter than the run; state.module() has the latest parameters."
        )
    return state.replace(params=memory["params"], buffers=memory["buffers"])
