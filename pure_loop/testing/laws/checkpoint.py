"""The law of checkpoints: a State that was saved and loaded is equal to the original, and training resumes from it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pure_loop as pl
from pure_loop.algorithm import flatten
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, going_on
from pure_loop.state import outside_batch
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_events, same_state, same_stream
from pure_loop.testing.laws.resumption import to_the_next_batch
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation, moment

__all__ = ["checkpoint"]

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
        pl.save(state, path)
    except ArgumentTypeError as error:
        raise LawViolation(f"the State of {moment(state)} can't be saved: {error}", event=event) from error
    loaded = pl.load(path, model=module)
    same_state(loaded, outside_batch(state).replace(event=state.event), what)
    algorithms = subject.make()
    # With load_path=, handlers of the events before training would run a second time; then the loaded State is passed.
    acts_before = {handler for algorithm in flatten(algorithms) for handler in algorithm.handlers}.intersection(
        _BEFORE_TRAINING
    )
    start: dict[str, Any] = {"start": loaded} if acts_before else {"start": module, "load_path": path}
    try:
        stream: Any = case.stream(algorithms, fit=fit, **start)
        again = list(to_the_next_batch(stream))
        stream.close()
    except Exception as error:
        raise LawViolation(f"{what}, the run ended in {type(error).__name__}: {error}", event=event) from error
    rest = going_on([event for event, _ in uninterrupted], index)
    loading = [] if acts_before else _BEFORE_TRAINING[: 1 if case.plan.order == "2021" else None]
    wanted = [*loading, *rest]
    same_events([event for event, _ in again], wanted[: len(again)], what)
    value = again[len(loading) + 1 :]
    same_stream(value, uninterrupted[len(uninterrupted) - len(rest) + 1 :][: len(value)], what)
