"""The batch of one step: several batches of a dataloader, ``fit(batches_per_step=4)``, or a rank's part of one."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import attrs

from pure_loop._internal.pytree import Batch, register

__all__ = ["END", "Batches", "Part", "Share", "grouped", "joined", "parts_of", "steps"]

A = TypeVar("A")
B = TypeVar("B")

END: Any = object()
"""What a source gives in the place of a batch at the end of its data."""


@attrs.frozen(eq=False)
class Batches:
    """The batches of a dataloader that one step accumulates over: ``state.batch`` with ``batches_per_step=``.

    A sequence, and a pytree. Samples of two of them are never in one microbatch, so that they may have other shapes.

    Attributes:
        parts: the batches, in the order in which they were loaded.

    >>> import torch
    >>> batches = Batches((torch.ones(2), torch.ones(3)))
    >>> len(batches), batches[1].shape
    (2, torch.Size([3]))
    >>> batches.map(lambda batch: 2 * batch)
    Batches(parts=(tensor([2., 2.]), tensor([2., 2., 2.])))
    """

    parts: tuple[Batch, ...] = attrs.field(converter=tuple)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.parts)

    def __getitem__(self, index: int) -> Batch:
        return self.parts[index]

    def map(self, function: Callable[[Batch], Batch]) -> Batches:
        """The results of a function of each batch: what an algorithm writes that changes batches."""
        return Batches(map(function, self.parts))


def _flatten(batches: Batches) -> tuple[Sequence[Batch], None, Sequence[str]]:
    return batches.parts, None, tuple(map(str, range(len(batches.parts))))


def _unflatten(_: None, children: Iterable[Batch]) -> Batches:
    return Batches(children)


register(Batches, _flatten, _unflatten, attributes=False)


def parts_of(batch: Batch) -> tuple[Batch, ...]:
    """The batches of the dataloader of which a batch consists: mostly itself alone."""
    return batch.parts if type(batch) is Batches else (batch,)


def grouped(items: Iterator[A], size: int, join: Callable[[tuple[A, ...]], B]) -> Iterator[B]:
    """The items joined in groups of a size, the last one smaller.

    >>> list(grouped(iter("abcde"), 2, "".join))
    ['ab', 'cd', 'e']
    """
    while True:
        first = next(items, END)
        if first is END:
            return
        yield join((first, *islice(items, size - 1)))
        del first


def steps(batches: int, batches_per_step: int) -> int:
    """How many steps so many batches are: the last one of an epoch may have fewer."""
    return -(-batches // batches_per_step)


@attrs.frozen
class Part:
    """A rank's part of a batch that several ranks split, and what all of them must have seen of the whole.

    Attributes:
        batch: the part; of a batch with too few samples for all ranks, another rank's.
        counts: whether its samples count here; if not, they only keep this rank company while others have some.
        samples: of the whole batch.
        order: a checksum of the indices of the whole batch; 0 where they are not known.
    """

    batch: Batch
    counts: bool = True
    samples: int = 0
    order: int = 0


@attrs.frozen
class Share:
    """Which part of every batch a rank takes: the ``rank``-th of ``ranks`` parts of one size, the last ones smaller.

    Args:
        rank, ranks: this process among how many.
        samples: ``batch -> int``: how many it holds.
        split: ``(batch, size) -> list`` of batches of at most ``size`` samples.

    >>> import torch
    >>> from pure_loop.data.samples import num_samples, split
    >>> Share(1, 3, num_samples, split).of(torch.arange(4))
    Part(batch=tensor([2, 3]), counts=True, samples=4, order=0)
    >>> Share(2, 3, num_samples, split).of(torch.arange(4))
    Part(batch=tensor([2, 3]), counts=False, samples=4, order=0)
    """

    rank: int
    ranks: int
    samples: Callable[[Batch], int]
    split: Callable[[Batch, int], list[Batch]]

    def of(self, batch: Batch) -> Part:
        """This rank's part of a batch; another one's, which doesn't count, where there are too few samples."""
        samples = self.samples(batch)
        return self._taken(self.split(batch, -(-samples // self.ranks)), samples, 0)

    def of_indices(self, indices: Sequence[object]) -> Part:
        """This rank's part of a list of samples' indices."""
        size = -(-len(indices) // self.ranks)
        parts = [indices[i : i + size] for i in range(0, len(indices), max(size, 1))]
        return self._taken(parts, len(indices), _checksum(indices))

    def _taken(self, parts: Sequence[Batch], samples: int, order: int) -> Part:
        counts = self.rank < len(parts)
        return Part(parts[self.rank if counts else -1], counts, samples, order)


def joined(loaded: tuple[Batch, ...]) -> Batches | Part:
    """Several batches as one; of parts of a rank those that count, if any does."""
    if type(loaded[0]) is not Part:
        return Batches(loaded)
    counted = [part.batch for part in loaded if part.counts]
    order = 0
    for part in loaded:
        order = (31 * order + part.order) % _CHECKSUMS
    batch = Batches(counted or (loaded[0].batch,))
    return Part(batch, bool(counted), sum(part.samples for part in loaded), order)


# Ranks compare checksums as float64, and sums of them.
_CHECKSUMS = 1 << 32


def _checksum(indices: Sequence[Any]) -> int:
    """A checksum of indices that are whole numbers; 0 of others."""
    try:
        return zlib.crc32(array("q", indices))
    except (TypeError, OverflowError):
        return 0
