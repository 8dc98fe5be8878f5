"""What can be a dataloader, by names: samplers, streams, loaders, and what users put around them.

They have N samples. A sample is its index plus, below 1, what its loading drew from the global generators.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

N = 11  # so that two orders are equal once in 40 million
SIZE = 3
Make = Callable[[], Any]


def noise() -> float:
    """From 0 to 1, of every global generator."""
    return float(torch.rand(()) + random.random() + np.random.rand() + abs(np.random.randn())) % 1


def noisy_collate(samples: list[Any]) -> Any:
    return [data.default_collate(samples), torch.tensor(noise())]


def order_of(number: int, n: int = N) -> list[int]:
    """The order of a pass: a permutation that is another one in each of many passes."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(number)).tolist()


class Items(data.Dataset[Any]):
    """Each sample is noisy, and each loading is counted."""

    def __init__(self, n: int = N, broken: int | None = None) -> None:
        self.n, self.broken, self.loads = n, broken, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        self.loads += 1
        drawn = noise()
        if index == self.broken:
            raise LookupError(f"sample {index}")
        return torch.as_tensor(index, dtype=torch.float64) + drawn


class Together(Items):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def loader(dataset: Any = None, size: int | None = SIZE, **options: Any) -> DataLoader[Any]:
    """Of noisy samples, or of this dataset."""
    return DataLoader(Items() if dataset is None else dataset, **{"batch_size": size, **options})


def table(n: int = N) -> data.TensorDataset:
    return data.TensorDataset(torch.arange(float(n)))


# Samplers


class Order(data.Sampler[int]):
    n = N

    def __len__(self) -> int:
        return self.n


class Drawn(Order):
    """Draws its order from a generator of its own, or from a global one."""

    def __init__(self, draw: Callable[[Any], Any], generator: Any = None) -> None:
        self.draw, self.generator = draw, generator

    def __iter__(self) -> Iterator[int]:
        return map(int, self.draw(self.generator))


def lazily(_: None) -> Iterator[int]:
    left = list(range(N))
    while left:
        yield left.pop(random.choice([int(np.random.randint(len(left))), int(torch.randint(len(left), ()))]))


DRAWN: dict[str, Callable[[], data.Sampler[int]]] = {
    "lazy": lambda: Drawn(lazily),
    "global python": lambda: Drawn(lambda _: random.sample(range(N), N)),
    "global numpy": lambda: Drawn(lambda _: np.random.permutation(N)),
    "torch": lambda: Drawn(lambda held: torch.randperm(N, generator=held), torch.Generator().manual_seed(5)),
    "python": lambda: Drawn(lambda held: held.sample(range(N), N), random.Random(5)),
    "numpy": lambda: Drawn(lambda held: held.permutation(N), np.random.default_rng(5)),
    "legacy numpy": lambda: Drawn(lambda held: held.permutation(N), np.random.RandomState(5)),
}


@dataclass
class Progress:
    passes: int = 0


@attrs.define
class Slotted:
    passes: int = 0


def _count(record: Any) -> int:
    record.passes += 1
    return int(record.passes) - 1


def _number(owner: Any) -> int:
    owner.held += 1
    return int(owner.held) - 1


def _seeding(owner: Any) -> int:
    """A generator that is seeded by the number of the pass, and then says it."""
    owner.held[0] += 1
    return int(torch.randint(2**31, (), generator=owner.held[1].manual_seed(owner.held[0])))


