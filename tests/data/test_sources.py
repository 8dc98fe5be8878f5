"""Where batches come from: the same ones for the same epoch and position, whatever happens around them."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pure_loop.data.dataloaders import source
from pure_loop.data.group import Share
from tests.support.loaders import (
    Again,
    Augmented,
    Custom,
    CustomBatches,
    Made,
    SizedStream,
    Stream,
    Together,
    noise,
    noisy_collate,
    same,
    scramble,
    snapshot,
    table,
)
from tests.support.tiers import examples


class Eager:
    """Draws when it is asked for an iterator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter([int(i) for i in np.random.permutation(self.n)])


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch, torch.rand(2)


Make = Callable[[int, int], Any]

BY_INDEX: dict[str, Make] = {
    "sequential": lambda n, b: DataLoader(Augmented(n), batch_size=b),
    "shuffle": lambda n, b: DataLoader(Augmented(n), batch_size=b, shuffle=True),
    "drop last": lambda n, b: DataLoader(Augmented(n + b), batch_size=b, shuffle=True, drop_last=True),
    "their generator": lambda n, b: DataLoader(Augmented(n), b, shuffle=True, generator=torch.Generator()),
    "with replacement": lambda n, b: DataLoader(Augmented(n), b, sampler=RandomSampler(range(n), True, n + 3)),
    "weighted": lambda n, b: DataLoader(Augmented(n), b, sampler=WeightedRandomSampler([1.0] * n, n)),
    "subset random": lambda n, b: DataLoader(Augmented(n), b, sampler=SubsetRandomSampler(range(0, n, 2))),
    "lazy": lambda n, b: DataLoader(Augmented(n), batch_size=b, sampler=Custom(n, "lazy")),
    "in place": lambda n, b: DataLoader(Augmented(n), batch_size=b, sampler=Custom(n, "in place")),
    "own generators": lambda n, b: DataLoader(Augmented(n), batch_size=b, sampler=Custom(n, "own")),
    "set_epoch": lambda n, b: DataLoader(Augmented(n), batch_size=b, sampler=Custom(n, "set_epoch")),
    "list of indices": lambda n, b: DataLoader(Augmented(n), batch_size=b, sampler=[*range(n), 0]),  # type: ignore[arg-type]
    "batch sampler": lambda n, b: DataLoader(
        Augmented(n), batch_sampler=BatchSampler(RandomSampler(range(n)), b, False)
    ),
    "custom batches": lambda n, b: DataLoader(Augmented(n), batch_sampler=CustomBatches(n)),
    "no batches": lambda n, b: DataLoader(Augmented(n), batch_size=None, shuffle=True),
    "batches by index": lambda n, b: DataLoader(
        Augmented(n), batch_size=None, sampler=BatchSampler(Custom(n, "lazy"), b, False)
    ),
    "getitems": lambda n, b: DataLoader(Together(n), batch_size=b, shuffle=True),
    "noisy collate": lambda n, b: DataLoader(Augmented(n), batch_size=b, shuffle=True, collate_fn=noisy_collate),
}
OTHERS: dict[str, Make] = {
    "list": lambda n, b: [torch.full((b,), float(i)) for i in range(n)],
    "tuple": lambda n, b: tuple(torch.full((b,), float(i)) for i in range(n)),
    "made": lambda n, b: Made(n),
    "table": lambda n, b: DataLoader(table(n), batch_size=b, shuffle=True),
    "table, noisy collate": lambda n, b: DataLoader(table(n), batch_size=b, shuffle=True, collate_fn=noisy_collate),
    "subset of a table": lambda n, b: DataLoader(Subset(table(n + 2), range(1, n + 1)), batch_size=b, shuffle=True),
    "tables": lambda n, b: DataLoader(ConcatDataset([table(n), table(2)]), batch_size=b, shuffle=True),
    "numbers": lambda n, b: DataLoader(range(n), batch_size=b, sampler=Custom(n, "lazy")),  # type: ignore[arg-type]
    "eager": lambda n, b: DataLoader(range(n), batch_size=None, sampler=Eager(n)),  # type: ignore[arg-type]
    "stream": lambda n, b: DataLoader(Stream(n), batch_size=b),
    "sized stream": lambda n, b: DataLoader(SizedStream(n), batch_size=b, drop_last=n % b > 0 and n > b),
    "stream without batches": lambda n, b: DataLoader(Stream(n), batch_size=None, generator=torch.Generator()),
    "bare stream": lambda n, b: Stream(n),
    "again": lambda n, b: Again(n),
    "loader of its own kind": lambda n, b: Doubling(Augmented(n), batch_size=b, sampler=Custom(n, "own")),
}
KINDS = BY_INDEX | OTHERS

