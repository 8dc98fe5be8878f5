"""``pl.ablate``: what each algorithm of a run does to a metric, by forks of one State."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

import attrs
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import refuse_iterator
from pure_loop._internal.pytree import Batch
from pure_loop._internal.reprs import columns, table
from pure_loop._internal.suggestions import passing_on, teaching
from pure_loop.algorithm import Algorithm, bind, compose
from pure_loop.entry.fit import FitOptions, fit
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loop.stream import run
from pure_loop.members.ensemble import refuse_several
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import State
from pure_loop.time import Time, TimeUnit, read_time

# What records, saves, or decides how a stream is read: a comparison has no use of it.
_LEFT_OUT: FitOptions = {"callbacks": (), "loggers": (), "run_name": None, "autoresume": None}


@attrs.frozen(repr=False)
class Ablation:
    """What :func:`pl.ablate <pure_loop.tools.ablate>` measured; a notebook or a terminal shows the table.

    Attributes:
        metric: its name.
        steps: how long each fork was trained.
        start: the batch of the State that was forked.
        everything: the metric with all algorithms.
        without: the metric without each algorithm, by its name.
        nothing: the metric without any.

    >>> Ablation("val/loss", "200ba", 0, 0.5, {"mixup": 0.75}, 1.0)
    ablate: val/loss after 200ba, from batch 0
      algorithms       val/loss  difference
      all                   0.5
      without mixup        0.75       +0.25
      none                    1        +0.5
    """

    metric: str
    steps: str
    start: int
    everything: float
    without: dict[str, float]
    nothing: float

    def rows(self) -> list[tuple[str, float, float]]:
        """Algorithms, the metric, and by how much it is larger than with all of them."""
        forks = {"all": self.everything, **{f"without {name}": value for name, value in self.without.items()}}
        return [(name, value, value - self.everything) for name, value in {**forks, "none": self.nothing}.items()]

    def __repr__(self) -> str:
        cells = [(name, f"{value:.6g}", "" if name == "all" else f"{more:+.4g}") for name, value, more in self.rows()]
        lines = columns([("algorithms", self.metric, "difference"), *cells], left=[0])
        return "\n".join([self._caption(), *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        return table(self.rows(), ("algorithms", self.metric, "difference"), self._caption())

    def _caption(self) -> str:
        return f"ablate: {self.metric} after {self.steps}, from batch {self.start}"


@teaching
@passing_on(fit)
def ablate(
    model_or_state: nn.Module | State,
    train_dataloader: Iterable[Batch],
    *,
    steps: str | Time,
    metric: str = "val/loss",
    **settings: Unpack[FitOptions],
) -> Ablation:
    """Train forks of one State with all algorithms, without each of them, and without any, and compare a metric.

    All forks see the same batches and draw the same random numbers, so that what differs between two of them is what an
    algorithm does. Each is trained for ``steps``, and evaluated. Fractions of the duration are those of
    ``max_duration``, as in the whole run. Model and State stay as they are; callbacks, loggers and ``autoresume`` are
    left out.

    Args:
        model_or_state: what to fork: a model, or a State that a run has yielded at a boundary.
        train_dataloader: as in :func:`pure_loop.fit`; not an iterator, which a fork would use up.
        steps: how long a fork is trained: ``"200ba"``, ``"1ep"``.
        metric: the name of an evaluator and of its metric, as ``"val/loss"``; or ``"train/loss"``: the mean of the loss
            over the batches of a fork.
        **settings: the other arguments of :func:`pure_loop.fit`. Its ``algorithms`` are what is left out, compositions
            taken apart; one that changes the model at INIT can be left out of the training of a model, and not of
            that of a State, in which the model is changed already.

    Returns:
        An :class:`Ablation`, which a terminal or a notebook shows as a table.

    Raises:
        ArgumentError: no algorithm, two of one name, a metric that there is not, data that is an iterator, steps of no
            time or beyond ``max_duration``; or a State and an algorithm that binds INIT.
        ArgumentTypeError: an argument that ``fit`` doesn't have, or that it lacks; one of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.eye(3), torch.tensor([0, 1, 2]))] * 4
    >>> net = torch.nn.Linear(3, 3)
    >>> _ = [torch.nn.init.zeros_(parameter) for parameter in net.parameters()]
    >>> result = pl.ablate(net, data, algorithms=[pl.algorithms.label_smoothing(0.3)],
    ...                    steps="4ba", metric="train/loss", loss=torch.nn.functional.cross_entropy,
    ...                    optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")
    >>> [name for name, value, difference in result.rows()]
    ['all', 'without label_smoothing', 'none']
    >>> result.everything > result.nothing
    True
    """
    refuse_several(model_or_state, "ablate")
    refuse_iterator(train_dataloader, "ablate", "which the first fork would use up")
    members = _members(settings.get("algorithms", ()))
    begun = model_or_state
    if isinstance(begun, State):
        for name, member in members.items():
            if Event.INIT in member.handlers and begun.event is not None:
                raise ArgumentError(
                    f"ablate: algorithm {name!r} binds INIT, and changed the model of this State before: give the "
                    f"model itself, or leave {name!r} out of algorithms."
                )
        begun = begun.replace(stop=False)
    time = read_time(steps, "ablate: steps")
    if not time or time.unit is TimeUnit.SECOND:
        raise ArgumentError(f'ablate: steps={steps!r}: give an amount of training, such as steps="200ba".')
    settings = {**settings, **_LEFT_OUT}

    def value_of(chosen: Sequence[Algorithm]) -> float:
        start = _without_memory(begun, members.keys() - {member.name for member in chosen})
        losses: list[Tensor] = []
        watching = [_stop_after(time), _losses_into(losses)]
        state = run(fit(start, train_dataloader, **(settings | {"algorithms": [*chosen, *watching]})))
        return _metric_of(state, metric, losses)

    everything = value_of(list(members.values()))
    without = {name: value_of([member for label, member in members.items() if label != name]) for name in members}
    nothing = value_of([]) if len(members) > 1 else next(iter(without.values()))
    first = begun.timestamp.batch if isinstance(begun, State) else 0
    return Ablation(metric, str(time), first, everything, without, nothing)


def _members(algorithms: object) -> dict[str, Algorithm]:
    """Algorithms by their names, in their order.

    Raises:
        ArgumentError, ArgumentTypeError: there is none, or it is none.
    """
    if not isinstance(algorithms, list | tuple):
        raise ArgumentTypeError(
            f"ablate: algorithms={algorithms!r} is no list of algorithms, such as [mixup(), sam()]."
        )
    members = {member.name: member for member in compose(*algorithms).members}
    if not members:
        raise ArgumentError("ablate: algorithms is empty, so that there is nothing to leave out.")
    bind(tuple(members.values()))
    return members


def _without_memory(begun: nn.Module | State, names: Iterable[str]) -> nn.Module | State:
    """A State without what algorithms that are left out keep."""
    if not isinstance(begun, State):
        return begun
    left = set(names)
    return begun.replace(
        algorithm_state={name: value for name, value in begun.algorithm_state.items() if name not in left}
    )


def _stop_after(time: Time) -> Algorithm:
    """An algorithm that ends training at the first boundary after so much of it."""

    def stop(state: State) -> State:
        begun, timestamp = state.algorithm_state["ablate"], state.timestamp
        over = timestamp.get(time.unit) - begun.get(time.unit) >= time.value
        return state.replace(stop=True) if over else state

    return Algorithm(
        "ablate", {(Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT): stop}, init=lambda state: state.timestamp
    )


def _losses_into(losses: list[Tensor]) -> Algorithm:
    def keep(state: State) -> State:
        losses.append(total_loss(state.loss).detach())
        return state

    return Algorithm("ablate_losses", {Event.BATCH_END: keep})


def _metric_of(state: State, metric: str, losses: list[Tensor]) -> float:
    """
    Raises:
        ArgumentError: the State has no metric of this name.
    """
    if metric == "train/loss":
        return float(torch.stack(losses).double().mean())
    label, _, name = metric.rpartition("/")
    values = state.metrics.get(label)
    if values is None or name not in values:
        there = [f"{label}/{name}" for label, group in state.metrics.items() for name in group]
        raise ArgumentError(
            f"ablate: there is no metric {metric!r}: there are {', '.join(map(repr, ['train/loss', *there]))}. "
            "Evaluators are those of fit(evaluators=)."
        )
    return float(values[name])
