"""A sampler for one epoch: the user's order of indices as a function of a seed.

A sampler is drawn from as a private copy, so the user's is left as it was, and everything random in the
copy starts from a derived seed: its generators are replaced, and what it draws from the global ones it
draws where they are seeded. So an epoch's order can be drawn again, and skipped into, at any time.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pure_loop.random import derive, seeded_all

__all__ = ["guards_itself", "indices", "private_copy"]

# These draw from their own generator alone, which we replace: nothing has to be guarded.
_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_PLAIN = (list, tuple, range)

# What a custom sampler draws at a time: a guard costs as much as a small batch, a share of one nothing.
_BLOCK = 64

# What an __iter__ might shuffle in place, and what it can't.
_CONTAINERS = frozenset((list, dict, set, deque))
_SIMPLE = frozenset((int, float, bool, str, bytes, tuple, type(None), torch.Tensor))


def indices(sampler: Iterable[Any], seed: int, epoch: int, shared: tuple[Any, ...]) -> Iterator[Any]:
    """The indices (or lists of indices) of one epoch, always the same for the same arguments.

    Args:
        sampler: what gives the order; it is copied, never drawn from.
        seed: a seed for this epoch's order.
        epoch: handed to the ``set_epoch`` of the copy, where it has one.
        shared: objects that the copy refers to and must not copy, such as the dataset.
    """
    if guards_itself(sampler):
        yield from private_copy(sampler, seed, epoch, shared)
        return
    with seeded_all(derive(seed, "iter")):
        drawn = iter(private_copy(sampler, seed, epoch, shared))
    for block in count():
        ready: list[Any] = []
        failure: Exception | None = None
        with seeded_all(derive(seed, block)):
            try:
                ready.extend(islice(drawn, _BLOCK))
            except Exception as error:
                failure = error  # raised after what was drawn before it has been given
        yield from ready
        if failure is not None:
            raise failure
        if len(ready) < _BLOCK:
            return


def guards_itself(sampler: Any) -> bool:
    """Whether a sampler runs no code but torch's and draws from no generator but its own."""
    if type(sampler) is BatchSampler:
        return guards_itself(sampler.sampler)
    return type(sampler) in _TORCH or type(sampler) in _PLAIN


def private_copy(sampler: Any, seed: int, epoch: int, shared: tuple[Any, ...]) -> Any:
    """A copy whose generators start from ``seed`` and whose iteration writes nothing that the original sees.

    Samplers in it, its containers, arrays and generators are copied; tensors and every other object are shared.
    """
    return _Copier(seed, epoch, shared)(sampler)


class _Copier:
    def __init__(self, seed: int, epoch: int, shared: tuple[Any, ...]) -> None:
        self.seed = seed
        self.epoch = epoch
        self.done: dict[int, Any] = {id(each): each for each in shared}
        self.generators = 0

    def __call__(self, value: Any, *, whole: bool = True) -> Any:
        if id(value) not in self.done:
            self.done[id(value)] = self._copy(value, whole)
        return self.done[id(value)]

    def _next_seed(self) -> int:
        self.generators += 1
        return derive(self.seed, "generator", self.generators)

    def _copy(self, value: Any, whole: bool) -> Any:
        kind = type(value)
        if kind in _CONTAINERS:
            inside = value.values() if kind is dict else value
            # Lists of a million indices or of file names and labels are common: copied at once, not one by one.
            if _SIMPLE.issuperset(map(type, inside)):
                return copy.copy(value)
            return (
                {key: self._part(each) for key, each in value.items()} if kind is dict else kind(map(self._part, value))
            )
        generator = self._generator(value)
        if generator is not None:
            return generator
        if whole and not isinstance(value, (Iterator, range)):
            return self._sampler(value)
        return value

    def _part(self, value: Any) -> Any:
        return self(value, whole=isinstance(value, Sampler))

    def _generator(self, value: Any) -> Any:
        """A generator of the same kind that starts at a seed of ours; None where ``value`` is none."""
        if isinstance(value, torch.Generator):
            return torch.Generator(value.device).manual_seed(self._next_seed())
        if isinstance(value, random.Random):
            return type(value)(self._next_seed())
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            if isinstance(value, numpy.ndarray):
                return value.copy()
            if isinstance(value, numpy.random.Generator):
                return numpy.random.Generator(type(value.bit_generator)(self._next_seed()))
            if isinstance(value, numpy.random.RandomState):
                return numpy.random.RandomState(self._next_seed() & 0xFFFFFFFF)
        return None

    def _sampler(self, sampler: Any) -> Any:
        new = copy.copy(sampler)
        self.done[id(sampler)] = new
        attributes = getattr(new, "__dict__", {})
        if type(sampler) in _TORCH:
            if "generator" in attributes:
                attributes["generator"] = torch.Generator().manual_seed(self._next_seed())
            return new
        for name, value in attributes.items():
            attributes[name] = self(value, whole=name in ("sampler", "batch_sampler") or isinstance(value, Sampler))
        if callable(getattr(new, "set_epoch", None)):
            new.set_epoch(self.epoch)
        return new
