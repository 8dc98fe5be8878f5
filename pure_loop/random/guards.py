"""Guards of code that is neither torch's nor this library's: it draws from the global generators by its position.

A forward, a loss, an optimizer, a collate function, a handler of an algorithm, a callback or a metric may draw from any
global generator: torch's, Python's, NumPy's. They are seeded before it is called and put back afterwards, so that what
it draws depends on nothing but the seed of the run, its place in the run and its name. Code of the library draws from
generators of its own, so nothing is done for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pure_loop.random.seeds import derive, seeded_all, seeded_apart

if TYPE_CHECKING:
    from pure_loop.event import Event
    from pure_loop.state import State
    from pure_loop.time import Timestamp


class Place:
    """Which batch of an evaluation and which microbatch are under way: what a State does not say.

    Attributes:
        batch: of the evaluation or prediction; 0 in training.
        microbatch: of the batch.
    """

    __slots__ = ("batch", "microbatch")

    def __init__(self) -> None:
        self.batch = self.microbatch = 0

    def clear(self) -> None:
        """Nothing is under way."""
        self.batch = self.microbatch = 0


def seed_at(
    seed: int,
    path: tuple[str | int, ...],
    event: Event | None,
    timestamp: Timestamp,
    *,
    evaluator: str | None = None,
    batch: int = 0,
    microbatch: int = 0,
) -> int:
    """The seed of code of the user's where a stream is; the same on all ranks.

    Args:
        seed: of the run.
        path: what code it is: its kind, its name, its number.
        event, timestamp, evaluator: those of the State that it is called with.
        batch, microbatch: those of a :class:`Place`.
    """
    at = "" if event is None else event.value
    return derive(seed, *path, at, timestamp.epoch, timestamp.batch, evaluator or "", batch, microbatch)


def guard(
    state: State, path: tuple[str | int, ...], place: Place | None = None, *, apart: bool = False
) -> AbstractContextManager[None]:
    """Seeds the global generators for code of the user's, and puts them back.

    Args:
        state: the one that the code is called with.
        path: what code it is.
        place: the batch and microbatch; None: a script of the user's runs.
        apart: the code changes nothing, and may wait for another thread, for which it holds no lock.
    """
    numbers = {} if place is None else {"batch": place.batch, "microbatch": place.microbatch}
    seeding = seeded_apart if apart else seeded_all
    return seeding(seed_at(state.seed, path, state.event, state.timestamp, evaluator=state.evaluator, **numbers))
