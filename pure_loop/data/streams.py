"""Data without indices: what can be iterated over again and again, and iterators.

A run that resumes goes on from the state that such data has of its own (:mod:`pure_loop.data.tokens`). Where it has
none, what was seen is drawn again and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import count, islice
from typing import Any

import attrs

from pure_loop._internal.closing import closing
from pure_loop._internal.equality import equal as same
from pure_loop._internal.logs import get_logger
from pure_loop._internal.pytree import Batch, PyTree
from pure_loop.data.batch import are_alike
from pure_loop.data.changes import has_epochs
from pure_loop.data.copies import Private
from pure_loop.data.group import END, steps
from pure_loop.data.passes import Passes, iterator_made, shut
from pure_loop.data.position import REPLAY, Counts, Position, digest_of, settled
from pure_loop.data.source import Batches, Source
from pure_loop.data.tokens import Tokens, name_of, tokens_of
from pure_loop.errors import DataError, ResumeError
from pure_loop.random.seeds import derive, seeded_all

_log = get_logger("pure_loop.data")


@attrs.frozen
class _Last:
    """Where a batch stands: its pass, its number in it, the token before it, and its digest."""

    number: int
    item: int
    token: PyTree
    digest: int


class _Unindexed(Source):
    """Batches without indices: what was seen is drawn and dropped."""

    # What was made of an epoch when training resumes, to compare it with what is dropped.
    _made: tuple[tuple[int, int], int, Callable[[Batch], int]] | None = None
    # The epoch and the batch from which it resumes by a position.
    _at: tuple[tuple[int, int], Position] | None = None
    # Where the last batch stands, and the last position that was asked for.
    _last: _Last | None = None
    _given: Position | None = None
    # Why there are no positions, once that is known.
    why_not: str | None = None

    @property
    def replays(self) -> bool:
        return self.position is None

    @cached_property
    def _name(self) -> str:
        return name_of(self._loader)

    def goes_on(self, at: Position, epoch: int, start: int, seen: int) -> bool:
        if at.source != self._name and start:
            raise ResumeError(
                f"state.data is a position of {at.source}, and the {self._stream} dataloader is that of {self._name}: "
                f"a token is read by the class and the version that wrote it. {REPLAY}"
            )
        if at.per_step != self._per_step and start:
            raise ResumeError(
                f"state.data is a position in an epoch of steps of {at.per_step} batches, and batches_per_step is "
                f"{self._per_step}: resume with {at.per_step}, or from a State at an epoch's end."
            )
        unlike = at.source != self._name or at.per_step != self._per_step or at.seed != self._seed
        if unlike or tokens_of(self._loader) is None or not at.is_of(epoch, start, seen):
            _log.info("the %s dataloader does not go on from %r: it is read again", self._stream, at)
            return False
        self._at = (epoch, start * self._per_step), at
        return True

    def _take_position(self, epoch: int, start: int) -> Position | None:
        resumed, self._at = self._at, None
        if resumed is None:
            return None
        place, at = resumed
        # An epoch that had all its batches is not opened again; the next one is.
        return at if place == (epoch, start) or (start == 0 and epoch == at.epoch + 1) else None

    def _tokens(self, loader: Any) -> Tokens | None:
        """How it tells where it stands; None: it doesn't, or nothing resumes it: an evaluation, a prediction."""
        return tokens_of(loader) if self._stream == "train" and self.why_not is None else None

    def _note(self, number: int, item: int, tokens: Tokens, token: PyTree, batch: Batch) -> bool:
        """Remember where a batch stands that is about to be given; whether it has a position."""
        try:
            token = settled(token, self._name)
        except DataError as error:
            if tokens.is_registered:
                raise
            return self._has_none(str(error))
        last = self._last
        if item and last is not None and (last.number, last.item) == (number, item - 1) and same(last.token, token):
            return self._has_none(f"the state of {self._name} is the same after a batch as before it")
        self._last = _Last(number, item, token, digest_of(batch))
        self.position = self._position
        return True

    def _has_none(self, reason: str) -> bool:
        self.why_not, self.position = reason, None
        _log.info("a run that resumes reads the %s dataloader again: %s", self._stream, reason)
        return False

    def _position(self, epoch: int, batch: int) -> Position | None:
        last, before = self._last, self._given
        assert last is not None
        if not last.item:  # the first batch of a pass, after the last one of another
            if before is None or before.batch != batch - 1 or before.first is not None:
                return None
            return attrs.evolve(before, epoch=epoch, batch=batch, first=last.digest)
        self._given = Position(
            epoch=epoch,
            batch=batch,
            source=self._name,
            token=last.token,
            digest=last.digest,
            seed=self._seed,
            number=last.number,
            item=last.item,
            per_step=self._per_step,
            **self._counts(),
        )
        return self._given

    def _token(self, tokens: Tokens) -> PyTree:
        """Where it stands; what only has methods of these names has no position."""
        try:
            return tokens.token()
        except Exception as error:
            if tokens.is_registered:
                raise
            self._has_none(f"state_dict() of {self._name} raises {type(error).__name__}: {error}")
            return None

    def _compare(self, at: Position, digest: int | None, batch: Batch) -> None:
        assert digest is not None
        at.compare(None if batch is END else batch, self._stream, digest)

    def _counts(self) -> Counts:
        """What a position says of all passes."""
        return {}

    def resume(self, epoch: int, start: int, samples: int, count: Callable[[Batch], int], *, changed: bool) -> int:
        if not self.uneven and self._per_step == 1:
            self._made = (epoch, start), samples, count
        return start

    def _take_made(self, epoch: int, start: int) -> tuple[int, Callable[[Batch], int]] | None:
        """How many samples were made of an epoch, and what counts them; None where training begins."""
        resumed, self._made = self._made, None
        return None if resumed is None or resumed[0] != (epoch, start) else resumed[1:]


