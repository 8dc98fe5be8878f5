"""The law of resumption: any State at a boundary is a complete checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import optree
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, going_on
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_events, same_stream
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation, moment

__all__ = ["resumption", "resumption_from", "to_the_next_batch"]


@law(
    "from every boundary, training resumes with a fresh instance exactly as if it had not stopped",
    rests_on=("purity", "memory", "order", "value", "determinism", "visibility"),
)
def resumption(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Resumes from every boundary to the end of the next batch; from two, which the seed chooses, to the end."""
    resumption_from(subject, case, fit, {case.seed % 5, (case.seed * 7 + 3) % 11})


def resumption_from(subject: AlgorithmSubject, case: Case, fit: Fit, to_the_end: Collection[int] | None) -> None:
    """Try the law.

    Args:
        to_the_end: numbers of the boundaries from which the run is resumed to its end; from the others only to the end
            of the next batch. None: from all to the end.
    """
    uninterrupted = subject.alone(case, fit)
    events = [event for event, _ in uninterrupted]
    boundaries = [index for index, event in enumerate(events) if event in BOUNDARIES]
    for number, index in enumerate(boundaries):
        event, state = uninterrupted[index]
        what = f"resumed from {moment(state)}"
        short = to_the_end is not None and number not in to_the_end
        try:
            stream: Any = case.stream(subject.make(), fit=fit, start=_as_values(state))
            again = list(to_the_next_batch(stream) if short else stream)
            stream.close()
        except Exception as error:
            raise LawViolation(f"{what}, the run ended in {type(error).__name__}: {error}", event=event) from error
        rest = going_on(events, index)
        same_events([event for event, _ in again], rest[: len(again)] if short else rest, what)
        # Every call yields FIT_START first; the uninterrupted stream has none at this place.
        wanted: Pairs = uninterrupted[len(uninterrupted) - len(rest) + 1 :]
        same_stream(again[1:], wanted[: len(again) - 1], what)


def _as_values(state: State) -> State:
    """The State rebuilt from its values, as a checkpoint does: attributes and hooks of tensors are lost."""
    tree: Any = state
    copied: Any = optree.tree_map(_value, tree, namespace=NAMESPACE)
    return copied  # type: ignore[no-any-return]


def _value(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def to_the_next_batch(stream: Any) -> Iterator[tuple[Event, State]]:
    """The stream up to the end of its next batch, or of its epoch."""
    for pair in stream:
        yield pair
        if pair[0] in (Event.BATCH_END, Event.EPOCH_CHECKPOINT):
            return
