"""Which source serves a dataloader. Of torch's DataLoaders order and seeds are ours, workers and collate theirs."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import accumulate, chain, islice
from itertools import count as numbers
from typing import Any, Literal, TypeAlias, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from pure_loop._internal.closing import closing
from pure_loop._internal.pytree import Batch
from pure_loop._internal.torch_private import iterator_of_loader
from pure_loop.data import workers as _loaders
from pure_loop.data.changes import has_epochs, writes_attributes
from pure_loop.data.copies import Private
from pure_loop.data.group import END, Part, Share
from pure_loop.data.passes import Passes, iterator_made, shut
from pure_loop.data.samples import num_samples
from pure_loop.data.source import Batches, Listed, Source
from pure_loop.data.streams import Iterated, OneShot
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.random import derive

Loader: TypeAlias = DataLoader[object]


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
    dataloader = _as_torchs(dataloader)
    result = _kind(dataloader)(dataloader, seed, stream, batches_per_epoch, share, batches_per_step)
    result.uneven = uneven
    return result


def _as_torchs(loader: object) -> object:
    """A StatefulDataLoader over a dataset with indices as a DataLoader, which resumes by index; others as they are."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    if module is None or not isinstance(loader, DataLoader) or type(loader) is not module.StatefulDataLoader:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return loader
    samplers = sys.modules["torchdata.stateful_dataloader.sampler"]

    def torchs(sampler: Any) -> Any:
        if type(sampler) is samplers.RandomSampler:
            return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples)
        if type(sampler) is samplers.BatchSampler:
            return BatchSampler(torchs(sampler.sampler), sampler.batch_size, sampler.drop_last)
        return sampler

    options: dict[str, Any] = {"batch_sampler": torchs(loader.batch_sampler)}
    if loader.batch_sampler is None or (
        loader.batch_size is not None and type(loader.batch_sampler) is samplers.BatchSampler
    ):
        sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        options = {"sampler": torchs(loader.sampler), **sizes}
    for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"):
        options[name] = getattr(loader, name)
    options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return DataLoader[object](loader.dataset, **options)


def is_one_shot(loader: object) -> TypeGuard[Iterator[Any]]:
    """Whether data gives its batches once: an iterator, but for one that begins anew.

    >>> is_one_shot(iter([1])), is_one_shot([1])
    (True, False)
    """
    return isinstance(loader, Iterator) and not writes_attributes(type(loader), "__iter__")


def _kind(loader: object) -> type[Source]:
    """The kind of source that serves an object.

    Raises:
        ArgumentTypeError: none does.
    """
    name = type(loader).__name__
    if isinstance(loader, DataLoader):
        return _Indexed if _is_plain(loader) and not isinstance(loader.dataset, IterableDataset) else _Rebuilt
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ArgumentTypeError(
            f"{name} is a dataset: it gives samples where batches are needed; write DataLoader(dataset, batch_size=...)"
            ", or DataLoader(dataset, batch_size=None) where its items are batches already"
        )
    if isinstance(loader, (Mapping, AbstractSet, str, bytes)) or hasattr(loader, "__array__"):
        raise ArgumentTypeError(
            f"{name} is no dataloader; give a DataLoader, a list of batches or an iterable of batches (tensors: "
            "DataLoader(TensorDataset(inputs, targets), batch_size=...))"
        )
    if isinstance(loader, Sequence) or (hasattr(loader, "__getitem__") and not hasattr(loader, "__iter__")):
        return Listed
    if is_one_shot(loader):
        return OneShot
    if isinstance(loader, Iterable):
        return Iterated
    raise ArgumentTypeError(
        f"{name} is no dataloader: it can't be iterated over; give a DataLoader, a list of batches or an iterable of"
        " batches (call a generator function: batches(), not batches, which makes those of one epoch; an object whose"
        " __iter__ it is makes those of each)"
    )