class Iterated(_Unindexed):
    """Anything that can be iterated over again and again."""

    _loader: Iterable[Batch]
    _in_workers = False

    def _batches(self, epoch: int, start: int, seen: int) -> Batches:
        resumed, at = self._take_made(epoch, start), self._take_position(epoch, start)
        if at is not None:
            run = partial(self._pass, number=at.number, at=at)
            self._passes.go_to(at, run, ended=start == 0, compare=partial(self._compare, at, at.first))
            self._given = at
        if resumed is None or at is not None:
            yield from self._passes.epoch(epoch, start, seen)
            return
        samples, count = resumed
        with closing(self._passes.epoch(epoch, 0, seen - start)) as batches:
            total = sum(map(count, islice(batches, start)))
            if total != samples:
                why = "The loader has no indices by which samples could be skipped."
                raise self._refuse_other_sizes(epoch, start, samples, total, why)
            yield from batches

    def close(self) -> None:
        self._passes.close()

    @property
    def reads_once(self) -> bool:
        # An iterator in an attribute is shared with every copy.
        owners = (self._loader, getattr(self._loader, "dataset", None))
        values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
        return any(type(value) is not count and isinstance(value, Iterator) for value in values)

    @cached_property
    def _passes(self) -> Passes[Batch]:
        return Passes(
            self._copy,
            self._run,
            limit=self._limit,
            continues=self._limit is not None and self.loader_length is None,
            independent=self._independent,
            stream=self._stream,
            per_step=self._per_step,
        )

    def _run(self, copy: Private[Any], number: int) -> Batches:
        return self._pass(self._copy() if number and self._selects else copy, number)

    def _pass(
        self, copy: Private[Any], number: int, seed_pass: int | None = None, at: Position | None = None
    ) -> Batches:
        """The batches of a pass.

        Args:
            copy: what is iterated over.
            number: of the pass.
            seed_pass: the pass whose seeds it has, if another.
            at: begin after the batch of this position; None: at the first batch.
        """
        seed_pass = number if seed_pass is None else seed_pass
        batches: Iterator[Batch] | None = None
        try:
            with seeded_all(derive(self._seed, seed_pass, "iter")):
                loader = self._for_pass(copy, number, seed_pass)
                tokens = self._tokens(loader)
                if tokens is None:
                    batches = iter(loader)
                else:
                    batches = tokens.begin(at and at.token, number, at=at is not None)
                    tokens = tokens if tokens.tells and seed_pass == number else None
            iterator_made(batches)
            guard = nullcontext if self._in_workers else self._guard_of([batches])
            # Some have taken the token over only when they have given a batch.
            token = None if at is None else at.token
            for item in count(0 if at is None else at.item):
                if tokens is not None and (at is None or item > at.item):
                    token = self._token(tokens)
                    tokens = None if self.why_not else tokens
                with guard(derive(self._seed, seed_pass, item)):
                    batch = next(batches, END)
                if at is not None and item == at.item:
                    self._compare(at, at.digest, batch)
                    if tokens is not None:
                        self._note(number, item, tokens, token, batch)
                    continue
                if batch is END:
                    return
                if tokens is not None and not self._note(number, item, tokens, token, batch):
                    tokens = None
                yield batch
                del batch
        finally:
            with seeded_all(derive(self._seed, seed_pass, "close")):
                if not copy.keeps(batches):
                    shut(batches)

    def _counts(self) -> Counts:
        return self._passes.counts()

    def _copy(self) -> Private[Any]:
        return Private(self._loader, seeds=False)

    def _for_pass(self, copy: Private[Iterable[Batch]], number: int, seed_pass: int) -> Iterable[Batch]:
        """What to iterate over in a pass, with the seeds of the pass ``seed_pass``."""
        return copy.begin(derive(self._seed, seed_pass, "order"), number)

    def _independent(self, copy: Private[Any]) -> bool | None:
        return True if self._selects else copy.independent

    @property
    def _has_epochs(self) -> bool:
        return has_epochs(self._loader)

    @cached_property
    def _selects(self) -> bool:
        """Whether ``set_epoch`` says what a pass is, whatever passes were made before: each is made on a new copy.

        What a pass leaves behind is mostly bookkeeping. It counts where new copies begin passes 0 and 1 alike, and a
        copy on which pass 0 was made begins pass 1 otherwise.
        """
        if not self._has_epochs:
            return False
        copy = self._copy()
        if copy.counts_without_epochs:
            return False
        copy.watch()
        first = self._first(copy, 0)
        if not copy.changed():
            return True
        second = self._first(self._copy(), 1)
        return not are_alike(first, second) or are_alike(second, self._first(copy, 1))

    def _first(self, copy: Private[Any], number: int) -> Batch:
        """The first batch of a pass, with the random numbers of pass 0: noise in it is the same in each."""
        with closing(self._pass(copy, number, seed_pass=0)) as batches:
            return next(batches, END)