# What counts passes, and how it says the number of the pass that begins.
COUNTERS: dict[str, tuple[Make, Callable[[Any], int]]] = {
    "number": (int, _number),
    "growing list": (list, lambda owner: owner.held.append(0) or len(owner.held) - 1),
    "dict": (dict, lambda owner: owner.held.setdefault(len(owner.held), len(owner.held))),
    "ring": (lambda: deque(range(100)), lambda owner: owner.held.rotate(-1) or owner.held[-1]),
    "set": (set, lambda owner: owner.held.add(len(owner.held)) or len(owner.held) - 1),
    "tensor": (lambda: torch.tensor(-1), lambda owner: int(owner.held.add_(1))),
    "array": (lambda: np.full(3, -1), lambda owner: int(np.add(owner.held, 1, out=owner.held)[0])),
    "ticks": (itertools.count, lambda owner: next(owner.held)),
    "steps": (lambda: itertools.count(0, 5), lambda owner: next(owner.held) // 5),
    "space": (lambda: SimpleNamespace(passes=0), lambda owner: _count(owner.held)),
    "record": (Progress, lambda owner: _count(owner.held)),
    "slotted": (Slotted, lambda owner: _count(owner.held)),
    "seeding": (lambda: [0, torch.Generator()], _seeding),
}


class Counted(Order):
    """A sampler that counts at the beginning of a pass, as no one sees who reads its code."""

    def __init__(self, kind: str = "number", n: int = N) -> None:
        self.n, self.kind, self.held = n, kind, COUNTERS[kind][0]()

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(COUNTERS[self.kind][1](self), self.n))


class AtTheEnd(Counted):
    def __iter__(self) -> Iterator[int]:
        yield from order_of(self.held)
        self.held += 1


class Itself(Order):
    """Its own iterator, which begins anew at each ``iter``."""

    def __init__(self) -> None:
        self.passes, self.left = 0, deque[int]()

    def __iter__(self) -> Iterator[int]:
        self.left = deque(order_of(self.passes))
        self.passes += 1
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.popleft()


class Slots:
    """No data.Sampler, and without a ``__dict__``."""

    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(order_of(self.passes))


class Shuffling(Order):
    """Rotates what it holds, in place."""

    def __init__(self) -> None:
        self.order, self.array, self.nested = list(range(N)), np.arange(N), {"deep": [list(range(N))]}

    def __iter__(self) -> Iterator[int]:
        deep = self.nested["deep"][0]
        for each in (self.order, deep):
            each.append(each.pop(0))
        self.array[:] = np.roll(self.array, 2)
        return iter([deep[self.order[int(i)]] for i in self.array])


class Knowing(Order):
    """Its order is that of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.epoch))


class KnowingAndCounting(Knowing):
    passes = 0  # an attribute of the class until the first pass

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(order_of(10 * self.epoch + self.passes))


class CountingBatches(BatchSampler):
    """Shifts its batches by one more in each pass."""

    passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        shift = self.passes % len(batches)
        self.passes += 1
        yield from batches[shift:] + batches[:shift]


class RandomBatches:
    """A batch sampler that is no data.Sampler, of batches of random sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        left = [int(i) for i in np.random.permutation(N)]
        while left:
            size = random.randint(1, 3)
            yield left[:size]
            left = left[size:]


# Streams and loaders of the user's own


class Stream(IterableDataset[Any]):
    """A stream that holds a sampler, or a loader; without one in order, a part in each worker."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        part = range(0 if info is None else info.id, N, 1 if info is None else info.num_workers)
        for each in part if self.inner is None else self.inner:
            yield torch.tensor(each + noise(), dtype=torch.float64) if isinstance(each, int) else each


class StreamWithEpochs(Stream):
    """A ``set_epoch`` that only notes the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class SizedStream(Stream):
    def __len__(self) -> int:
        return N


class CountingStream(IterableDataset[Any]):
    def __init__(self, kind: str = "number", n: int = N) -> None:
        self.n, self.kind, self.held = n, kind, COUNTERS[kind][0]()

    def __iter__(self) -> Iterator[Any]:
        yield from map(torch.tensor, order_of(COUNTERS[self.kind][1](self), self.n))


class CountingStreamAtTheEnd(CountingStream):
    def __iter__(self) -> Iterator[Any]:
        yield from map(torch.tensor, order_of(self.held))
        self.held += 1


class OfGenerator(IterableDataset[Any]):
    """A stream that draws from a generator of its own, in a container or not, and shuffles a list in place."""

    def __init__(self, inside: Callable[[Any], Any], find: Callable[[Any], Any]) -> None:
        self.held, self.find, self.files = inside(torch.Generator().manual_seed(7)), find, list(range(N))

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(N, generator=self.find(self.held)).tolist()
        self.files.append(self.files.pop(order[0]))
        yield from [torch.tensor(float(self.files[index])) for index in order]


