"""A DataLoader of ours made from the user's: same dataset, collate and workers, our order and seeds.

A sampler is drawn from as a private copy, so the user's is left as it was, and everything random in the
copy starts from a derived seed: its generators are seeded anew, and what it draws from the global ones it
draws where they are seeded. So an epoch's order can be drawn again, and skipped into, at any time. A sampler that
counts its passes, or shuffles what it holds, gives in epoch k what its pass k gives: those before it are drawn again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)

from pure_loop._internal.pytree import Batch
from pure_loop._internal.torch_private import default_collate_functions, iterator_of_loader, of_one_pass
from pure_loop.data.batch import map_tensors
from pure_loop.data.copies import Private
from pure_loop.data.group import END
from pure_loop.data.passes import Passes, shut
from pure_loop.random.seeds import derive, reseed, seeded_all

__all__ = [
    *("Passing", "Refillable", "adapted", "collates_by_default", "draws_nothing", "guards_itself", "indices_of_pass"),
    *("is_table", "passing", "pinning_anew", "rebuilt", "rows"),
]


class Refillable:
    """A loader over one order of indices after another; its workers may live through all of them.

    Args:
        loader: the user's, over a map-style dataset.
        seed: what workers start from.
        reseeding: in workers, the indices come with a seed: pairs ``(seed, index)``.
        persistent: whether the workers outlive the iterators.
    """

    def __init__(self, loader: DataLoader[object], seed: int, reseeding: bool, persistent: bool) -> None:
        self._feed = _Feed()
        changes: dict[str, object] = {
            "sampler": self._feed,
            "batch_sampler": None if loader.batch_sampler is None else self._feed,
            "persistent_workers": persistent,
            **pinning_anew(loader),
        }
        if loader.num_workers and reseeding:
            changes["dataset"] = _Reseeding(loader.dataset)
            changes["worker_init_fn"] = partial(_enter_worker, loader.worker_init_fn)
        self._loader = rebuilt(loader, seed, changes)

    def refill(self, order: Iterator[object]) -> Iterator[object]:
        self._feed.order = order
        return iter(self._loader)

    def close(self) -> None:
        shut(iterator_of_loader(self._loader))


class _Feed:
    """The sampler of such a loader: the order at hand."""

    order: Iterator[object]

    def __iter__(self) -> Iterator[object]:
        return self.order


class _Reseeding:
    """A dataset as workers get it: indices come with their batch's seed, which serves the collate as well."""

    def __init__(self, dataset: Dataset[object]) -> None:
        self.dataset = dataset

    def __getitem__(self, pair: tuple[int, object]) -> object:
        reseed(pair[0])
        return self.dataset[pair[1]]

    def __getitems__(self, pair: tuple[int, list[object]]) -> Sequence[object]:
        reseed(pair[0])
        together = getattr(self.dataset, "__getitems__", None)
        return together(pair[1]) if together else [self.dataset[index] for index in pair[1]]


class Passing(IterableDataset[object]):
    """An iterable dataset in workers, each of which makes passes over a copy of its own, in an order of its own.

    Args:
        dataset: the user's.
        seed: where the seeds of passes come from.
        number: of the first pass to make.
        stays: whether the workers make one pass after another. The generators of the process are seeded for each, too.
    """

    def __init__(self, dataset: Dataset[object], seed: int, number: int, stays: bool) -> None:
        self.dataset, self.seed, self.number, self.stays = dataset, seed, number, stays
        # Made in the worker.
        self._passes: Passes[object] | None = None

    def __iter__(self) -> Iterator[object]:
        if self._passes is None:
            self._passes = Passes(
                lambda: Private(self.dataset, seeds=False),
                self._run,
                limit=None,
                continues=False,
                independent=lambda copy: copy.independent if self.stays else True,
                stream="iterable",
            )
        self.number += 1
        return self._passes.epoch(self.number - 1, 0, 0)

    def _run(self, copy: Private[Any], number: int) -> Iterator[object]:
        info = get_worker_info()
        seed = derive(self.seed, number, "worker", 0 if info is None else info.id)
        if self.stays:
            reseed(seed)
        yield from copy.begin(derive(seed, "order"), number)


def passing(loader: DataLoader[object], seed: int, number: int, stays: bool) -> dict[str, object]:
    """What to change in a loader over an iterable dataset to tell workers the number of the pass."""
    return {
        "dataset": Passing(loader.dataset, seed, number, stays),
        "worker_init_fn": partial(_enter_worker, loader.worker_init_fn),
        "persistent_workers": stays,
    }