class _Indexed(Source):
    """A DataLoader over a map-style dataset: what was seen is skipped by index, without loading it."""

    _loader: Loader

    def _prepare(self) -> None:
        loader = self._loader
        self._shares = loader.batch_sampler is not None  # or else an index stands for a whole batch
        self._sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._passes: Passes[Any] = Passes(
            lambda: Private(self._sampler, shared=(loader.dataset,), seeds=True),
            self._indices,
            limit=self._limit,
            continues=self._limit is not None and self.loader_length is None,
            independent=lambda copy: _loaders.guards_itself(copy.value),
            stream=self._stream,
            per_step=self._per_step,
        )
        self._free = _loaders.draws_nothing(loader)
        self._table = _loaders.is_table(loader)
        # Of the first batch to load, the samples that were seen in batches of another size.
        self._seen_of: dict[tuple[int, int], int] = {}
        self._pool: _loaders.Refillable | None = None
        self._pool_is_busy = False

    @property
    def described(self) -> dict[str, object]:
        loader, described = self._loader, super().described
        if not described:
            return described
        dataset: Any = loader.dataset
        try:
            samples = len(dataset)
        except (TypeError, NotImplementedError, AttributeError):  # its sampler knows what there is
            samples = None
        return {
            **described,
            "samples": samples,
            "batch_size": loader.batch_size,
            "order": type(self._sampler).__name__,
            "sampler": type(loader.sampler).__name__,
        }

    @property
    def reads_once(self) -> bool:
        return Private(self._sampler, shared=(self._loader.dataset,), seeds=True).drawn_once

    @property
    def repeats(self) -> bool:
        # Workers are started once an evaluation needs them.
        return self._loader.num_workers == 0

    @property
    def batches_stay(self) -> bool:
        return self._free or self._loader.num_workers > 0 or _loaders.collates_by_default(self._loader)

    @cached_property
    def keeps_pinned(self) -> bool:
        return self.batches_stay or self._loader.pin_memory

    def _batches(self, epoch: int, start: int, seen: int) -> Batches:
        with closing(self._passes.epoch(epoch, start, seen)) as indices:
            order: Iterator[Any] = indices
            seen_of_first = self._seen_of.get((epoch, start), 0)
            if seen_of_first:
                order = chain([first[seen_of_first:] for first in islice(indices, 1)], indices)
            if self._share is None or not self._shares:
                yield from self._load(order, epoch, start)
            else:
                yield from self._load_share(order, epoch, start, self._share)

    def resume(self, epoch: int, start: int, samples: int, count: Callable[[Batch], int], *, changed: bool) -> int:
        batches = start * self._per_step
        if not batches or self.uneven or not self._shares or self._passes.continues:
            return start
        sizes = self._sizes(epoch, batches, samples)
        total, following = sum(sizes[:batches]), sum(sizes[: batches + 1])
        certain = count is num_samples and _loaders.collates_by_default(self._loader)
        # What a library added to torch's collate for a class of its own leaves batches of other classes as they were,
        # which the first batch shows.
        expects_default = count is num_samples and _loaders.collates_by_default(self._loader, with_additions=True)
        # A collate may leave samples out or make several of one.
        if not changed and (total == samples or not (expects_default or total < samples < following)):
            return start
        refusal = partial(self._refuse_other_sizes, epoch, batches, samples, total)
        if not certain and not self._counts_indices(epoch, sizes[0], count):
            if changed:
                raise refusal("Samples can't be skipped by number, because a batch has not as many samples as indices.")
            return start
        if total == samples:
            return start
        if type(self._sampler) is not BatchSampler:
            raise refusal("A batch sampler of your own may put them together in any order.")
        ends = list(accumulate(sizes))
        passed = sum(end <= samples for end in ends)
        rest = samples - sum(sizes[:passed])
        if not passed or (self._per_step > 1 and (rest or passed % self._per_step)):
            raise refusal(f"They end within {'a step' if passed else 'the first batch'} of the new size.")
        self._seen_of[epoch, passed] = rest
        return passed // self._per_step

    def _sizes(self, epoch: int, batches: int, samples: int) -> list[int]:
        """The sizes of the batches of an epoch, until there are as many batches and samples as were made, and one."""
        sizes: list[int] = []
        with closing(self._passes.epoch(epoch, 0, 0)) as order:
            for indices in order:
                sizes.append(len(indices))
                if len(sizes) > batches and sum(sizes) > samples:
                    break
        return sizes

    def _counts_indices(self, epoch: int, size: int, count: Callable[[Batch], int]) -> bool:
        """Whether the first batch of an epoch, of this rank's part of it, has as many samples as indices."""
        with closing(self._batches(epoch, 0, 0)) as batches:
            batch = next(batches)
        if self._share is not None:
            size, batch = len(self._share.of_indices([0] * size).batch), batch.batch
        return count(batch) == size

    def _indices(self, sampler: Private[Iterable[object]], number: int) -> Iterator[object]:
        limit = None if self._passes.continues else self._limit
        return _loaders.indices_of_pass(sampler, derive(self._seed, number, "order"), number, limit)

    def _load_share(self, order: Iterator[Sequence[object]], epoch: int, start: int, share: Share) -> Batches:
        """This rank's samples alone. Positions, and so seeds, count whole batches."""
        parts: deque[Part] = deque()  # of what is being loaded: workers are asked ahead

        def mine() -> Iterator[Sequence[object]]:
            for indices in order:
                part = share.of_indices(indices)
                parts.append(part)
                yield part.batch

        with closing(self._load(mine(), epoch, start)) as batches:
            for batch in batches:
                part = parts.popleft()
                yield Part(batch, part.counts, part.samples, part.order)

    def _load(self, order: Iterator[Any], epoch: int, start: int) -> Batches:
        if self._table:
            for item in order:
                yield _loaders.rows(self._loader.dataset, item)
            return
        in_workers = self._loader.num_workers > 0
        if in_workers and not self._free:
            order = ((self._seed_of(epoch, start + i), index) for i, index in enumerate(order))
        # Workers that outlive an epoch serve one at a time; another one opened meanwhile gets its own.
        keep = self._loader.persistent_workers and not self._pool_is_busy
        pool = self._pool if keep else None
        pool = pool or _loaders.Refillable(self._loader, derive(self._seed, epoch, "workers"), not self._free, keep)
        batches: Iterator[Batch] | None = None
        intact = False
        try:
            if keep:
                self._pool, self._pool_is_busy = pool, True
            batches = pool.refill(order)
            iterator_made(batches)
            loader = self._loader
            guard = nullcontext if in_workers or self._free else self._guard_of([loader.dataset, loader.collate_fn])
            for position in numbers(start):
                with guard(self._seed_of(epoch, position)):
                    batch = next(batches, END)
                if batch is END:
                    break
                intact = True
                yield batch
                intact = False
            intact = True
        finally:
            if keep:
                self._pool_is_busy = False
            if not keep or not intact:
                shut(batches)
                self._pool = None if keep else self._pool

    def _seed_of(self, epoch: int, position: int) -> int:
        """What a dataset or collate draws from; two ranks must not augment their samples alike."""
        rank = 0 if self._share is None else self._share.rank
        return derive(self._seed, epoch, position, *([rank] if rank else []))

    def close(self) -> None:
        self._passes.close()
        if self._pool is not None:
            self._pool.close()
            self._pool, self._pool_is_busy = None, False


