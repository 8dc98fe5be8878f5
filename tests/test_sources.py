"""Where batches come from: the same ones for the same epoch and position, whatever happens around them."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import random
import threading
import time
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
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from pure_loop._loaders import _Reseeding
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.sources import Source, source

# A busy machine is slow now and then; how many examples are tried is the profile's to say.
LAW = settings(deadline=None)


def noise() -> list[float]:
    """Something of every global generator."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand()), float(np.random.randn())]


class Augmented(Dataset[Any]):
    """Each sample is noisy, and each loading is counted."""

    def __init__(self, n: int, broken: int | None = None) -> None:
        self.n, self.broken, self.loads = n, broken, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        if index == self.broken:
            noise()
            raise LookupError(f"sample {index}")
        self.loads += 1
        return torch.tensor([float(np.sum(index)), *noise()], dtype=torch.float64), f"name {index}"


class Together(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Custom(Sampler[int]):
    """Draws its order from a global generator, or from one of its own, or shuffles what it holds."""

    def __init__(self, n: int, kind: str) -> None:
        self.kind = kind
        self.held = list(range(n))
        self.array = np.arange(n)
        self.torch = torch.Generator().manual_seed(1)
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(1)
        self.nested = {"deep": [list(range(n))]}
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.held)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        n = len(self.held)
        if self.kind == "lazy":
            for _ in range(n):
                yield random.choice([int(np.random.randint(n)), int(torch.randint(n, ()))])
        elif self.kind == "in place":
            random.shuffle(self.held)
            np.random.shuffle(self.array)
            random.shuffle(self.nested["deep"][0])
            yield from [
                (a + int(b) + c) % n for a, b, c in zip(self.held, self.array, self.nested["deep"][0], strict=True)
            ]
        elif self.kind == "own":
            a = torch.randperm(n, generator=self.torch).tolist()
            b, c = self.numpy.permutation(n), self.legacy.permutation(n)
            yield from [(a[i] + int(b[i]) + int(c[i]) + self.python.randrange(n)) % n for i in range(n)]
        else:
            yield from torch.randperm(n, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Eager:
    """Draws when it is asked for an iterator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter([int(i) for i in np.random.permutation(self.n)])


class CustomBatches:
    """A batch sampler that is no Sampler, of batches of random sizes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        left = list(np.random.permutation(self.n))
        while left:
            k = random.randint(1, 3)
            yield [int(i) for i in left[:k]]
            left = left[k:]


class Stream(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(self.n) if info is None else range(info.id, self.n, info.num_workers):
            yield torch.tensor([float(i), float(self.epoch), *noise()], dtype=torch.float64)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class Again:
    """An iterable of batches that is no DataLoader."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.n):
            yield torch.tensor([float(i), *noise()])


class Made:
    """A sequence by the old protocol: its batches are made when asked for."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> Any:
        return torch.tensor([float(position), *noise()])


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch, torch.rand(2)


def noisy_collate(samples: list[Any]) -> Any:
    return [default_collate(samples), torch.tensor(noise())]


def table(n: int) -> TensorDataset:
    image = torch.arange(n * 12.0).reshape(n, 3, 2, 2).to(memory_format=torch.channels_last)
    return TensorDataset(image, torch.arange(n))


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
ONE_SHOT: Make = lambda n, b: iter(Again(n))  # noqa: E731

kinds = st.sampled_from(sorted(KINDS))
seeds = st.integers(0, 2**32 - 1)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def snapshot() -> list[Any]:
    name, key, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), name, key.tolist(), rest]


def scramble(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    np.random.randn()


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


@LAW
@given(kinds, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), seeds, seeds)
def test_determinism(kind: str, n: int, size: int, epoch: int, one: int, other: int) -> None:
    runs = []
    for start in (one, other):
        scramble(start)
        batches = []
        for batch in source(KINDS[kind](n, size), seed=0, stream="train").epoch(epoch):
            batches.append(batch)
            random.random(), np.random.rand(), torch.rand(1)  # what the training loop does meanwhile
        runs.append(batches)
    assert len(runs[0]) > 0
    assert same(*runs)


