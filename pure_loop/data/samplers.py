"""A sampler for one epoch: the user's order of indices as a function of a seed and of the passes before it.

A sampler is drawn from as a private copy, so the user's is left as it was, and everything random in the
copy starts from a derived seed: its generators are seeded anew, and what it draws from the global ones it
draws where they are seeded. So an epoch's order can be drawn again, and skipped into, at any time. A sampler that
counts its passes, or shuffles what it holds, gives in epoch k what its pass k gives: those before it are drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pure_loop.data.copies import Private
from pure_loop.data.source import END
from pure_loop.random import derive, seeded_all

__all__ = ["guards_itself", "indices"]

# These draw from their own generator alone, which we seed: nothing has to be guarded. Nor do they count their passes.
_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_PLAIN = (list, tuple, range)

# What a custom sampler draws at a time: a guard costs as much as a small batch, a share of one nothing.
_BLOCK = 64


def indices(sampler: Private, seed: int, epoch: int, limit: int | None) -> Iterator[Any]:
    """The indices (or lists of indices) of one pass, always the same for the same arguments and passes before.

    Args:
        sampler: the private copy of what gives the order; ``epoch`` passes were made on it.
        seed: a seed for this epoch's order.
        epoch: handed to the ``set_epoch`` of the copy, where it has one.
        limit: at most as many are drawn; None: all.
    """
    if guards_itself(sampler.value):
        yield from islice(sampler.begin(seed, epoch), limit)
        return
    with seeded_all(derive(seed, "iter")):
        drawn = iter(sampler.begin(seed, epoch))
    left = limit
    for block in count():
        ready: list[Any] = []
        failure: Exception | None = None
        size = _BLOCK if left is None else min(_BLOCK, left)
        with seeded_all(derive(seed, block)):
            try:
                while len(ready) < size and (index := next(drawn, END)) is not END:
                    ready.append(index)
            except Exception as error:
                failure = error  # raised after what was drawn before it has been given
        yield from ready
        if failure is not None:
            raise failure
        if left is not None:
            left -= len(ready)
        if len(ready) < size or left == 0:
            return


def guards_itself(sampler: Any) -> bool:
    """Whether a sampler runs no code but torch's and draws from no generator but its own."""
    if type(sampler) is BatchSampler:
        return guards_itself(sampler.sampler)
    return type(sampler) in _TORCH or type(sampler) in _PLAIN