def _enter_worker(user: Callable[[int], None] | None, worker: int) -> None:
    # get_worker_info() must show the user's own dataset, to the user's function too; the record is read-only.
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user is not None:
        user(worker)


def rebuilt(loader: DataLoader[object], seed: int, changes: Mapping[str, object]) -> DataLoader[object]:
    """A copy of a loader with a generator of ours and other attributes, which a DataLoader refuses to have set."""
    return adapted(copy.copy(loader), seed, changes)


def adapted(loader: DataLoader[object], seed: int, changes: Mapping[str, object]) -> DataLoader[object]:
    """:func:`rebuilt`, of a loader that is a copy already."""
    vars(loader).update(
        generator=torch.Generator().manual_seed(seed),
        in_order=True,  # Batches in the order in which workers happen to finish can't be had twice.
        **of_one_pass,
    )
    vars(loader).update(changes)
    return loader


def pinning_anew(loader: DataLoader[object]) -> dict[str, object]:
    """What to change in a loader with ``pin_memory``, so that each batch is in pinned memory of its own.

    Torch leaves what is pinned already where it is, and a dataset or a collate may fill that again for the next batch.
    """
    if not loader.pin_memory or loader.num_workers or collates_by_default(loader) or draws_nothing(loader):
        return {}
    return {"collate_fn": partial(_collate_unpinned, loader.collate_fn)}


def _collate_unpinned(collate: Callable[[Any], Batch], samples: Any) -> Batch:
    return map_tensors(_unpinned, collate(samples))


def _unpinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_cpu and tensor.is_pinned() else tensor


def draws_nothing(loader: DataLoader[object]) -> bool:
    """Whether loading a batch runs no code but torch's, none of which draws."""
    torchs_own = loader.collate_fn is default_convert or (loader.collate_fn is default_collate and not _is_extended())
    return torchs_own and _is_fixed(loader.dataset)


def collates_by_default(loader: DataLoader[object], *, with_additions: bool = False) -> bool:
    """Whether torch puts samples together, which it does in new memory.

    Args:
        loader: any.
        with_additions: whether code that was added to torch's collate for a class of samples counts as torch's.
    """
    by_default = loader.collate_fn is default_collate and loader.batch_sampler is not None
    return by_default and (with_additions or not _is_extended())


def _is_extended() -> bool:
    """Whether torch's collate was extended by user code for a class of samples, or can't say whether it was."""
    functions = default_collate_functions
    return functions is None or any(
        function.__module__ != default_collate.__module__ for function in functions.values()
    )


def _is_fixed(dataset: object) -> bool:
    if type(dataset) is Subset:
        return _is_fixed(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_fixed, dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple, range)


def is_table(loader: DataLoader[object]) -> bool:
    """Whether :func:`rows` gives what the loader would: plain tensors, collated by torch in this process."""
    dataset: Any = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return (
        type(dataset) is TensorDataset
        and all(type(tensor) is torch.Tensor and tensor.layout is torch.strided for tensor in dataset.tensors)
        and loader.num_workers == 0
        and not loader.pin_memory
        and loader.collate_fn is default_collate
        and guards_itself(loader.batch_sampler)
    )


def rows(dataset: Any, indices: list[int]) -> list[torch.Tensor]:
    """What default_collate makes of these rows of a TensorDataset, in one operation a tensor instead of one a row."""
    while type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    where = torch.as_tensor(indices, dtype=torch.int64)
    return [tensor[where].contiguous() for tensor in dataset.tensors]


# These draw from their own generator alone, which we seed: nothing has to be guarded. Nor do they count their passes.
_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_PLAIN = (list, tuple, range)

# What a custom sampler draws at a time: a guard costs as much as a small batch, a share of one nothing.
_BLOCK = 64


def indices_of_pass(sampler: Private[Iterable[object]], seed: int, epoch: int, limit: int | None) -> Iterator[object]:
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
        ready: list[object] = []
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


def guards_itself(sampler: object) -> bool:
    """Whether a sampler runs no code but torch's and draws from no generator but its own."""
    if type(sampler) is BatchSampler:
        return guards_itself(sampler.sampler)
    return type(sampler) in _TORCH or type(sampler) in _PLAIN