class BySampler:
    """A loader of the user's own, which puts samples together by itself."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.rows = sampler, torch.arange(float(N))

    def __len__(self) -> int:
        return -(-N // SIZE)

    def __iter__(self) -> Iterator[Any]:
        for indices in BatchSampler(self.sampler, SIZE, drop_last=False):
            yield self.rows[indices] + noise()


class Made:
    """A sequence by the old protocol: its batches are made when asked for."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, position: int) -> Any:
        return torch.tensor(range(N)[position] + noise(), dtype=torch.float64)


class CountingLoader(DataLoader[Any]):
    """A DataLoader that counts itself, and draws."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        for batch in super().__iter__():
            yield batch, self.passes, torch.rand(2)


# Epoch k is pass k of what counts its passes, by hand and by a source.
COUNTING: dict[str, Make] = {
    **{kind: lambda kind=kind: loader(sampler=Counted(kind)) for kind in COUNTERS},  # type: ignore[misc]
    # arrays of datasets may be large: they are shared
    **{f"stream, {kind}": lambda kind=kind: loader(CountingStream(kind)) for kind in COUNTERS.keys() - {"array"}},  # type: ignore[misc]
    "at the end": lambda: loader(batch_sampler=BatchSampler(AtTheEnd(), SIZE, drop_last=False), size=1),
    "its own iterator": lambda: loader(size=None, sampler=Itself()),
    "slots": lambda: loader(sampler=Slots()),
    "in place": lambda: loader(sampler=Shuffling()),
    "set_epoch and a counter": lambda: loader(sampler=KnowingAndCounting()),
    "batch sampler": lambda: loader(batch_sampler=CountingBatches(Counted(), SIZE, drop_last=False), size=1),
    "drop last": lambda: loader(sampler=Counted("dict"), drop_last=True),
    "stream that counts at its end": CountingStreamAtTheEnd,
    "own loader, counting sampler": lambda: BySampler(Counted("ring")),
    "counting loader": lambda: CountingLoader(Items(), SIZE, sampler=Counted()),
    "own iterator": Itself,
    "generator of a stream": lambda: loader(OfGenerator(lambda each: each, lambda held: held)),
    "generator in a tuple": lambda: OfGenerator(lambda each: (1, [each]), lambda held: held[1][0]),
}
LOADERS: dict[str, Make] = {
    "shuffle": lambda: loader(shuffle=True),
    "in order": loader,
    "shuffle, drop last": lambda: loader(shuffle=True, drop_last=True),
    "shuffle, own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "samples": lambda: loader(size=None, shuffle=True),
    "weighted": lambda: loader(sampler=data.WeightedRandomSampler([1.0] * N, N, replacement=False)),
    "subset random": lambda: loader(sampler=data.SubsetRandomSampler(range(0, N, 2))),
    "list of indices": lambda: loader(sampler=[*range(N), 0]),
    "getitems": lambda: loader(Together(), shuffle=True),
    "collate": lambda: loader(shuffle=True, collate_fn=noisy_collate),
    "batches of torch's": lambda: loader(batch_sampler=BatchSampler(RandomSampler(range(N)), SIZE, False), size=1),
    "batches by index": lambda: loader(size=None, sampler=BatchSampler(Drawn(lazily), SIZE, False)),
    "random batches": lambda: loader(batch_sampler=RandomBatches(), size=1),
    "table": lambda: loader(table(), shuffle=True),
    "table, collate": lambda: loader(table(), shuffle=True, collate_fn=noisy_collate),
    "tables": lambda: loader(data.ConcatDataset([table(4), data.Subset(table(), range(4, N))]), shuffle=True),
    "numbers": lambda: loader(range(N), sampler=Drawn(lazily)),
    **{f"sampler, {kind}": lambda make=make: loader(sampler=make()) for kind, make in DRAWN.items()},  # type: ignore[misc]
    "sampler with epochs": lambda: loader(sampler=Knowing()),
    "a list": lambda: list(torch.arange(float(N)).split(SIZE)),
    "made": Made,
    "own loader, random sampler": lambda: BySampler(RandomSampler(range(N))),
    "own loader, own sampler": lambda: BySampler(DRAWN["numpy"]()),
    "stream": lambda: loader(Stream()),
    "sized stream": lambda: loader(SizedStream(), drop_last=True),
    "stream, random sampler": lambda: loader(Stream(RandomSampler(range(N)))),
    "bare stream, random sampler": lambda: Stream(RandomSampler(range(N))),
    "stream with epochs": lambda: loader(StreamWithEpochs(RandomSampler(range(N)))),
    "bare stream with epochs": lambda: StreamWithEpochs(DRAWN["torch"]()),
    "bare stream with epochs, counting": lambda: StreamWithEpochs(CountingStream()),
    # Each sample is noisy.
    "bare stream with epochs, counting in a sampler": lambda: StreamWithEpochs(Counted()),
    "stream with epochs, counting in a sampler": lambda: loader(StreamWithEpochs(Counted()), size=None),
}


# What is put around them


class Wrapper:
    """The loader in something, found by a path."""

    def __init__(self, held: Any, find: Callable[[Any], Any] = lambda held: held) -> None:
        self.held, self.find = held, find

    def __iter__(self) -> Iterator[Any]:
        yield from self.find(self.held)


class Sized(Wrapper):
    def __len__(self) -> int:
        return len(self.held)


class Direct(Wrapper):
    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)


class Epochs(Wrapper):
    """Notes the epoch, and tells no other."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Forwarding(Wrapper):
    def set_epoch(self, epoch: int) -> None:
        for part in (self.held, getattr(self.held, "sampler", None), getattr(self.held, "dataset", None)):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)


