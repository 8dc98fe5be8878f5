"""Which source serves a dataloader."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

from pure_loop.data.changes import writes_attributes
from pure_loop.data.group import Share
from pure_loop.data.source import Iterated, Listed, OneShot, Source
from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["source"]


def source(
    dataloader: object,
    *,
    seed: int,
    stream: str,
    batches_per_epoch: int | None = None,
    batches_per_step: int = 1,
    share: Share | None = None,
    uneven: Literal["stop", "pad"] | None = None,
) -> Source:
    """Make a :class:`Source` of a dataloader.

    Args:
        dataloader: a ``torch.utils.data.DataLoader`` of any kind; a list, tuple or other sequence of batches;
            any iterable of batches; or an iterator, which is drawn from once and never again.
        seed: the seed of the run.
        stream: what the batches are for (``"train"``, ``"val"``): different streams draw different numbers.
        batches_per_epoch: an epoch ends after as many steps, if it hasn't before.
        batches_per_step: how many batches are given at once, as :class:`~pure_loop.data.group.Batches`; 1: each as it
            is. The last ones of an epoch may be fewer.
        share: which part of every batch this rank takes; None: all of it.
        uneven: what to do where ranks with data of their own have unequally many batches; None: it is an error.

    Raises:
        ArgumentTypeError: the object is no dataloader.
        ArgumentError: ``batches_per_epoch`` is not an integer of at least 1.

    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(6), batch_size=2, shuffle=True)
    >>> batches = source(loader, seed=0, stream="train")
    >>> batches.length
    3
    >>> list(batches.epoch(1))
    [tensor([3, 0]), tensor([1, 2]), tensor([4, 5])]
    >>> list(batches.epoch(1, start=2))
    [tensor([4, 5])]
    """
    if batches_per_epoch is not None and (type(batches_per_epoch) is not int or batches_per_epoch < 1):
        raise ArgumentError(
            f"batches_per_epoch={batches_per_epoch!r}: give a number of batches, 1 or more, or None for all of them"
        )
    result = _kind(dataloader)(dataloader, seed, stream, batches_per_epoch, share, batches_per_step)
    result.uneven = uneven
    return result


def _kind(loader: object) -> type[Source]:
    name = type(loader).__name__
    # A DataLoader can only exist if torch.utils.data is imported, which takes longer than importing this package.
    if "torch.utils.data" in sys.modules:
        from pure_loop.data import dataloaders

        kind = dataloaders.kind(loader)
        if kind is not None:
            return kind
    if isinstance(loader, (Mapping, AbstractSet, str, bytes)) or hasattr(loader, "__array__"):
        raise ArgumentTypeError(
            f"{name} is no dataloader; give a DataLoader, a list of batches or an iterable of batches (tensors: "
            "DataLoader(TensorDataset(inputs, targets), batch_size=...))"
        )
    if isinstance(loader, Sequence) or (hasattr(loader, "__getitem__") and not hasattr(loader, "__iter__")):
        return Listed
    if isinstance(loader, Iterator) and not writes_attributes(type(loader), "__iter__"):
        return OneShot
    if isinstance(loader, Iterable):
        return Iterated
    raise ArgumentTypeError(
        f"{name} is no dataloader: it can't be iterated over; give a DataLoader, a list of batches or an iterable of"
        " batches (call a generator function: batches(), not batches, which makes those of one epoch; an object whose"
        " __iter__ it is makes those of each)"
    )
