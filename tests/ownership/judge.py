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
        what: says it.
        way: reads it.
        get: the holder.
        weak: whether it may lose its numbers, and say so.
        often: whether it is compared at each event, too, and not only when it is let go.
        left: after how many events it is let go; None: at the end.
    """

    what: str
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
    """

    def __init__(self, truth: Judge | None = None, *, lenient: bool = False) -> None:
        self.truth, self.lenient = truth, lenient
        self.numbers: dict[Hashable, list[Tensor] | str] = {}
        self.records: dict[Hashable, Record] = {}
        self.compared = 0

    def keep(
        self,
        key: Hashable,
        what: str,
        way: Way,
        given: Any,
        which: int,
        holder: str = "a closure",
        *,
        often: bool = False,
        left: int | None = None,
    ) -> None:
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
        self.records[key] = Record(what, way, get, holder == WEAK, often and not way.late, left)

    def compare(self, key: Hashable, what: str, given: Any) -> None:
        """Compare a State as it is now, and keep nothing."""
        if self.truth is None:
            self.numbers[key] = outcome(of_tree, given)
        else:
            self._check(key, what, outcome(of_tree, given))

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
            key, record = self.records.popitem()
            self._settle(key, record)

    def _settle(self, key: Hashable, record: Record) -> None:
        thing = record.get()
        if thing is GONE:
            return
        try:
            found = outcome(record.way.read, thing)
        except pl.errors.DonatedStateError as error:
            if record.weak or self.lenient:
                return
            raise Violation(f"{record.what} was kept, and has no numbers any more") from error
        if self.truth is None:
            self.numbers[key] = found
        else:
            self._check(key, record.what, found)

    def _check(self, key: Hashable, what: str, found: list[Tensor] | str) -> None:
        assert self.truth is not None
        expected = self.truth.numbers.get(key)
        if expected is None:
            raise Violation(f"{what}: the twin has no such thing")
        self.compared += 1
        if self.lenient and (not found or isinstance(found, str)):
            return  # views and iterators of a mapping that was emptied have nothing, and don't say why
        if isinstance(found, str) or isinstance(expected, str):
            if found != expected:
                raise Violation(f"{what}: reading it gave {_shown(found)}, and in the twin {_shown(expected)}")
            return
        if len(found) != len(expected) or not all(map(same, found, expected)):
            raise Violation(f"{what} changed")


def _shown(result: list[Tensor] | str) -> str:
    return result if isinstance(result, str) else f"{len(result)} tensors"
