"""An ensemble beside the runs of its members alone, event by event."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event, State
from pure_loop.random.seeds import seeded_all
from pure_loop.state import STOPPING
from pure_loop.testing.comparison import Difference, close
from tests.support import problem

__all__ = ["Pick", "Sweep", "alone", "assert_alike", "in_float64", "together"]

# Values of the members as one: ``pl.each`` in an ensemble, and that of a member alone.
Pick: TypeAlias = Callable[[Sequence[Any]], Any]
TOLERANCE = 1e-12
Pairs: TypeAlias = list[tuple[Event, State]]


@attrs.frozen
class Sweep:
    """Runs that differ in their seeds, and in what ``settings`` picks.

    Attributes:
        make: makes the model.
        data: batches, or a dataloader.
        settings: arguments of ``fit``, given what picks among the values of members.
        seeds: of the members.
        ensemble: further arguments of ``pl.ensemble``.
        more: further arguments of ``fit`` for the ensemble alone.
    """

    make: Callable[[], nn.Module]
    data: Any
    settings: Callable[[Pick], dict[str, Any]]
    seeds: tuple[int, ...] = (3, 4, 5)
    ensemble: dict[str, Any] = attrs.field(factory=dict)
    more: dict[str, Any] = attrs.field(factory=dict)

    @property
    def own(self) -> bool:
        return self.ensemble.get("data") == "own"


def arguments(sweep: Sweep, pick: Pick) -> dict[str, Any]:
    defaults = {"loss": problem.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep"}
    return defaults | {"donate": False} | sweep.settings(pick)


def together(sweep: Sweep, model: Any = None, **more: Any) -> Iterator[tuple[Event, State]]:
    """The stream of the ensemble, from its beginning or from a State."""
    model = pl.ensemble(sweep.make, seeds=sweep.seeds, **sweep.ensemble) if model is None else model
    count = len(sweep.seeds)
    return pl.fit(model, sweep.data, **arguments(sweep, lambda values: pl.each(values[:count])) | sweep.more | more)


def alone(sweep: Sweep, number: int, model: Any = None, **more: Any) -> Iterator[tuple[Event, State]]:
    """The stream of one member, from its beginning or from a State."""
    if model is None:
        with seeded_all(sweep.seeds[number]):
            module = sweep.make()
        model = State.create(module, seed=sweep.seeds[number], data_seed=None if sweep.own else 0)
    return pl.fit(model, sweep.data, **arguments(sweep, lambda values: values[number]) | more)


def differing(state: State, wanted: State, tolerance: float = TOLERANCE) -> Difference | None:
    return close(state, wanted, tolerance=tolerance)


def assert_alike(sweep: Sweep, tolerance: float = TOLERANCE) -> Pairs:
    """Each member is at each event what it is alone; gives the stream of the ensemble."""
    pairs = list(together(sweep))
    events = [event for event, _ in pairs]
    for number in range(len(sweep.seeds)):
        solo = list(alone(sweep, number))
        # Where it has stopped, alone it ends, and here it waits for the others as it was then.
        stopped = next((place for place, (_, state) in enumerate(solo) if state.stop), None)
        if stopped is not None:
            (_, end), (_, wanted) = pairs[-1], solo[-1]
            last = end.member(number).replace(position=wanted.position)
            assert differing(last, wanted, tolerance) is None, f"member {number}, which has stopped"
            # There is more to the end of a run than to its stop.
            solo = solo[: stopped + (solo[stopped][0] in STOPPING)]
        assert events[: len(solo)] == [event for event, _ in solo], number
        for (event, state), (_, wanted) in zip(pairs, solo, strict=False):
            difference = differing(state.member(number), wanted, tolerance)
            assert difference is None, f"member {number} at {event} of batch {wanted.timestamp.batch}: {difference}"
    return pairs


def in_float64(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)
