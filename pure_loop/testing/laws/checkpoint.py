"""The law of checkpoints: what was saved and loaded is the State, and training goes on from it."""

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
    "a State that was saved and loaded is the same, and training goes on from it",
    rests_on=("resumption",),
)
def checkpoint(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """From two boundaries, which the seed chooses, by way of a file, to the end of the next batch."""
    whole = subject.alone(case, fit)
    boundaries = [index for index, (event, _) in enumerate(whole) if event in BOUNDARIES]
    chosen = {boundaries[(case.seed * 5 + step) % len(boundaries)] for step in (1, 8)}
    with tempfile.TemporaryDirectory() as folder:
        for index in sorted(chosen):
            _through(Path(folder) / f"{index}.safetensors", whole, index, subject, case, fit)


def _through(path: Path, whole: Pairs, index: int, subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    event, kept = whole[index]
    what = f"saved at {moment(kept)}, and loaded"
    module = kept.module()
    try:
        pl.save(kept, path)
    except ArgumentTypeError as error:
        raise LawViolation(f"the State of {moment(kept)} can't be saved: {error}", event=event) from error
    loaded = pl.load(path, model=module)
    same_state(loaded, outside_batch(kept).replace(event=kept.event), what)
    algorithms = subject.make()
    # What an algorithm does before training it would do again where the loop itself loads.
    beforehand = {each for algorithm in flatten(algorithms) for each in algorithm.handlers}.intersection(
        _BEFORE_TRAINING
    )
    starts: dict[str, Any] = {"start": loaded} if beforehand else {"start": module, "load_path": path}
    try:
        stream: Any = case.stream(algorithms, fit=fit, **starts)
        again = list(to_the_next_batch(stream))
        stream.close()
    except Exception as error:
        raise LawViolation(f"{what}, it ended in an error: {type(error).__name__}: {error}", event=event) from error
    rest = going_on([each for each, _ in whole], index)
    started = [] if beforehand else _BEFORE_TRAINING[: 1 if case.plan.order == "2021" else None]
    wanted = [*started, *rest]
    same_events([each for each, _ in again], wanted[: len(again)], what)
    given = again[len(started) + 1 :]
    same_stream(given, whole[len(whole) - len(rest) + 1 :][: len(given)], what)
