"""Population-based training: members that do badly go on from the States of those that do well, at other rates.

At a round, of ``n`` members that train, with the values ``v`` of a metric and ``k = max(1, floor(exploit n))``::

    exploit:  each of the worst k takes what one of the best k has learned, drawn evenly, if its v is better
    explore:  lr_scale = 0.8 lr_scale or 1.25 lr_scale, drawn evenly, for those that did

So a schedule of rates is found in one run: Population Based Training of Neural Networks,
https://arxiv.org/abs/1711.09846 (Jaderberg et al., 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import attrs
import torch
from torch import Tensor

from pure_loop._internal.arguments import accepts, name_of
from pure_loop._internal.pytree import PyTree
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._monitored import Memory, Monitored, watcher
from pure_loop.algorithms._spans import Counted
from pure_loop.callback import Run
from pure_loop.errors import AlgorithmReturnError, ArgumentError, ArgumentTypeError
from pure_loop.frozendict import FrozenDict
from pure_loop.members import turns
from pure_loop.members.each import Each
from pure_loop.members.stacking import over_some, running
from pure_loop.optim import Optimizer
from pure_loop.random import generator
from pure_loop.ranges import Name, Within, checked
from pure_loop.state import State, refuse_no_state
from pure_loop.time import Time, Timestamp

__all__ = ["Round", "population_based", "rounds"]

SERVES = "members"

Explore = Callable[[Any, torch.Generator], State]
FACTORS = (0.8, 1.25)
# Rounds for which a history has room from the first one on; then twice as many. A step is traced anew where it grows.
_ROOM = 64


@attrs.frozen
class Round:
    """One round, as :func:`rounds` gives it; of each member, in order.

    Attributes:
        batch: after which batch it was.
        sources: the member whose State each went on from: its own number, if it kept its own.
        values: of the metric, before the round.
        lr_scales: the factors of the rates, after it.
    """

    batch: int
    sources: tuple[int, ...]
    values: tuple[float, ...]
    lr_scales: tuple[float, ...]


@checked
def population_based(
    metric: Annotated[str, Name(typical=("train/loss",))] = "val/loss",
    *,
    mode: Literal["min", "max"] | None = None,
    interval: Annotated[str | Time, Counted(typical=("1ba", "1ep"))] = "1ep",
    exploit: Annotated[float, Within(0, 0.5)] = 0.2,
    lr_scale: Each | None = None,
    explore: Explore | None = None,
    name: str = "population_based",
) -> Algorithm:
    """Lets the worst members of an ensemble go on from the States of the best, with other learning rates.

    The metric is compared at EVAL_END of its evaluator, where it is read from the device, and members change at the
    checkpoint event that follows. One that exploits another takes its parameters, buffers, optimizer state, loss scale,
    ``lr_scale`` and the algorithm state of other algorithms, and keeps its own seed. A value that isn't finite is worse
    than any other; of equal ones the member with the smaller number is better. Members that have stopped stay out of
    it. Whom each exploits is drawn by the seed of the run and the number of the batch, and the history is in
    ``algorithm_state`` (:func:`rounds`), so a run that is resumed goes on as it would have.

    Args:
        metric: ``"<label>/<metric>"`` of an evaluator, as it is logged, or ``"train/loss"``: the mean loss of the
            batches since the last round, weighted by their samples; or ``"train/<metric>"`` of
            ``fit(train_metrics=)``: that of the batches so far in the epoch.
        mode: whether less is better, ``"min"``, or more, ``"max"``. None: known for losses, accuracies and the like.
        interval: the training between two rounds, at least: a round is where a value comes after it.
        lr_scale: of each member where training begins, ``pl.each([0.1, 1.0, 10.0])``; default: 1. A learning rate that
            is a ``pl.each`` itself would not be taken by who exploits its member, and is refused.
        exploit: the part of the members that exploits as large a part; at least one of two; 0: none.
        explore: ``(state, generator) -> state`` of a member that has exploited another one, as it is then: draw from
            the generator alone. Default: ``lr_scale``, times 0.8 or 1.25.
        name: another one, if there are several.

    State: ``begun`` (a bool: whether ``lr_scale`` is that of each member), ``since`` (what was finished at the last
    round), ``value`` (of each member when it was last compared; float64, shape (members,)), ``rounds`` (how many there
    were), of each round ``batch``, ``source``, ``values`` and ``lr_scales`` (shape (members, room), the first
    ``rounds`` columns), and ``exploit`` (a bool: whether members change at the next checkpoint event).

    Raises:
        ArgumentError: a setting out of range; by ``fit``: an evaluator or metric that there is not, no ensemble, or an
            optimizer that does not take ``state.lr_scale``.
        ArgumentTypeError: a setting of another type.
        AlgorithmReturnError: in training: ``explore`` returned no State.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> models = pl.ensemble(lambda: torch.nn.Linear(2, 1), seeds=[0, 0, 0])
    >>> state = pl.run(pl.fit(models, data, loss=torch.nn.functional.mse_loss, max_duration="2ep",
    ...     optimizer=pl.optim.sgd(lr=0.1), evaluators={"val": data},
    ...     algorithms=[population_based("val/loss", lr_scale=pl.each([0.125, 0.25, 0.5]))]))
    >>> [(found.batch, found.sources, found.lr_scales) for found in rounds(state)][0]
    (3, (2, 1, 2), (0.625, 0.25, 0.5))
    """
    monitored = Monitored.read("population_based", metric, mode)
    length = Time.parse(interval)
    scales = () if lr_scale is None else _read_scales(lr_scale)
    if explore is not None and not (callable(explore) and accepts(explore, 2)):
        raise ArgumentTypeError(
            f"population_based: explore={explore!r:.60} is no function of (state, generator) that returns the State of "
            "the member: explore=lambda state, generator: state.replace(lr_scale=...)."
        )

    def bind(run: Run) -> None:
        monitored.bind(run)
        if explore is None and run.optimizer is not None and not run.optimizer.takes_lr_scale:
            raise ArgumentError(
                f"population_based: optimizer {run.optimizer.name!r} does not take state.lr_scale: read its learning "
                "rate as pl.optim.rate_at(name, lr, timestamp), and write Optimizer(..., takes_lr_scale=True); or "
                "write explore=, a function that changes something else."
            )
        if run.optimizer is not None and _is_of_each(run.optimizer, Timestamp(max_duration=run.max_duration)):
            raise ArgumentError(
                "population_based: the learning rate of the optimizer is a pl.each, which a member that exploits "
                "another one would not take from it: write one lr for all, and "
                "population_based(lr_scale=pl.each(factors))."
            )

    def begin(state: State) -> State:
        memory = state.algorithm_state[name]
        if not scales or memory["begun"]:
            return state
        scale = torch.tensor(scales, dtype=torch.float64)
        return state.remember(name, FrozenDict({**memory, "begun": True})).replace(lr_scale=scale)

    def is_due(state: State) -> bool:
        return bool(state.timestamp.get(length.unit) - state.algorithm_state[name]["since"] >= length.value)

    def start(state: State, **totals: PyTree) -> Memory:
        numbers, values = torch.zeros(state.members, 0, dtype=torch.int64), torch.zeros(state.members, 0).double()
        history = {"batch": numbers, "source": numbers, "values": values, "lr_scales": values}
        unknown = torch.full((state.members,), torch.nan, dtype=torch.float64)
        since = state.timestamp.get(length.unit)
        return {"begun": False, "since": since, "value": unknown, "rounds": 0, **history, "exploit": False, **totals}

    def compare(state: State, memory: Memory, values: Tensor) -> Memory:
        return {"value": values, "exploit": True} if is_due(state) else {}

    def change(state: State) -> State:
        memory = state.algorithm_state[name]
        random = generator(state.seed, name, state.timestamp.batch)
        sources = _sources(monitored, memory["value"], running(state), exploit, random)
        changed = [number for number, source in enumerate(sources) if source != number]
        if changed:
            state = _exploited(state, sources, name)
            state = _rescaled(state, changed, random) if explore is None else _explored(state, changed, random, explore)
        rates = [1.0] * state.members if state.lr_scale is None else state.lr_scale.tolist()
        batch = state.timestamp.batch
        column = {"source": sources, "batch": [batch] * len(sources), "values": memory["value"], "lr_scales": rates}
        history = {key: _with_column(memory[key], memory["rounds"], column[key]) for key in column}
        since = state.timestamp.get(length.unit)
        return state.remember(name, FrozenDict({**memory, **history, "since": since, "rounds": memory["rounds"] + 1}))

    return watcher(
        *(name, monitored, start, compare, "exploit", change),
        is_due=is_due,
        bind=bind,
        begin=begin,
        across_members=True,
    )


def _read_scales(lr_scale: object) -> tuple[float, ...]:
    if not isinstance(lr_scale, Each):
        raise ArgumentTypeError(
            f"population_based: lr_scale={lr_scale!r:.60}: write the factor of each member, "
            "lr_scale=pl.each([0.1, 1.0])."
        )
    for value in lr_scale.values:
        if callable(value) or not 0 < value < math.inf:
            raise ArgumentError(f"population_based: lr_scale has {value!r}: each factor is a number above 0.")
    return tuple(float(value) for value in lr_scale.values if not callable(value))


def _is_of_each(optimizer: Optimizer, now: Timestamp) -> bool:
    """Whether the learning rate depends on the number of a member."""
    if optimizer.parts:
        return any(_is_of_each(part, now) for part in optimizer.parts.values())
    return len(turns.of_each(lambda: optimizer.lr(now), 2)) > 1


def _sources(
    monitored: Monitored, values: Tensor, training: list[int], exploit: float, random: torch.Generator
) -> list[int]:
    """Of each member, the number of the one from which it goes on."""
    sources = list(range(len(values)))
    ranked = monitored.best_first(values, training)
    # 0.3 * 10 is less than 3 in floating point.
    count = min(max(1, int(exploit * len(ranked) + 1e-9)), len(ranked) // 2) if exploit else 0
    for number in sorted(ranked[len(ranked) - count :]):
        source = ranked[int(torch.randint(count, (), generator=random))]
        if monitored.is_better(float(values[source]), float(values[number])):
            sources[number] = source
    return sources


def _exploited(state: State, sources: list[int], name: str) -> State:
    """The State whose members have what those of these numbers have learned; each keeps its seed and its metrics."""
    copies = state.members(sources)
    return state.replace(
        params=copies.params,
        buffers=copies.buffers,
        opt_state=copies.opt_state,
        loss_scale=copies.loss_scale,
        lr_scale=copies.lr_scale,
        algorithm_state={**copies.algorithm_state, name: state.algorithm_state[name]},
    )


def _rescaled(state: State, changed: list[int], random: torch.Generator) -> State:
    scale = torch.ones(state.members, dtype=torch.float64) if state.lr_scale is None else state.lr_scale.clone()
    for number in changed:
        scale[number] *= FACTORS[int(torch.randint(len(FACTORS), (), generator=random))]
    return state.replace(lr_scale=scale)


def _explored(state: State, changed: list[int], random: torch.Generator, explore: Explore) -> State:
    def one(member: State) -> State:
        result = explore(member, random)
        if type(result) is not type(member):
            raise AlgorithmReturnError(
                f"population_based: explore={name_of(explore)} returned a {type(result).__name__}: it takes the State "
                "of a member, and returns it changed: return state.replace(lr_scale=...)."
            )
        return result

    return over_some(state, changed, one)


def _with_column(rows: Tensor, number: int, column: Iterable[float] | Tensor) -> Tensor:
    """A history with one column more, of which it has this number so far."""
    room = rows.new_zeros(len(rows), max(_ROOM, number) if number == rows.shape[1] else 0)
    result = torch.cat([rows, room], dim=1)
    result[:, number] = torch.as_tensor(column, dtype=rows.dtype)
    return result


def rounds(state: State, name: str = "population_based") -> tuple[Round, ...]:
    """The rounds of :func:`population_based` so far, the first one first.

    Raises:
        ArgumentError: the State has no history under this name.
        ArgumentTypeError: the first argument is no State.
    """
    refuse_no_state(state, f"rounds(state, {name!r})")
    memory = state.algorithm_state.get(name)
    if not isinstance(memory, Mapping) or not {"rounds", "source", "values", "lr_scales"} <= memory.keys():
        raise ArgumentError(
            f"this State has no rounds under {name!r}: it has algorithm state of {sorted(state.algorithm_state)}. "
            "Train with algorithms=[pl.algorithms.population_based(...)]."
        )
    tables: list[Tensor] = [memory[key] for key in ("batch", "source", "values", "lr_scales")]
    # Of a member that was taken out there is one row, its own.
    batch, *others = ((table if table.ndim == 2 else table[None]).T.tolist() for table in tables)
    columns = zip(batch, *others, strict=True)
    listed = [Round(at[0], tuple(a), tuple(b), tuple(c)) for at, a, b, c in columns]
    return tuple(listed[: memory["rounds"]])