@LAW
@given(kinds | st.none(), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), seeds, st.integers(0, 9))
def test_the_global_state_is_left_as_it_was(
    kind: str | None, n: int, size: int, epoch: int, scrambled: int, stop: int
) -> None:
    loader = (KINDS[kind] if kind else ONE_SHOT)(n, size)
    scramble(scrambled)
    before = snapshot()
    data = source(loader, seed=0, stream="train")
    batches = data.epoch(epoch)
    assert data.length is None or data.length > 0
    for position, _ in enumerate(batches):
        assert snapshot() == before
        if position == stop:
            batches.close()
    assert snapshot() == before


def order(kind: str, n: int) -> list[int]:
    return [
        int(i) for i in source(DataLoader(range(n), None, sampler=Custom(n, kind)), seed=0, stream="train").epoch(0)
    ]  # type: ignore[arg-type]


@LAW
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


@LAW
@given(
    kinds, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), st.integers(0, 10), st.none() | st.integers(1, 6)
)
def test_skipping(kind: str, n: int, size: int, epoch: int, start: int, limit: int | None) -> None:
    loader = KINDS[kind](n, size)
    data = source(loader, seed=3, stream="train", batches_per_epoch=limit)
    whole = list(data.epoch(epoch))
    unsized = kind in ("custom batches", "stream", "stream without batches", "bare stream", "again")
    assert data.length == (limit if unsized else len(whole))
    assert limit is None or 0 < len(whole) <= limit
    assert same(list(source(loader, seed=3, stream="train").epoch(epoch))[: len(whole)], whole)
    if kind in BY_INDEX:
        loader.dataset.loads = 0
    assert same(list(data.epoch(epoch, start=start)), whole[start:])
    if kind in BY_INDEX:
        names = [name for batch in whole[start:] for name in _names(batch)]
        assert loader.dataset.loads == len(names)


def _names(batch: Any) -> list[str]:
    if isinstance(batch, str):
        return [batch]
    return [] if isinstance(batch, torch.Tensor) else [name for each in batch for name in _names(each)]


def test_long_orders_are_skipped_across_blocks() -> None:
    loader = DataLoader(Augmented(200), batch_size=1, sampler=Custom(200, "lazy"))
    data = source(loader, seed=0, stream="train")
    whole = list(data.epoch(0))
    assert len(whole) == 200
    assert _names(whole[:64]) != _names(whole[64:128])
    for start in (1, 63, 64, 65, 128, 199):
        assert same(list(data.epoch(0, start=start)), whole[start:])


@pytest.mark.parametrize("kind", [k for k in sorted(KINDS) if k not in ("list", "tuple", "list of indices")])
def test_epochs_and_streams_and_seeds_differ(kind: str) -> None:
    loader = KINDS[kind](40, 3)
    runs = [
        list(source(loader, seed=seed, stream=stream).epoch(epoch))
        for seed, stream, epoch in [(0, "train", 0), (0, "train", 1), (0, "val", 0), (1, "train", 0)]
    ]
    assert not any(same(a, b) for i, a in enumerate(runs) for b in runs[:i])
    batches = [batch for run in runs for batch in run]
    assert len(batches) > 12
    if kind != "eager":  # whose batches are single indices, which come again
        assert not any(same(a, b) for i, a in enumerate(batches) for b in batches[:i])


def test_set_epoch_reaches_copies_of_samplers_and_streams() -> None:
    sampler, stream = Custom(20, "set_epoch"), Stream(2)
    for epoch in (0, 3):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(epoch)).tolist()
        drawn = source(DataLoader(range(20), batch_size=20, sampler=sampler), seed=0, stream="a").epoch(epoch)  # type: ignore[arg-type]
        assert next(drawn).tolist() == order
        for loader in (stream, DataLoader(stream, batch_size=None)):
            assert [x[1].item() for x in source(loader, seed=0, stream="a").epoch(epoch)] == [epoch, epoch]
    assert sampler.epoch == stream.epoch == 0