class _Rebuilt(Iterated):
    """A DataLoader that can only be iterated over: of an IterableDataset, or of a class of the user's own."""

    _loader: Loader

    def _prepare(self) -> None:
        loader = self._loader
        self._in_workers = _is_plain(loader) and loader.num_workers > 0
        self._tells_workers = self._in_workers and Private(loader.dataset, seeds=False).has_epochs
        # Persistent workers keep their copy of the dataset from pass to pass, unless set_epoch tells them the epoch.
        self._keeps_workers = self._in_workers and loader.persistent_workers and not self._tells_workers
        self._kept: Loader | None = None

    @cached_property
    def keeps_pinned(self) -> bool:
        return _is_plain(self._loader) and self._loader.pin_memory

    def _count(self) -> int:
        # Of a copy: a DataLoader remembers that it was asked, and warns later.
        return len(copy.copy(self._loader))

    def close(self) -> None:
        super().close()
        if self._kept is not None:
            shut(iterator_of_loader(self._kept))
            self._kept = None

    def _copy(self) -> Private[Any]:
        loader = self._loader
        shared = () if isinstance(loader.dataset, IterableDataset) and not self._in_workers else (loader.dataset,)
        return Private(loader, shared=shared, seeds=False)

    def _for_pass(self, copy: Private[Any], number: int, seed_pass: int) -> Any:
        if self._keeps_workers and isinstance(copy.value.dataset, _loaders.Passing):
            return copy.value
        loader = copy.begin(derive(self._seed, seed_pass, "order"), number)
        changes: dict[str, object] = {"persistent_workers": False}
        if _is_plain(loader):
            changes |= _loaders.pinning_anew(self._loader)
        if self._keeps_workers or self._tells_workers:
            changes |= _loaders.passing(self._loader, derive(self._seed, "passes"), number, self._keeps_workers)
        if self._keeps_workers:
            self._kept = loader
        return _loaders.adapted(loader, derive(self._seed, seed_pass, "workers"), changes)

    @property
    def _has_epochs(self) -> bool:
        return has_epochs(self._loader) or has_epochs(self._loader.dataset)

    def _independent(self, copy: Private[Any]) -> bool | None:
        # New workers have the dataset as it was given, and those that stay make the passes before.
        return True if self._in_workers else super()._independent(copy)

    @cached_property
    def _selects(self) -> bool:
        return not self._in_workers and super()._selects


def _is_plain(loader: Loader) -> bool:
    """Whether a loader iterates as torch's does: its subclasses may do anything."""
    return all(getattr(type(loader), item) is getattr(DataLoader, item) for item in ("__iter__", "_get_iterator"))
