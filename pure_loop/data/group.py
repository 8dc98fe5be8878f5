"""Several batches of a dataloader as the batch of one step: ``fit(batches_per_step=4)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import attrs

from pure_loop._internal import pytree as _pytree

__all__ = ["END", "Batches", "grouped", "parts_of", "steps"]

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

    parts: tuple[Any, ...] = attrs.field(converter=tuple)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __getitem__(self, index: int) -> Any:
        return self.parts[index]

    def map(self, function: Callable[[Any], Any]) -> Batches:
        """The results of a function of each batch: what an algorithm writes that changes batches."""
        return Batches(map(function, self.parts))


def _flatten(batches: Batches) -> tuple[Sequence[Any], Any, Sequence[str]]:
    return batches.parts, None, tuple(map(str, range(len(batches.parts))))


def _unflatten(_: Any, children: Iterable[Any]) -> Batches:
    return Batches(children)


_pytree.register(Batches, _flatten, _unflatten, attributes=False)


def parts_of(batch: Any) -> tuple[Any, ...]:
    """The batches of the dataloader of which a batch consists: mostly itself alone."""
    return batch.parts if type(batch) is Batches else (batch,)


def grouped(items: Iterator[Any], size: int, join: Callable[[tuple[Any, ...]], Any] = Batches) -> Iterator[Any]:
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
