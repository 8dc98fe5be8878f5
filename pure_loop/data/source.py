"""Where batches come from: a dataloader as a function from (epoch, position) to batches.

:func:`source` makes a :class:`Source` of whatever the user gives. Its ``epoch(e, start=k)`` is bit for bit
what ``epoch(e)`` gives after k batches, whatever was drawn in between and whatever the global random
state, which is left as it was found; the user's loader, sampler and generator are never drawn from.

What is random gets its seed from where it stands: the order of an epoch from (seed, stream, epoch), and
what a dataset or a ``collate_fn`` draws for a batch from (seed, stream, epoch, batch), in this process and in
workers. Epoch k is pass k over a sampler or an iterable: what changes itself in a pass is iterated as a private copy,
on which the passes before are made first. Two things can't be made again, and are the user's to avoid: a generator of
its own that a dataset with indices keeps between items, and an iterator that was already drawn from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import count, islice
from types import FrameType
from typing import Any, Literal, TypeAlias

from pure_loop._internal.closing import closing
from pure_loop._internal.frames import callers, variable
from pure_loop._internal.pytree import Batch, PyTree
from pure_loop._internal.torch_private import default_collate_functions
from pure_loop.data.batch import are_alike
from pure_loop.data.changes import has_epochs
from pure_loop.data.copies import Private
from pure_loop.data.group import END, Share, grouped, joined, steps
from pure_loop.data.passes import Passes, iterator_made, shut
from pure_loop.data.position import REPLAY, Counts, Position, digest_of, settled
from pure_loop.data.tokens import name_of, tokens_of
from pure_loop.errors import DataError, ResumeError
from pure_loop.random.authors import runs_users_code
from pure_loop.random.seeds import derive, seeded_all, seeded_torch

Batches: TypeAlias = Generator[Batch, None, None]


class Source(ABC):
    """A stream of batches by epoch and position; made by :func:`source`."""

    _empty = "it is empty, or drop_last drops its only batch"

    # Whether it loads no more than its share.
    _shares = False
    uneven: Literal["stop", "pad"] | None = None
    # What a rank keeps company with, when its own data has ended and that of others has not.
    last_batch: Batch = END
    # ``(epoch, batch) -> position`` of the batch that was given last; None: the numbers of the timestamp are enough.
    position: Callable[[int, int], Position] | None = None

    def __init__(
        self, loader: Any, seed: int, stream: str, limit: int | None, share: Share | None, per_step: int = 1
    ) -> None:
        """
        Args:
            loader, share: what the user gave, and which part of it this rank takes.
            seed, stream: from which random numbers are derived.
            limit: the steps of an epoch, at most.
            per_step: how many batches of the loader are that of a step.
        """
        self._loader, self._share, self._per_step = loader, share, per_step
        self._seed = derive(seed, stream)
        self._stream = stream
        # In batches of the loader, as is everything below but what says steps.
        self._limit = None if limit is None else limit * per_step
        self._prepare()

    def _prepare(self) -> None:  # noqa: B027  (most have nothing to prepare)
        """Make what a source of this kind keeps."""

    @cached_property
    def length(self) -> int | None:
        """Steps in an epoch, as far as the loader can tell; ``batches_per_epoch`` where it can't; or else None."""
        limits = [number for number in (self.loader_length, self._limit) if number is not None]
        return steps(min(limits), self._per_step) if limits else None

    @cached_property
    def loader_length(self) -> int | None:
        """What the loader says of its own length; None where it says nothing."""
        try:
            return self._count()
        # No __len__, one of a parent that refuses, one that asks an iterable dataset: how loaders say that they can't.
        except (TypeError, NotImplementedError, AttributeError):
            return None

    @property
    def described(self) -> dict[str, object]:
        """What has to be equal on ranks that split each batch, as far as the loader can tell."""
        return {} if self.uneven else {"batches": self.length}

    @property
    def batches_stay(self) -> bool:
        """Whether a batch is known to stay as it is while the next ones are loaded: others may use its memory again."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether an epoch can be begun at any time, in this process, and again from its beginning later."""
        return False

    @property
    def reads_once(self) -> bool:
        """Whether a batch that is read is gone from the user's object: that is an iterator, or has one."""
        return False

    @cached_property
    def keeps_pinned(self) -> bool:
        """Whether pinned memory of a batch stays as it is until a copy from it is done, which is not waited for."""
        return self.batches_stay

    def epoch(self, epoch: int, start: int = 0, seen: int = 0) -> Batches:
        """The batches of one epoch, one a step; closing it early stops the workers.

        Args:
            epoch: which one, from 0.
            start: how many steps of this epoch to leave out: those that were made already.
            seen: how many steps were made in the whole run, which tells where an iterator has to be.

        Raises:
            DataError: the epoch has no batch at all, or more than the loader's own length, or an iterator doesn't stand
                where it must.
        """
        length, limit = self.loader_length, self._limit
        start, seen = start * self._per_step, seen * self._per_step
        # A batch beyond the length is asked for once, at the end.
        checked = length is not None and (limit is None or limit > length)
        end = length if checked else limit
        stop = None if end is None else max(end - start, 0)
        with closing(self._batches(epoch, start, seen)) as value:
            share = None if self._shares else self._share
            batches: Iterator[Batch] = value if stop is None else islice(value, stop)
            if share is not None:
                batches = (share.of(batch) for batch in batches)  # in which a StopIteration is an error
            if self._per_step > 1:
                batches = grouped(batches, self._per_step, joined)
            first = next(batches, END)
            is_empty = first is END and start == 0
            if first is not END:
                yield first
                del first  # it would be there for as long as the others come
                yield from batches
            if checked and next(value, END) is not END:
                number = max(start, length or 0) + 1
                raise DataError(
                    f"the {self._stream} dataloader has a length of {length}, and gave batch {number} of epoch {epoch}:"
                    " its __len__ is too small. Correct it (that of the loader, its dataset or its sampler). If it"
                    f" never ends, give iter(loader) and batches_per_epoch={length}: an epoch begins where the one"
                    " before it was cut, where one of the loader itself begins anew, perhaps with the same batches"
                )
            if is_empty:
                raise DataError(f"the {self._stream} dataloader gave no batch in epoch {epoch}: {self._empty}")

    def goes_on(self, at: Position, epoch: int, start: int, seen: int) -> bool:
        """Whether the next epoch that is opened reads on from a position, and no batch again but that one.

        Args:
            at: what the State of the run has.
            epoch, start, seen: as of :meth:`epoch`.

        Raises:
            ResumeError: the position is another source's.
        """
        raise ResumeError(
            f"state.data is a position of {at.source}, and the {self._stream} dataloader is a "
            f"{type(self._loader).__name__}: give the data of the run. {REPLAY}"
        )

    def resume(self, epoch: int, start: int, samples: int, count: Callable[[Batch], int], *, changed: bool) -> int:
        """How many steps of an epoch are left out when training resumes, perhaps with batches of another size.

        Args:
            epoch: which one.
            start: how many steps of it were made.
            samples: how many samples they had.
            count: the samples of a batch.
            changed: whether an epoch has another length now.

        Raises:
            ResumeError: the batches have other sizes than those that were made, and samples can't be skipped by number.
        """
        return start

    def _refuse_other_sizes(self, epoch: int, batches: int, samples: int, total: int, why: str) -> ResumeError:
        first = "the first batch" if batches == 1 else f"the first {batches} batches"
        return ResumeError(
            f"the {self._stream} dataloader has {total} samples in {first} of epoch {epoch}, and "
            f"the State has seen {samples} in as many: batches are larger, smaller or fewer now, so that samples would "
            f"be left out or come twice. {why} Resume with batches as they were, or from a State at an epoch's end."
        )

    def close(self) -> None:  # noqa: B027  (most have nothing to stop)
        """Stop what outlives an epoch: the workers of a loader with ``persistent_workers=True``."""

    def _count(self) -> int:
        return len(self._loader)

    @abstractmethod
    def _batches(self, epoch: int, start: int, seen: int) -> Batches:
        """The batches of an epoch from ``start`` on."""

    def _guard_of(self, code: list[object]) -> Callable[[int], AbstractContextManager[None]]:
        """What seeds the global generators for the batches of an epoch: torch's alone if no other code loads them."""
        # The default collate calls those that were registered with it.
        collating = (default_collate_functions or {}).values()
        return seeded_all if runs_users_code((*code, *collating)) else seeded_torch