@LAW
@given(kinds, kinds, st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_sources_in_turn_give_what_each_gives_alone(one: str, other: str, n: int, size: int, shared: bool) -> None:
    loaders = [KINDS[one](n, size), KINDS[other](n, size)]
    if shared:
        loaders[1] = loaders[0]
    sources = [source(loader, seed=0, stream=stream) for loader, stream in zip(loaders, ("a", "b"), strict=True)]
    alone = [list(each.epoch(1)) for each in sources]
    running = [each.epoch(1) for each in sources] + [sources[0].epoch(1)]
    turns: list[list[Any]] = [[], [], []]
    for _ in range(200):
        for turn, batches in zip(turns, running, strict=True):
            turn.extend(batch for batch in [next(batches, None)] if batch is not None)
    assert same(turns, [*alone, alone[0]])


@LAW
@given(kinds, st.integers(1, 6), st.integers(1, 3), st.integers(0, 6))
def test_the_users_objects_are_left_as_they_were(kind: str, n: int, size: int, stop: int) -> None:
    loader = KINDS[kind](n, size)
    before = visible(loader)
    data = source(loader, seed=0, stream="train")
    _ = data.length
    list(data.epoch(1))
    batches = data.epoch(2)
    for _ in range(stop):
        next(batches, None)
    batches.close()
    data.close()
    assert visible(loader) == before


@LAW
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9), seeds)
def test_a_tables_rows_are_what_its_loader_gives(n: int, size: int, stop: int, seed: int) -> None:
    for dataset in (table(n), Subset(table(n), torch.arange(n))):  # type: ignore[arg-type]
        loader = DataLoader(dataset, batch_size=size, sampler=[*range(n), -1])  # type: ignore[arg-type, list-item]
        got, expected = list(source(loader, seed=seed, stream="train").epoch(stop)), list(loader)
        assert same(got, expected)
        for mine, theirs in zip(got, expected, strict=True):
            assert [x.stride() for x in mine] == [x.stride() for x in theirs]
            assert mine[0].untyped_storage().data_ptr() != table(n).tensors[0].untyped_storage().data_ptr()


# ---- iterators


def test_an_iterator_is_drawn_from_once() -> None:
    alone = list(source(iter(Again(7)), seed=0, stream="train").epoch(0))
    assert [int(batch[0]) for batch in alone] == list(range(7))
    data = source(iter(Again(7)), seed=0, stream="train", batches_per_epoch=3)
    epochs = [list(data.epoch(epoch, seen=3 * epoch)) for epoch in range(3)]
    assert [len(batches) for batches in epochs] == [3, 3, 1]
    assert same([batch for batches in epochs for batch in batches], alone)
    assert data.length == 3
    assert source(iter(Again(7)), seed=0, stream="train").length is None
    with pytest.raises(DataError, match="train dataloader gave no batch in epoch 3: its iterator is exhausted"):
        list(data.epoch(3, seen=7))


