"""A DataLoader of ours made from the user's: same dataset, collate and workers, our order and seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from pure_loop._internal.torch_private import default_collate_functions, iterator_of_loader, of_one_pass
from pure_loop.data import samplers as _samplers
from pure_loop.data.batch import map_tensors
from pure_loop.data.copies import Private
from pure_loop.data.passes import Passes
from pure_loop.data.source import shut
from pure_loop.random.seeds import derive, reseed

__all__ = [
    "Passing",
    "Refillable",
    "adapted",
    "collates_by_default",
    "draws_nothing",
    "is_table",
    "passing",
    "pinning_anew",
    "rebuilt",
    "rows",
]


class Refillable:
    """A loader over one order of indices after another, whose workers may live through all of them.

    Args:
        loader: the user's, over a map-style dataset.
        seed: what workers start from.
        reseeding: in workers, the indices come with a seed: pairs ``(seed, index)``.
        persistent: whether the workers outlive the iterators.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, reseeding: bool, persistent: bool) -> None:
        self._feed = _Feed()
        changes: dict[str, Any] = {
            "sampler": self._feed,
            "batch_sampler": None if loader.batch_sampler is None else self._feed,
            "persistent_workers": persistent,
            **pinning_anew(loader),
        }
        if loader.num_workers and reseeding:
            changes["dataset"] = _Reseeding(loader.dataset)
            changes["worker_init_fn"] = partial(_enter_worker, loader.worker_init_fn)
        self._loader = rebuilt(loader, seed, changes)

    def refill(self, order: Iterator[Any]) -> Iterator[Any]:
        self._feed.order = order
        return iter(self._loader)

    def close(self) -> None:
        shut(iterator_of_loader(self._loader))


class _Feed:
    """The sampler of such a loader: the order at hand."""

    order: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.order


class _Reseeding:
    """A dataset as workers get it: indices come with their batch's seed, which serves the collate as well."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, pair: tuple[int, Any]) -> Any:
        reseed(pair[0])
        return self.dataset[pair[1]]

    def __getitems__(self, pair: tuple[int, list[Any]]) -> Any:
        reseed(pair[0])
        together = getattr(self.dataset, "__getitems__", None)
        return together(pair[1]) if together else [self.dataset[index] for index in pair[1]]


class Passing(IterableDataset[Any]):
    """An iterable dataset in workers, each of which makes passes over a copy of its own, in an order of its own.

    Args:
        dataset: the user's.
        seed: where the seeds of passes come from.
        number: of the first pass to make.
        stays: whether the workers make one pass after another. The generators of the process are seeded for each, too.
    """

    def __init__(self, dataset: Any, seed: int, number: int, stays: bool) -> None:
        self.dataset, self.seed, self.number, self.stays = dataset, seed, number, stays
        # Made in the worker.
        self._passes: Passes[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
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

    def _run(self, copy: Private, number: int) -> Iterator[Any]:
        info = get_worker_info()
        seed = derive(self.seed, number, "worker", 0 if info is None else info.id)
        if self.stays:
            reseed(seed)
        yield from copy.begin(derive(seed, "order"), number)


def passing(loader: DataLoader[Any], seed: int, number: int, stays: bool) -> dict[str, Any]:
    """What to change in a loader over an iterable dataset whose workers are told the number of the pass."""
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


def rebuilt(loader: DataLoader[Any], seed: int, changes: Mapping[str, Any]) -> DataLoader[Any]:
    """A copy of a loader with a generator of ours and other attributes, which a DataLoader refuses to have set."""
    return adapted(copy.copy(loader), seed, changes)


def adapted(loader: DataLoader[Any], seed: int, changes: Mapping[str, Any]) -> DataLoader[Any]:
    """The same of a loader that is a copy already."""
    vars(loader).update(
        generator=torch.Generator().manual_seed(seed),
        in_order=True,  # Batches in the order in which workers happen to finish can't be had twice.
        **of_one_pass,
    )
    vars(loader).update(changes)
    return loader


def pinning_anew(loader: DataLoader[Any]) -> dict[str, Any]:
    """What to change in a loader with ``pin_memory``, so that each batch is in pinned memory of its own.

    Torch leaves what is pinned already where it is, and a dataset or a collate may fill that again for the next batch.
    """
    if not loader.pin_memory or loader.num_workers or collates_by_default(loader) or draws_nothing(loader):
        return {}
    return {"collate_fn": partial(_collate_unpinned, loader.collate_fn)}


def _collate_unpinned(collate: Callable[[Any], Any], samples: Any) -> Any:
    return map_tensors(_unpinned, collate(samples))


def _unpinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_cpu and tensor.is_pinned() else tensor


def draws_nothing(loader: DataLoader[Any]) -> bool:
    """Whether loading a batch runs no code but torch's, none of which draws."""
    torchs_own = loader.collate_fn is default_convert or (loader.collate_fn is default_collate and not _is_extended())
    return torchs_own and _is_fixed(loader.dataset)


def collates_by_default(loader: DataLoader[Any], *, with_additions: bool = False) -> bool:
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


def _is_fixed(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _is_fixed(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_fixed, dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple, range)


def is_table(loader: DataLoader[Any]) -> bool:
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
        and _samplers.guards_itself(loader.batch_sampler)
    )


def rows(dataset: Any, indices: list[int]) -> list[torch.Tensor]:
    """What default_collate makes of these rows of a TensorDataset, in one operation a tensor instead of one a row."""
    while type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    where = torch.as_tensor(indices, dtype=torch.int64)
    return [tensor[where].contiguous() for tensor in dataset.tensors]
