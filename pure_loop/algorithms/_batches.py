"""Batches: their samples by indices, and those of a step that has several (``fit(batches_per_step=)``), one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from torch import Tensor

from pure_loop._internal.pytree import Batch
from pure_loop.data.batch import map_tensors
from pure_loop.data.group import Batches
from pure_loop.frozendict import FrozenDict
from pure_loop.random import derive
from pure_loop.state import State

_NESTED = (Tensor, Mapping, list, tuple)


def rows_of(batch: Batch, index: Tensor, count: int) -> Batch:
    """A batch with some of its samples, in another order or several times.

    Tensors with ``count`` rows, and lists of ``count`` texts or numbers, hold the samples; what else there is belongs
    to the batch as a whole. Only where there is such a list is the device waited for.

    Args:
        batch: a nesting of tensors, lists, tuples and mappings.
        index: of the samples, (k,), int64.
        count: the number of samples of the batch.

    >>> import torch
    >>> rows_of((torch.arange(3), ["a", "b", "c"], 0.5), torch.tensor([2, 0]), 3)
    (tensor([2, 0]), ['c', 'a'], 0.5)
    """
    if isinstance(batch, Tensor):
        return batch.index_select(0, index) if batch.ndim and len(batch) == count else batch
    if isinstance(batch, list | tuple):
        if len(batch) == count and batch and not any(isinstance(item, _NESTED) for item in batch):
            return type(batch)([batch[number] for number in index.tolist()])
        parts = [rows_of(item, index, count) for item in batch]
        return type(batch)(*parts) if hasattr(batch, "_make") else type(batch)(parts)
    if isinstance(batch, dict | FrozenDict):
        return type(batch)({key: rows_of(value, index, count) for key, value in batch.items()})
    return map_tensors(lambda tensor: rows_of(tensor, index, count), batch)


def by_part(handler: Callable[..., State]) -> Callable[..., State]:
    """A handler that changes ``state.batch`` alone, applied to each batch of a step.

    Each batch has draws of its own: the handler receives a State with another seed for each but the first.
    """

    @functools.wraps(handler)
    def changed(state: State, *stages: object) -> State:
        if type(state.batch) is not Batches:
            return handler(state, *stages)
        parts = []
        for number, part in enumerate(state.batch):
            seed = derive(state.seed, "part", number) if number else state.seed
            parts.append(handler(state.replace(batch=part, seed=seed), *stages).batch)
        return state.replace(batch=Batches(tuple(parts)))

    return changed