class Listed(Source):
    """A sequence of batches."""

    _loader: Sequence[Batch]

    @property
    def repeats(self) -> bool:
        return True

    @property
    def batches_stay(self) -> bool:
        # A sequence of the user's own may make its batches when asked.
        return type(self._loader) in (list, tuple)

    def resume(self, epoch: int, start: int, samples: int, count: Callable[[Batch], int], *, changed: bool) -> int:
        if self.batches_stay and not self.uneven:
            batches = start * self._per_step
            total = sum(map(count, self._loader[:batches]))
            if total != samples:
                raise self._refuse_other_sizes(epoch, batches, samples, total, "A list of batches has no indices.")
        return start

    def _batches(self, epoch: int, start: int, seen: int) -> Batches:
        if self.batches_stay:  # so nothing can draw
            for position in range(start, len(self._loader)):
                yield self._loader[position]
            return
        guard = self._guard_of([self._loader])
        for position in range(start, len(self._loader)):
            with guard(derive(self._seed, epoch, position)):
                batch = self._loader[position]
            yield batch


class _Unindexed(Source):
    """Batches without indices: what was seen is drawn and dropped."""

    # What was made of an epoch when training resumes, to compare it with what is dropped.
    _made: tuple[tuple[int, int], int, Callable[[Batch], int]] | None = None
    # The epoch and the batch from which it resumes by a position.
    _at: tuple[tuple[int, int], Position] | None = None
    # The pass and the number of the last batch, the token before it, and its digest.
    _last: tuple[int, int, PyTree, int]

    @cached_property
    def _name(self) -> str:
        return name_of(self._loader)

    def goes_on(self, at: Position, epoch: int, start: int, seen: int) -> bool:
        if at.source != self._name:
            raise ResumeError(
                f"state.data is a position of {at.source}, and the {self._stream} dataloader is that of {self._name}: "
                f"a token is read by the class and the version that wrote it. {REPLAY}"
            )
        if tokens_of(self._loader) is None or at.seed != self._seed or not at.is_of(epoch, start, seen):
            return False
        self._at = (epoch, start * self._per_step), at
        return True

    def _take_position(self, epoch: int, start: int) -> Position | None:
        at, self._at = self._at, None
        return at[1] if at is not None and at[0] == (epoch, start) else None

    def _note(self, number: int, item: int, token: PyTree, batch: Batch) -> None:
        """Remember where a batch stands that is about to be given."""
        self._last = number, item, settled(token, self._name), digest_of(batch)
        self.position = self._position

    def _position(self, epoch: int, batch: int) -> Position:
        number, item, token, digest = self._last
        return Position(
            epoch=epoch,
            batch=batch,
            source=self._name,
            token=token,
            digest=digest,
            seed=self._seed,
            number=number,
            item=item,
            **self._counts(),
        )

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
            self._passes.go_to(at, partial(self._pass, number=at.number, at=at), ended=start == 0)
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
                tokens = tokens_of(loader)
                batches = iter(loader) if tokens is None else tokens.begin(at and at.token, at=at is not None)
            if tokens is not None and not tokens.tells:
                tokens = None
            iterator_made(batches)
            guard = nullcontext if self._in_workers else self._guard_of([batches])
            for item in count(0 if at is None else at.item):
                token = None if tokens is None else tokens.token()
                with guard(derive(self._seed, seed_pass, item)):
                    batch = next(batches, END)
                if at is not None and item == at.item:
                    at.compare(None if batch is END else batch, self._stream)
                    continue
                if batch is END:
                    return
                if tokens is not None:
                    self._note(number, item, token, batch)
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
        at, tokens = self._take_position(epoch, start), tokens_of(self._loader)
        if tokens is not None:
            tokens.begin(at and at.token, at=at is not None)
            tokens = tokens if tokens.tells else None
        if at is not None:
            self._made, self._taken = None, at.items - 1
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
            token = None if tokens is None else tokens.token()
            with guard(derive(self._seed, "item", self._taken)):
                batch = next(self._loader, END)
            if at is not None:
                at.compare(None if batch is END else batch, self._stream)
                at, self._taken = None, self._taken + 1
                continue
            if batch is END:
                break
            self._taken += 1
            if self._taken > seen:
                if tokens is not None:
                    self._note(0, self._taken - 1, token, batch)
                yield batch
            elif resumed is not None and self._taken > seen - start:
                samples += resumed[1](batch)
        if steps(self._taken, self._per_step) * self._per_step < seen:  # the last step may have had fewer batches
            raise DataError(
                f"the {self._stream} iterator gave {self._taken} batches, but {seen} were seen before this point; "
                "resuming needs a new iterator that starts at the first batch, because those that were seen are dropped"
            )


def is_loading(frame: FrameType | None, sources: Collection[Source] | None = None) -> bool:
    """Whether the code that runs in a frame loads a batch: of one of these sources, or of any."""
    loading = (caller for caller in callers(frame) if caller.f_code is Source.epoch.__code__)
    return any(sources is None or any(variable(caller, "self") is source for source in sources) for caller in loading)