@LAW
@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 4))
def test_going_on_with_an_iterator_drops_what_was_seen(n: int, seen: int, limit: int) -> None:
    seen = min(seen, n - 1)
    alone = list(source(iter(Again(n)), seed=0, stream="train").epoch(0))
    data = source(iter(Again(n)), seed=0, stream="train", batches_per_epoch=limit)
    rest = list(data.epoch(seen // limit, start=seen % limit, seen=seen))
    assert same(rest, alone[seen : seen // limit * limit + limit])


def test_closing_an_epoch_leaves_the_iterator_open() -> None:
    data = source(iter(Again(5)), seed=0, stream="train", batches_per_epoch=2)
    batches = data.epoch(0)
    next(batches)
    batches.close()
    assert [int(batch[0]) for batch in data.epoch(0, start=1, seen=1)] == [1]
    with pytest.raises(DataError, match="already given 2 batches and can't go back to batch 1"):
        next(data.epoch(0, start=1, seen=1))
    with pytest.raises(DataError, match="gave 5 batches, but 9 were seen"):
        next(data.epoch(4, start=1, seen=9))


# ---- what is refused, and lengths


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (None, "NoneType is no dataloader"),
        (3, "int is no dataloader"),
        (lambda: iter([]), "call a generator function"),
        (torch.zeros(3, 2), "Tensor is no dataloader.*TensorDataset"),
        (np.zeros(3), "ndarray is no dataloader"),
        ("text", "str is no dataloader"),
        ({"a": 1}, "dict is no dataloader"),
        ({1, 2}, "set is no dataloader"),
        (table(3), r"TensorDataset is a dataset.*DataLoader\(dataset, batch_size=\.\.\.\)"),
    ],
)
def test_what_is_no_dataloader_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        source(loader, seed=0, stream="train")


@pytest.mark.parametrize("limit", [0, -1, 2.0, True])
def test_batches_per_epoch_is_checked(limit: Any) -> None:
    with pytest.raises(ArgumentError, match=f"batches_per_epoch={limit}"):
        source([1], seed=0, stream="train", batches_per_epoch=limit)


@pytest.mark.parametrize(
    "loader", [[], DataLoader(Augmented(2), batch_size=3, drop_last=True), DataLoader(Stream(0)), Again(0), iter([])]
)
def test_an_empty_epoch_is_an_error_unless_it_was_begun(loader: Any) -> None:
    with pytest.raises(DataError, match="the val dataloader gave no batch in epoch 2"):
        list(source(loader, seed=0, stream="val").epoch(2))
    assert list(source(loader, seed=0, stream="val").epoch(2, start=1)) == []


def test_lengths() -> None:
    def length(loader: Any, limit: int | None = None) -> int | None:
        return source(loader, seed=0, stream="train", batches_per_epoch=limit).length

    assert length([1, 2, 3]) == length(DataLoader(Augmented(5), batch_size=2)) == length(Made(3)) == 3
    assert length([1, 2, 3], 2) == length([1, 2], 5) == 2
    assert length(DataLoader(Augmented(5), batch_size=2, drop_last=True)) == 2
    assert length(DataLoader(Augmented(5), batch_sampler=CustomBatches(5))) is None
    assert length(DataLoader(Stream(5))) is length(Again(3)) is length(iter([1])) is None
    assert length(DataLoader(Stream(5)), 2) == length(Again(3), 2) == length(iter([1]), 2) == 2
    sized = DataLoader(SizedStream(5), batch_size=2)
    assert length(sized) == 3
    assert sized._IterableDataset_len_called is None  # type: ignore[attr-defined]


def test_an_endless_sampler_is_cut() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield random.randrange(9)

    loader = DataLoader(Augmented(9), batch_size=2, sampler=Endless())
    data = source(loader, seed=0, stream="train", batches_per_epoch=100)
    assert len(list(data.epoch(0, start=90))) == 10
    assert loader.dataset.loads == 20  # type: ignore[attr-defined]


# ---- workers


def alive() -> tuple[int, int]:
    """Worker processes and threads, once those that were told to end had the time to."""
    gc.collect()
    for _ in range(100):
        if not multiprocessing.active_children() and threading.active_count() <= THREADS:
            break
        time.sleep(0.02)
    return len(multiprocessing.active_children()), threading.active_count() - THREADS


THREADS = threading.active_count()


def with_workers(make: Callable[..., Any], **options: Any) -> Source:
    return source(make(num_workers=2, **options), seed=0, stream="train")


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: DataLoader(Augmented(11), batch_size=2, sampler=Custom(11, "lazy"), collate_fn=noisy_collate, **k),
        lambda **k: DataLoader(Together(7), batch_size=2, shuffle=True, in_order=not k, **k),
        lambda **k: DataLoader(Augmented(5), batch_size=None, shuffle=True, **k),
        lambda **k: DataLoader(table(7), batch_size=2, shuffle=True, **k),
    ],
)
def test_workers_give_what_one_process_gives(make: Callable[..., Any]) -> None:
    before = snapshot()
    whole = list(source(make(), seed=0, stream="train").epoch(1))
    data = with_workers(make)
    assert same(list(data.epoch(1)), whole)
    assert same(list(data.epoch(1, start=2)), whole[2:])
    assert snapshot() == before


