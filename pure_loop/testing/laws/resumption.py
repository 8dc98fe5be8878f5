"""The laws of resumption and of checkpoints: any State at a boundary is a complete checkpoint, also after a file."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import optree
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop.algorithm import flatten
from pure_loop.checkpoint import load, save
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, going_on
from pure_loop.state import State, outside_batch
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_events, same_state, same_stream, without_error
from pure_loop.testing.report import LawViolation, moment
from pure_loop.testing.subject import AlgorithmSubject

__all__ = ["checkpoint", "resumption", "resumption_from", "to_the_next_batch"]


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
        with without_error(f"{what}, the run", event):
            stream: Any = case.stream(subject.make(), fit=fit, start=_as_values(state))
            again = list(to_the_next_batch(stream) if short else stream)
            stream.close()
        _goes_on(again, uninterrupted, index, what, whole=not short)


def _goes_on(
    again: Pairs, uninterrupted: Pairs, index: int, what: str, *, loading: Sequence[Event] = (), whole: bool = False
) -> None:
    """Refuse a resumed run that does not go on as the uninterrupted one does.

    Args:
        again, uninterrupted: the pairs of both.
        index: of the pair from which it resumed.
        what: for the message.
        loading: the events with which it begins, of loading a file.
        whole: whether it has run to its end.
    """
    rest = going_on([event for event, _ in uninterrupted], index)
    wanted = [*loading, *rest]
    same_events([event for event, _ in again], wanted if whole else wanted[: len(again)], what)
    # Every call yields FIT_START first; the uninterrupted stream has none at this place.
    value = again[len(loading) + 1 :]
    same_stream(value, uninterrupted[len(uninterrupted) - len(rest) + 1 :][: len(value)], what)


def _as_values(state: State) -> State:
    """The State rebuilt from its values, as a checkpoint does: attributes and hooks of tensors are lost."""
    tree: PyTree = state
    copied = optree.tree_map(_value, tree, namespace=NAMESPACE)
    return cast("State", copied)


def _value(leaf: object) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def to_the_next_batch(stream: Any) -> Iterator[tuple[Event, State]]:
    """The stream up to the end of its next batch, or of its epoch."""
    for pair in stream:
        yield pair
        if pair[0] in (Event.BATCH_END, Event.EPOCH_CHECKPOINT):
            return


_BEFORE_TRAINING = [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD]


@law(
    "a State that was saved and loaded is equal to the original, and training resumes from it",
    rests_on=("resumption",),
)
def checkpoint(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Saves the State at two boundaries, which the seed chooses; runs from each file to the end of the next batch."""
    uninterrupted = subject.alone(case, fit)
    boundaries = [index for index, (event, _) in enumerate(uninterrupted) if event in BOUNDARIES]
    chosen = {boundaries[(case.seed * 5 + step) % len(boundaries)] for step in (1, 8)}
    with tempfile.TemporaryDirectory() as folder:
        for index in sorted(chosen):
            _save_and_resume(Path(folder) / f"{index}.safetensors", uninterrupted, index, subject, case, fit)


def _save_and_resume(
    path: Path, uninterrupted: Pairs, index: int, subject: AlgorithmSubject, case: Case, fit: Fit
) -> None:
    event, state = uninterrupted[index]
    what = f"saved at {moment(state)}, and loaded"
    module = state.module()
    try:
        save(state, path)
    except ArgumentTypeError as error:
        raise LawViolation(f"the State of {moment(state)} can't be saved: {error}", event=event) from error
    loaded = load(path, model=module)
    same_state(loaded, outside_batch(state).replace(event=state.event), what)
    algorithms = subject.make()
    # With load_path=, handlers of the events before training would run a second time; then the loaded State is passed.
    acts_before = {handler for algorithm in flatten(algorithms) for handler in algorithm.handlers}.intersection(
        _BEFORE_TRAINING
    )
    start: dict[str, Any] = {"start": loaded} if acts_before else {"start": module, "load_path": path}
    with without_error(f"{what}, the run", event):
        stream: Any = case.stream(algorithms, fit=fit, **start)
        again = list(to_the_next_batch(stream))
        stream.close()
    loading = [] if acts_before else _BEFORE_TRAINING[: 1 if case.plan.order == "2021" else None]
    _goes_on(again, uninterrupted, index, what, loading=loading)
