"""The judge: what was kept of a stream has the numbers that it has in a twin, which copies at every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import attrs
from torch import Tensor

import pure_loop as pl
from tests.ownership.ways import GONE, HOLDERS, WEAK, Impossible, Way, of_tree, outcome, same

__all__ = ["Judge", "Violation"]


class Violation(AssertionError):  # noqa: N818
    """Something that was kept has other numbers, or none."""


@attrs.define
class Record:
    """Something that is kept.

    Attributes:
        way: reads it.
        get: the holder.
        weak: whether it may lose its numbers, and say so.
        often: whether it is compared at each event, too, and not only when it is let go.
        left: after how many events it is let go; None: at the end.
    """

    way: Way
    get: Callable[[], Any]
    weak: bool
    often: bool
    left: int | None


class Judge:
    """Keeps things of the streams of one program.

    Args:
        truth: the judge of the twin; None: this is the twin's.
        lenient: whether what is kept may have been taken (``donate=True``), and says so.

    Attributes:
        numbers: of the twin: the numbers of each thing by its key.
        compared: how many things were compared.
        violations: of the things that changed: what happened to each.
    """

    def __init__(self, truth: Judge | None = None, *, lenient: bool = False) -> None:
        self.truth, self.lenient = truth, lenient
        self.numbers: dict[Hashable, list[Tensor] | str] = {}
        self.records: dict[Hashable, Record] = {}
        self.compared = 0
        self.violations: dict[Hashable, str] = {}

    def keep(
        self, key: Hashable, way: Way, given: Any, which: int = 0, holder: str = "a closure", often: bool = False,
        left: int | None = None,
    ) -> None:  # fmt: skip
        """Keep what this way takes of a State, or of what else is given."""
        try:
            thing = way.take(given, which)
        except Impossible:
            return
        if self.truth is None:
            if not way.late:
                self.numbers[key] = outcome(way.read, thing)
                return
            holder = "a closure"
        get = HOLDERS[holder](thing)
        del thing
        self.records[key] = Record(way, get, holder == WEAK, often and not way.late, left)

    def compare(self, key: Hashable, given: Any) -> None:
        """Compare a State as it is now, and keep nothing."""
        if self.truth is None:
            self.numbers[key] = outcome(of_tree, given)
        else:
            self._check(key, outcome(of_tree, given))

    def tick(self) -> None:
        """An event: let go of what is due, and compare what is to be compared at each."""
        for key, record in list(self.records.items()):
            if record.left is not None:
                record.left -= 1
            if record.left is not None and record.left < 0:
                self._settle(key, self.records.pop(key))
            elif record.often:
                self._settle(key, record)

    def finish(self) -> None:
        """Compare all that is still there."""
        while self.records:
            self._settle(*self.records.popitem())

    def _settle(self, key: Hashable, record: Record) -> None:
        thing = record.get()
        if thing is GONE:
            return
        try:
            found = outcome(record.way.read, thing)
        except pl.errors.DonatedStateError:
            if not record.weak and not self.lenient:
                self.violations[key] = "has no numbers any more"
            return
        if self.truth is None:
            self.numbers[key] = found
        else:
            self._check(key, found)

    def _check(self, key: Hashable, found: list[Tensor] | str) -> None:
        assert self.truth is not None
        expected = self.truth.numbers.get(key, "nothing")
        self.compared += 1
        if self.lenient and (not found or isinstance(found, str)):
            return  # views and iterators of a mapping that was emptied have nothing, and don't say why
        if isinstance(found, str) or isinstance(expected, str):
            alike = found == expected if isinstance(found, str) and isinstance(expected, str) else False
        else:
            alike = len(found) == len(expected) and all(map(same, found, expected))
        if not alike:
            self.violations[key] = "changed" if isinstance(found, list) else f"gave {found} and not {expected!r:.60}"
