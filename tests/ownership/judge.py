"""The judge: what was kept of a stream has the numbers that it has in a twin, which copies at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from tests.ownership.ways import GONE, HOLDERS, WEAK, Impossible, Way, outcome, same

__all__ = ["Judge", "Keep"]


@attrs.frozen(kw_only=True)
class Keep:
    """Something is kept.

    Attributes:
        who: the loop's body, a callback, an algorithm.
        event, batch: at which, and in which.
        way: a key of WAYS.
        which: of several tensors.
        holder: a key of HOLDERS.
        often: whether it is read at each event.
        left: after how many events it is let go; None: at the end.
        stream: the number of the stream.
        nth: at which of the times that this event comes in this batch, from 0 on: of which microbatch.
    """

    who: str = "body"
    event: Event = Event.BATCH_END
    batch: int = 2
    way: str = "the State"
    which: int = 0
    holder: str = "a closure"
    often: bool = False
    left: int | None = None
    stream: int = 0
    nth: int = 0


class Judge:
    """Keeps things of the streams of one program.

    Args:
        truth: the judge of the twin; None: this is the twin's.
        lenient: whether what is kept may have been taken (``donate=True``), and says so.

    Attributes:
        numbers: of the twin: the numbers of each thing.
        compared: how many things were compared.
        violations: of the things that changed: what happened to each.
    """

    def __init__(self, truth: Judge | None = None, *, lenient: bool = False) -> None:
        self.truth, self.lenient, self.events, self.compared = truth, lenient, 0, 0
        self.numbers: dict[Keep, list[Tensor] | str] = {}
        self.kept: dict[Keep, tuple[Way, Callable[[], Any], float]] = {}
        self.violations: dict[Keep, str] = {}

    def keep(self, keep: Keep, way: Way, given: Any) -> None:
        """Keep what this way takes of a State, or of what else is given."""
        try:
            thing = way.take(given, keep.which)
        except Impossible:
            return
        if self.truth is None and not way.late:
            self.numbers[keep] = outcome(way.read, thing)
        else:
            get = HOLDERS["a closure" if self.truth is None else keep.holder](thing)
            self.kept[keep] = way, get, math.inf if keep.left is None else self.events + keep.left

    def tick(self) -> None:
        """An event: let go of what is due, and compare what is to be compared at each."""
        for keep, (way, get, due) in list(self.kept.items()):
            if self.events >= due:
                del self.kept[keep]
            if self.events >= due or (keep.often and not way.late):
                self._settle(keep, way, get)
        self.events += 1

    def finish(self) -> None:
        """Compare all that is still there."""
        while self.kept:
            keep, (way, get, _) = self.kept.popitem()
            self._settle(keep, way, get)

    def _settle(self, keep: Keep, way: Way, get: Callable[[], Any]) -> None:
        thing = get()
        if thing is GONE:
            return
        try:
            found = outcome(way.read, thing)
        except pl.errors.DonatedStateError:
            if keep.holder != WEAK and not self.lenient:
                self.violations[keep] = "has no numbers any more"
            return
        if self.truth is None:
            self.numbers[keep] = found
            return
        expected = self.truth.numbers.get(keep, "nothing")
        self.compared += 1
        if self.lenient and (not found or isinstance(found, str)):
            return  # views and iterators of a mapping that was emptied have nothing, and don't say why
        if isinstance(found, str) or isinstance(expected, str):
            alike = found == expected if isinstance(found, str) and isinstance(expected, str) else False
        else:
            alike = len(found) == len(expected) and all(map(same, found, expected))
        if not alike:
            self.violations[keep] = "changed" if isinstance(found, list) else f"gave {found} and not {expected!r:.60}"