class Counted(Dataset[Any]):
    """Counts its loadings in whatever process."""

    def __init__(self) -> None:
        self.loads = multiprocessing.Value("i")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        with self.loads.get_lock():
            self.loads.value += 1
        return index


def test_workers_load_nothing_in_vain() -> None:
    dataset = Counted()
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=2)
    assert len(list(source(loader, seed=0, stream="train", batches_per_epoch=5).epoch(0, start=3))) == 2
    assert dataset.loads.value == 4


def test_workers_of_a_stream() -> None:
    data = with_workers(lambda **k: DataLoader(Stream(9), batch_size=2, **k))
    scramble(1)
    before = snapshot()
    whole = list(data.epoch(1))
    assert snapshot() == before
    scramble(2)
    assert sorted(row[0].item() for batch in whole for row in batch) == list(range(9))
    assert same(list(data.epoch(1, start=2)), whole[2:])
    assert not same(list(data.epoch(0)), whole)


@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_the_workers(persistent: bool) -> None:
    assert alive() == (0, 0)
    loader = DataLoader(Augmented(40), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent)
    whole = [list(source(DataLoader(Augmented(40), 2, shuffle=True), seed=0, stream="train").epoch(e)) for e in (0, 1)]
    data = source(loader, seed=0, stream="train")
    batches = data.epoch(0)
    assert same(next(batches), whole[0][0])
    workers = {child.pid for child in multiprocessing.active_children()}
    assert len(workers) == 2
    if persistent:
        other = data.epoch(1)  # another epoch at the same time gets workers of its own
        assert same(next(other), whole[1][0])
        assert same(next(batches), whole[0][1])
        other.close()
    batches.close()
    assert {child.pid for child in multiprocessing.active_children()} == (workers if persistent else set())
    assert same(list(data.epoch(1, start=3)), whole[1][3:])
    assert {child.pid for child in multiprocessing.active_children()} == (workers if persistent else set())
    data.close()
    assert loader._iterator is None
    assert alive() == (0, 0)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_ends_the_workers(persistent: bool) -> None:
    loader = DataLoader(Augmented(9, broken=5), batch_size=2, num_workers=1, persistent_workers=persistent)
    data = source(loader, seed=0, stream="train")
    with pytest.raises(LookupError, match="sample 5") as caught:
        list(data.epoch(0))
    assert alive() == (0, 0)
    del caught


class Seen(Dataset[Any]):
    """Shows what a worker's own code sees."""

    factor = 1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        return index * self.factor, info.dataset is self, type(info.dataset).__name__


def configure(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.factor = 10 + worker


def test_worker_info_shows_the_users_dataset() -> None:
    loader = DataLoader(Seen(), batch_size=2, num_workers=1, worker_init_fn=configure)
    batches = list(source(loader, seed=0, stream="train").epoch(0))
    assert [batch[0].tolist() for batch in batches] == [[0, 10], [20, 30]]
    assert [batch[1].all().item() for batch in batches] == [True, True]
    assert [batch[2] for batch in batches] == [("Seen", "Seen")] * 2
    assert Seen.factor == 1


def test_what_spawned_workers_get_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(_Reseeding(Augmented(4))))
    before = snapshot()
    try:
        assert same(again.__getitems__((7, [1, 2])), _Reseeding(Together(4)).__getitems__((7, [1, 2])))
    finally:
        torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
