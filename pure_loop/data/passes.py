"""Passes over what is iterated again and again, as epochs: each may depend on those before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import islice
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import attrs

from pure_loop._internal.torch_private import end_workers
from pure_loop.data.copies import Private
from pure_loop.data.group import END, steps
from pure_loop.errors import DataError

if TYPE_CHECKING:
    from pure_loop.data.position import Counts, Position

T = TypeVar("T")


@attrs.define(eq=False)
class _Walk(Generic[T]):
    """One copy, and the passes made on it.

    Attributes:
        copy: what they are made on.
        passes: how many have ended.
        items: the pass that the next epoch continues.
        gone: how many items of it that pass was given before.
        taken: the items taken, of all passes.
        cut_short: what ``taken`` was when a pass ended with a step of fewer items.
    """

    copy: Private[Any]
    passes: int = 0
    items: Iterator[T] | None = None
    gone: int = 0
    taken: int = 0
    cut_short: int = -1

    def close(self) -> None:
        shut(self.items)
        self.items = None


class Passes(Generic[T]):
    """Epochs of what a copy gives, pass after pass.

    Epoch k is pass k. Where epochs only cut what has no length of its own (``continues``), an epoch starts where the
    one before it was cut, and the next pass begins in the epoch after the one in which a pass ended.

    Args:
        renew: makes a copy on which no pass was made.
        run: ``(copy, number) -> items`` of a pass, on a copy on which as many were made.
        limit: the items of an epoch, at most.
        continues: whether an epoch starts where the one before it was cut.
        independent: ``copy -> whether`` a pass is the same whatever passes were made before it, so that those needn't
            be made; None: it is, unless its first item is found to have changed the copy.
        stream: what the items are for, for errors.
        per_step: how many items are that of a step. The last step of a pass counts as many, though it may have fewer.
    """

    def __init__(
        self,
        renew: Callable[[], Private[Any]],
        run: Callable[[Private[Any], int], Iterator[T]],
        *,
        limit: int | None,
        continues: bool,
        independent: Callable[[Private[Any]], bool | None],
        stream: str,
        per_step: int = 1,
    ) -> None:
        self._renew = renew
        self._run = run
        self._limit = limit
        self.continues = continues
        self._independent = independent
        self._stream = stream
        self._per_step = per_step
        # The walk that no epoch is using; the last one; and whether there was another before it.
        self._idle: _Walk[T] | None = None
        self._walk: _Walk[T] | None = None
        self._began = False

    def epoch(self, epoch: int, start: int, seen: int) -> Generator[T, None, None]:
        """The items of an epoch from ``start`` on, after ``seen`` in all the run."""
        return self._continued(start, seen) if self.continues else self._whole(epoch, start)

    def counts(self) -> Counts:
        """What a position says of all passes."""
        walk = self._walk
        assert walk is not None
        return {"passes": walk.passes, "items": walk.taken, "ending": walk.cut_short}

    def go_to(
        self,
        at: Position,
        run: Callable[[Private[Any]], Iterator[T]],
        *,
        ended: bool,
        compare: Callable[[T], None],
    ) -> None:
        """Stand where a run stood after the batch of a position; the next epoch goes on from there.

        Args:
            at: the position.
            run: ``copy -> items`` of the pass in which that batch was, after it.
            ended: whether it was the last one of an epoch.
            compare: called with the first batch of the next pass, where that was given, too.
        """
        passes = at.passes if self.continues else at.number
        walk = _Walk[T](self._fresh(), passes, taken=at.items, cut_short=at.ending, gone=at.item + 1)
        walk.items = run(walk.copy)
        if at.first is not None:
            self._finish(walk, at.number)
            walk.items = self._run(walk.copy, walk.passes)
            compare(next(walk.items, END))
            walk.gone, walk.taken = 1, at.items + 1
        if (at.first is None and at.passes > at.number) if self.continues else ended:
            self._finish(walk, walk.passes if at.first is not None else at.number)
        self._idle = walk

    def _finish(self, walk: _Walk[T], number: int) -> None:
        """Ask a pass for what it was asked for after the last step of an epoch: mostly its end."""
        limit = None if self.continues or self._limit is None else self._limit - walk.gone
        for _ in islice(walk.items or (), limit):
            pass
        walk.close()
        walk.passes, walk.gone = number + 1, 0

    def close(self) -> None:
        """End a pass that is in progress."""
        self._walk = None
        self._end_idle()

    def _end_idle(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _whole(self, epoch: int, start: int) -> Generator[T, None, None]:
        walk = self._taken_over()
        if walk is None or walk.passes != epoch:
            walk = self._at(epoch)
        items, gone = (self._run(walk.copy, epoch), 0) if walk.items is None else (walk.items, walk.gone)
        walk.items, walk.gone = None, 0
        self._walk = walk
        try:
            yield from islice(items, start - gone, None if self._limit is None else self._limit - gone)
        finally:
            shut(items)
        walk.passes = epoch + 1
        self._idle = walk

    def _continued(self, start: int, seen: int) -> Generator[T, None, None]:
        assert self._limit is not None
        walk = self._taken_over()
        if walk is None or walk.taken != seen:
            if walk is not None:
                walk.close()
            walk = _Walk[T](self._fresh())
            ends = 0
            while walk.taken < seen and ends < 2:  # two ends in a row: nothing comes
                ends = ends + 1 if self._next(walk) is END else 0
        self._walk = walk
        # The end of the pass was met while its last step was loaded, and is that of the epoch.
        ended = start > 0 and walk.taken == walk.cut_short
        try:
            for number in range(start, start if ended else self._limit):
                item = self._next(walk)
                # A pass that ended with the epoch before has nothing more, and another one begins.
                if item is END and number == 0:
                    item = self._next(walk)
                if item is END:
                    break
                yield item
        finally:
            self._end_idle()
            self._idle = walk

    def _next(self, walk: _Walk[T]) -> T:
        """The next item of a pass; END where it has ended, after which another one begins."""
        if walk.items is None:
            walk.items = self._run(walk.copy, walk.passes)
        item = next(walk.items, END)
        if item is END:
            walk.close()
            walk.passes += 1
            counted = steps(walk.taken, self._per_step) * self._per_step
            if counted != walk.taken:
                walk.taken = walk.cut_short = counted
        else:
            walk.taken += 1
        return item

    def _taken_over(self) -> _Walk[T] | None:
        walk, self._idle = self._idle, None
        return walk

    def _fresh(self) -> Private[Any]:
        copy = self._renew()
        if copy.drawn_once and self._began:
            raise DataError(
                f"the {self._stream} dataloader's sampler is an iterator, from which was drawn already, and can't go "
                "back; give a list of indices, or an object whose __iter__ begins anew"
            )
        self._began = True
        return copy

    def _at(self, epoch: int) -> _Walk[T]:
        """A copy on which ``epoch`` passes were made, or might as well have been."""
        walk = _Walk[T](self._fresh(), epoch)
        if epoch == 0:
            return walk
        independent = self._independent(walk.copy)
        if independent:
            return walk
        if independent is None:
            walk.copy.watch()
            items = self._run(walk.copy, epoch)
            first = next(items, END)
            if not walk.copy.changed():
                walk.items = _with_first(first, items)
                return walk
            shut(items)
            walk = _Walk[T](self._renew(), epoch)
        for number in range(epoch):
            result = self._run(walk.copy, number)
            for _ in islice(result, self._limit):
                pass
            shut(result)
        return walk


def _with_first(first: T, items: Iterator[T]) -> Generator[T, None, None]:
    try:
        if first is not END:
            yield first
            del first
            yield from items
    finally:
        shut(items)


ITERATOR_MADE: list[Callable[[], None]] = []
"""Functions to call after an iterator over a dataloader is made: by then torch has set its signal handlers."""


def iterator_made(batches: Iterator[object]) -> None:
    """An iterator over a dataloader was made: call the functions in ``ITERATOR_MADE``."""
    with suppress(TypeError):  # no weak references: an iterator of a builtin type, which has no workers
        _iterators.add(batches)
    for function in ITERATOR_MADE:
        function()


# Those of this process, and those of the parents that it was forked from. A child keeps the latter to its end: the end
# of an iterator of torch tells its workers to stop, and they are the parent's.
_iterators: WeakSet[Iterator[object]] = WeakSet()
_inherited: list[Iterator[object]] = []


def _inherit() -> None:
    _inherited.extend(_iterators)
    _iterators.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


def shut(batches: Iterator[object] | None) -> None:
    """End the iterator of a loader or a generator now: a traceback may keep it from being collected for long."""
    if any(batches is iterator for iterator in _inherited):
        return
    if isinstance(batches, GeneratorType):
        batches.close()
    else:
        end_workers(batches)
