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
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pure_loop._internal.closing import closing
from pure_loop._internal.frames import callers, variable
from pure_loop._internal.pytree import Batch
from pure_loop._internal.torch_private import default_collate_functions
from pure_loop.data.group import END, Share, grouped, joined, steps
from pure_loop.errors import DataError, ResumeError
from pure_loop.random.authors import runs_users_code
from pure_loop.random.seeds import derive, seeded_all, seeded_torch

if TYPE_CHECKING:
    from pure_loop.data.position import Position

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
    position: Callable[[int, int], Position | None] | None = None

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
    def replays(self) -> bool:
        """Whether a run that resumes here reads again what it has seen; known once a batch was given."""
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
        if not start:
            return False  # the epoch was over, and there is nothing to go on with
        from pure_loop.data.position import REPLAY

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


def is_loading(frame: FrameType | None, sources: Collection[Source] | None = None) -> bool:
    """Whether the code that runs in a frame loads a batch: of one of these sources, or of any."""
    loading = (caller for caller in callers(frame) if caller.f_code is Source.epoch.__code__)
    return any(sources is None or any(variable(caller, "self") is source for source in sources) for caller in loading)