class Counting(Epochs):
    """Leaves something behind in each pass that is not its order."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self.held


class Iterating(Wrapper):
    def __iter__(self) -> Iterator[Any]:
        self.batches = iter(self.held)
        return self

    def __next__(self) -> Any:
        return next(self.batches)


class Factory:
    """Each pass is over what a function gives."""

    def __init__(self, make: Make) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


@attrs.define
class Record:
    loader: Any

    def make(self) -> Any:
        return self.loader


Pair = namedtuple("Pair", ["name", "loader"])
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "wrapper": Wrapper,
    "with a length": lambda held: Sized(held) if hasattr(held, "__len__") else Wrapper(held),
    "iter": Direct,
    "set_epoch": Epochs,
    "set_epoch, forwarding": Forwarding,
    "set_epoch, counting": Counting,
    "its own iterator": Iterating,
    "list": lambda each: Wrapper([each], lambda held: held[0]),
    "tuple": lambda each: Wrapper((1, each), lambda held: held[1]),
    "named tuple": lambda each: Wrapper([Pair("a", each)], lambda held: held[0].loader),
    "nested": lambda each: Wrapper({"a": [("b", {"c": each})]}, lambda held: held["a"][0][1]["c"]),
    "namespace": lambda each: Wrapper(SimpleNamespace(a=each), lambda held: held.a),
    "record": lambda each: Wrapper(Record(each), lambda held: held.loader),
    "plain object": lambda each: Wrapper(SimpleNamespace(make=lambda: each), lambda held: held.make()),
    "bare stream": Stream,
    "stream": lambda each: DataLoader(Stream(each), batch_size=None),
    "lambda": lambda each: Factory(lambda: iter(each)),
    "partial": lambda each: Factory(functools.partial(lambda held: (batch for batch in held), each)),
    "method": lambda each: Factory(Record(each).make),
}


def surrounded(make: Make, around: list[str]) -> Any:
    """A new loader in wrappers of these names, the first one the inmost."""
    return functools.reduce(lambda held, kind: WRAPPERS[kind](held), around, make())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def snapshot() -> list[Any]:
    """Where the global generators stand."""
    name, key, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), name, key.tolist(), rest]


def scramble(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    np.random.randn()