kinds = st.sampled_from(sorted(KINDS))
seeds = st.integers(0, 2**32 - 1)


def visible(value: Any, depth: int = 0) -> Any:
    """What a user can see of a loader, its sampler, its dataset and their generators."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [visible(each, depth + 1) for each in value]
    if hasattr(value, "__dict__") and depth < 4:
        return {k: (id(v), visible(v, depth + 1)) for k, v in vars(value).items() if k != "loads"}
    return repr(value)


UNSIZED = ("custom batches", "stream", "stream without batches", "bare stream", "again")


@examples(80, 800)
@given(
    kind=kinds,
    n=st.integers(1, 9),
    size=st.integers(1, 4),
    epoch=st.integers(0, 2),
    start=st.integers(0, 10),
    limit=st.none() | st.integers(1, 6),
    scrambled=st.tuples(seeds, seeds),
    other=kinds | st.none(),
)
def test_batches_are_those_of_the_seed_and_the_epoch(
    kind: str, n: int, size: int, epoch: int, start: int, limit: int | None, scrambled: tuple[int, int], other: Any
) -> None:
    """Whatever global generators are, which stay as they were, as do the user's objects; and whatever was iterated
    before, in between, or beside it."""
    # Without a length of its own, `limit` divides what a loader gives into epochs: see test_sources_passes.py.
    limit = None if kind in UNSIZED else limit
    loader = KINDS[kind](n, size)
    shown = visible(loader)

    def made(loader: Any, stream: str = "train", limit: int | None = limit) -> Any:
        return source(loader, seed=3, stream=stream, batches_per_epoch=limit)

    data = made(loader)
    scramble(scrambled[0])
    before = snapshot()
    for number in range(epoch + 1):
        whole = []
        for batch in data.epoch(number):
            assert snapshot() == before
            whole.append(batch)
    assert snapshot() == before
    assert whole
    assert data.length == (None if kind in UNSIZED else len(whole))
    assert limit is None or len(whole) <= limit
    assert same(list(made(KINDS[kind](n, size), limit=None).epoch(epoch))[: len(whole)], whole)
    scramble(scrambled[1])
    again = []
    for batch in made(KINDS[kind](n, size)).epoch(epoch):
        again.append(batch)
        random.random(), np.random.rand(), torch.rand(1)  # what the training loop does meanwhile
    assert same(again, whole)
    # Going on loads nothing that was seen.
    before = snapshot()
    if kind in BY_INDEX:
        loader.dataset.loads = 0
    assert same(list(data.epoch(epoch, start=start)), whole[start:])
    if kind in BY_INDEX:
        assert loader.dataset.loads == len(_names(whole[start:]))
    # Another source in turn, over this object or another one.
    beside = made(loader if other is None else KINDS[other](n, size), stream="val", limit=None)
    alone = list(beside.epoch(1))
    running, turns = [data.epoch(epoch), beside.epoch(1), data.epoch(epoch)], [[], [], []]  # type: ignore[var-annotated]
    for _ in range(max(len(whole), len(alone)) + 1):
        for turn, batches in zip(turns, running, strict=True):
            turn.extend(batch for batch in [next(batches, None)] if batch is not None)
    assert same(turns, [whole, alone, whole])
    stopped = data.epoch(epoch + 1)
    for _ in range(start):
        next(stopped, None)
    stopped.close()
    data.close()
    assert snapshot() == before
    assert visible(loader) == shown


def order(kind: str, n: int) -> list[int]:
    return [
        int(i) for i in source(DataLoader(range(n), None, sampler=Custom(n, kind)), seed=0, stream="train").epoch(0)
    ]  # type: ignore[arg-type]


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 8), st.sampled_from(["in place", "lazy", "own"]), seeds)
def test_an_error_in_the_dataset_passes_and_leaves_the_state(
    n: int, size: int, broken: int, sampler: str, scrambled: int
) -> None:
    loader = DataLoader(Augmented(n, broken), batch_size=size, sampler=Custom(n, sampler))
    scramble(scrambled)
    before = snapshot()
    got: list[Any] = []
    with pytest.raises(LookupError, match=f"sample {broken}") if broken in order(sampler, n) else nullcontext():
        got.extend(source(loader, seed=0, stream="train").epoch(0))
    assert f"name {broken}" not in _names(got)
    assert snapshot() == before


def test_an_error_in_a_sampler_comes_after_what_it_gave_before() -> None:
    class Failing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            noise()
            raise LookupError("sampler")

    before = snapshot()
    got: list[Any] = []
    batches = source(DataLoader(Augmented(9), batch_size=2, sampler=Failing()), seed=0, stream="train").epoch(0)
    with pytest.raises(LookupError, match="sampler"):
        got.extend(batches)
    assert len(got) == 2
    assert snapshot() == before


def _names(batch: Any) -> list[str]:
    if isinstance(batch, str):
        return [batch]
    return [] if isinstance(batch, torch.Tensor) else [name for each in batch for name in _names(each)]


def test_long_orders_are_skipped_across_blocks() -> None:
    data = source(DataLoader(Augmented(140), batch_size=1, sampler=Custom(140, "lazy")), seed=0, stream="train")
    whole = list(data.epoch(0))
    assert len(whole) == 140
    assert _names(whole[:64]) != _names(whole[64:128])
    for start in (1, 63, 64, 65, 128, 139):
        assert same(list(data.epoch(0, start=start)), whole[start:])


def test_epochs_and_streams_and_seeds_differ() -> None:
    for kind in sorted(KINDS.keys() - {"list", "tuple", "list of indices"}):
        loader = KINDS[kind](40, 3)
        runs = [
            list(source(loader, seed=seed, stream=stream).epoch(epoch))
            for seed, stream, epoch in [(0, "train", 0), (0, "train", 1), (0, "val", 0), (1, "train", 0)]
        ]
        assert not any(same(a, b) for i, a in enumerate(runs) for b in runs[:i]), kind
        batches = [batch for run in runs for batch in run]
        if kind != "eager":  # whose batches are single indices, which come again
            assert not any(same(a, b) for i, a in enumerate(batches) for b in batches[:i]), kind


def test_set_epoch_reaches_copies_of_samplers_and_streams() -> None:
    sampler, stream = Custom(20, "set_epoch"), Stream(2)
    for epoch in (0, 3):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(epoch)).tolist()
        drawn = source(DataLoader(range(20), batch_size=20, sampler=sampler), seed=0, stream="a").epoch(epoch)  # type: ignore[arg-type]
        assert next(drawn).tolist() == order
        for loader in (stream, DataLoader(stream, batch_size=None)):
            assert [x[1].item() for x in source(loader, seed=0, stream="a").epoch(epoch)] == [epoch, epoch]
    assert sampler.epoch == stream.epoch == 0


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9), seeds)
def test_a_tables_rows_are_what_its_loader_gives(n: int, size: int, stop: int, seed: int) -> None:
    for dataset in (table(n), Subset(table(n), torch.arange(n))):  # type: ignore[arg-type]
        loader = DataLoader(dataset, batch_size=size, sampler=[*range(n), -1])  # type: ignore[arg-type, list-item]
        got, expected = list(source(loader, seed=seed, stream="train").epoch(stop)), list(loader)
        assert same(got, expected)
        for mine, theirs in zip(got, expected, strict=True):
            assert [x.stride() for x in mine] == [x.stride() for x in theirs]
            assert mine[0].untyped_storage().data_ptr() != table(n).tensors[0].untyped_storage().data_ptr()


def test_a_batch_is_let_go_of_when_the_next_one_is_asked_for() -> None:
    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.full((2,), float(i)) for i in range(4))

    batches = source(Loader(), seed=0, stream="train").epoch(0)
    seen = [weakref.ref(next(batches)), weakref.ref(next(batches)), weakref.ref(next(batches))]
    assert [each() for each in seen[:2]] == [None, None]


def test_a_part_of_a_batch_that_ends_an_iteration_ends_no_epoch() -> None:
    def split(batch: Any, size: int) -> list[Any]:
        return [next(iter(()))]

    share = Share(0, 2, len, split)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(source([torch.zeros(4)] * 3, seed=0, stream="train", share=share).epoch(0))