class OneShot(_Unindexed):
    """An iterator: an epoch is what it gives next, and only what the run has not seen."""

    _empty = (
        "its iterator is exhausted; give a list or a DataLoader, which can be gone through again, or set "
        "batches_per_epoch to divide what an iterator gives into epochs"
    )

    _loader: Iterator[Batch]
    _taken = 0

    @property
    def reads_once(self) -> bool:
        return True

    def _count(self) -> int:
        raise TypeError

    def _counts(self) -> Counts:
        return {"items": self._taken}

    def _batches(self, epoch: int, start: int, seen: int) -> Batches:
        at, tokens = self._take_position(epoch, start), self._tokens(self._loader)
        if tokens is not None:
            tokens.begin(at and at.token, 0, at=at is not None)
            tokens = tokens if tokens.tells else None
        token: PyTree = None
        if at is not None:
            self._made, self._taken, token, self._given = None, at.items - 1, at.token, at
        if self._taken > seen:
            raise DataError(
                f"the {self._stream} iterator has already yielded {self._taken} batches and can't go back to batch "
                f"{seen}; pass a new iterator that starts at the first batch, or a list or a DataLoader"
            )
        guard = self._guard_of([self._loader])
        resumed = self._take_made(epoch, start)
        samples = 0
        while True:
            if resumed is not None and self._taken == seen:
                if samples != resumed[0]:
                    why = "An iterator has no indices by which samples could be skipped."
                    raise self._refuse_other_sizes(epoch, start, resumed[0], samples, why)
                resumed = None
            if tokens is not None and at is None:
                token = self._token(tokens)
                tokens = None if self.why_not else tokens
            with guard(derive(self._seed, "item", self._taken)):
                batch = next(self._loader, END)
            if at is not None:
                self._compare(at, at.digest, batch)
                at, self._taken = None, self._taken + 1
                continue
            if batch is END:
                break
            self._taken += 1
            if self._taken > seen:
                if tokens is not None and not self._note(0, self._taken - 1, tokens, token, batch):
                    tokens = None
                yield batch
            elif resumed is not None and self._taken > seen - start:
                samples += resumed[1](batch)
        if steps(self._taken, self._per_step) * self._per_step < seen:  # the last step may have had fewer batches
            raise DataError(
                f"the {self._stream} iterator gave {self._taken} batches, but {seen} were seen before this point; "
                "resuming needs a new iterator that starts at the first batch, because those that were seen are dropped"
            )
