"""Over everything that can be a dataloader: epochs differ, seeds differ, resumption equals, and each sample comes.

What is right is asked of a loop by hand over a new object: whether two of its epochs differ, whether it depends on the
global generators, and which samples an epoch has.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import pure_loop as pl
from pure_loop import Event
from pure_loop.data.copies import Private
from pure_loop.data.dataloaders import source
from tests.support.loaders import same
from tests.support.passes import (
    COUNTERS,
    Countdown,
    Counted,
    CountingBatches,
    CountingLoader,
    CountingStream,
    CountingStreamAtTheEnd,
    Items,
    order_of,
)
from tests.support.tiers import examples

N = 11  # samples, so that two orders are equal once in 40 million
SIZE = 3


def table() -> TensorDataset:
    return TensorDataset(torch.arange(float(N)))


class Mine(Sampler[int]):
    """Draws from one generator: a global one or its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.torch = torch.Generator().manual_seed(5)
        self.python = random.Random(5)
        self.numpy = np.random.default_rng(5)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        if self.kind == "torch":
            return iter(torch.randperm(N, generator=self.torch).tolist())
        if self.kind == "python":
            return iter(self.python.sample(range(N), N))
        if self.kind == "numpy":
            return iter(self.numpy.permutation(N).tolist())
        if self.kind == "global numpy":
            return iter(np.random.permutation(N).tolist())
        return iter(random.sample(range(N), N))


class Knowing(Sampler[int]):
    """Its order is that of the epoch."""

    epoch = 0

    def __len__(self) -> int:
        return N

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(N, self.epoch))


class OfSampler(IterableDataset[Any]):
    """A stream that holds a sampler."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor(float(index)) for index in self.sampler)


class OfSamplerWithEpochs(OfSampler):
    """A ``set_epoch`` that only notes the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class OfGenerator(IterableDataset[Any]):
    """A stream that draws from a generator of its own, in a container or not."""

    def __init__(
        self, inside: Callable[[Any], Any] = lambda generator: generator, find: Any = lambda held: held
    ) -> None:
        self.held, self.find = inside(torch.Generator().manual_seed(7)), find

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(N, generator=self.find(self.held)).tolist()
        yield from (torch.tensor(float(index)) for index in order)


class OfGeneratorWithEpochs(OfGenerator):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class BySampler:
    """A loader of the user's own, which puts samples together by itself."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.rows = sampler, torch.arange(float(N))

    def __len__(self) -> int:
        return -(-N // SIZE)

    def __iter__(self) -> Iterator[Any]:
        indices = list(self.sampler)
        for start in range(0, len(indices), SIZE):
            yield self.rows[indices[start : start + SIZE]]


def shuffled(**options: Any) -> Any:
    return DataLoader(table(), batch_size=SIZE, shuffle=True, **options)


def of_sampler(sampler: Any, **options: Any) -> Any:
    return DataLoader(table(), batch_size=SIZE, sampler=sampler, **options)


class OwnLoader:
    """A loader of the user's own, around a stream or a DataLoader."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.passes = inner, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for item in self.inner:
            yield item, self.passes


class OwnIterator:
    """A loader that is its own iterator, and begins anew at each ``iter``."""

    def __init__(self, n: int) -> None:
        self.n, self.passes, self.left = n, -1, 0

    def __iter__(self) -> OwnIterator:
        self.passes += 1
        self.left = self.n
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.tensor(order_of(self.n, self.passes)[self.left])


class OwnGenerators(IterableDataset[Any]):
    """Draws from a generator of its own, and shuffles a list in place."""

    def __init__(self, n: int) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.files = list(range(n))

    def __iter__(self) -> Iterator[Any]:
        self.files.append(self.files.pop(int(torch.randint(len(self.files), (), generator=self.generator))))
        yield from [torch.tensor(file) for file in self.files]


# Epoch k is pass k of what counts its passes, by hand and by a source.
COUNTING: dict[str, Callable[[], Any]] = {
    # torch's batch sampler would begin what is its own iterator anew for each batch
    **{
        kind: (lambda make=make: of_sampler(make(N)))  # type: ignore[misc]
        for kind, make in Countdown.items()
        if kind != "itself"
    },
    # arrays of datasets may be large: they are shared
    **{
        f"stream, {kind}": (lambda kind=kind: DataLoader(CountingStream(N, kind), SIZE))  # type: ignore[misc]
        for kind in COUNTERS
        if kind != "array"
    },
    "itself": lambda: DataLoader(Items(N), batch_size=None, sampler=Countdown["itself"](N)),
    "batch sampler": lambda: DataLoader(Items(N), batch_sampler=CountingBatches(Counted(N, "number"), SIZE)),
    "torch's batch sampler": lambda: DataLoader(
        Items(N), batch_sampler=BatchSampler(Countdown["at the end"](N), SIZE, drop_last=False)
    ),
    "drop last": lambda: of_sampler(Counted(N, "list"), drop_last=True),
    "stream that counts at its end": lambda: CountingStreamAtTheEnd(N, "number"),
    "stream with its own generator": lambda: DataLoader(OwnGenerators(N), batch_size=SIZE),
    "own loader, counting sampler": lambda: BySampler(Counted(N, "list")),
    "own loader of a stream": lambda: OwnLoader(CountingStream(N, "list")),
    "own loader of a counting loader": lambda: OwnLoader(CountingLoader(Items(N), SIZE, sampler=Counted(N, "number"))),
    "own iterator": lambda: OwnIterator(N),
}
CORES: dict[str, Callable[[], Any]] = {
    "shuffle": shuffled,
    "in order": lambda: DataLoader(table(), batch_size=SIZE),
    "a list": lambda: list(torch.arange(float(N)).split(SIZE)),
    "shuffle, drop last": lambda: shuffled(drop_last=True),
    "shuffle, own generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: of_sampler(WeightedRandomSampler([1.0] * N, N, replacement=False)),
    "own sampler, global": lambda: of_sampler(Mine("global")),
    "own sampler, global numpy": lambda: of_sampler(Mine("global numpy")),
    "sampler with epochs": lambda: of_sampler(Knowing()),
    "distributed sampler": lambda: of_sampler(DistributedSampler(table(), 1, 0)),
    "batch sampler": lambda: DataLoader(table(), batch_sampler=BatchSampler(RandomSampler(range(N)), SIZE, False)),
    "samples": lambda: DataLoader(table(), batch_size=None, shuffle=True),
    "own loader, random sampler": lambda: BySampler(RandomSampler(range(N))),
    "own loader, own sampler": lambda: BySampler(Mine("numpy")),
    "stream, random sampler": lambda: DataLoader(OfSampler(RandomSampler(range(N))), batch_size=SIZE),
    "bare stream, random sampler": lambda: OfSampler(RandomSampler(range(N))),
    "stream with epochs": lambda: DataLoader(OfSamplerWithEpochs(RandomSampler(range(N))), batch_size=SIZE),
    "bare stream with epochs": lambda: OfSamplerWithEpochs(Mine("torch")),
    "bare stream with epochs, counting": lambda: OfSamplerWithEpochs(Counted(N, "number")),
    "stream, own generator": lambda: DataLoader(OfGenerator(), batch_size=SIZE),
    "stream with epochs, own generator": lambda: DataLoader(OfGeneratorWithEpochs(), batch_size=SIZE),
    "stream, a generator in a tuple": lambda: OfGenerator(lambda each: (1, [each]), lambda held: held[1][0]),
    "stream, a generator in a mapping": lambda: OfGenerator(
        lambda each: {"a": {"b": each}}, lambda held: held["a"]["b"]
    ),
}


class Wrapper:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Sized(Wrapper):
    def __len__(self) -> int:
        return len(self.loader)


class Direct(Wrapper):
    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class Epochs(Wrapper):
    """Notes the epoch, and tells no other."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Forwarding(Wrapper):
    def set_epoch(self, epoch: int) -> None:
        for part in (self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)


class Counting(Epochs):
    """Leaves something behind in each pass that is not its order."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self.loader


class Iterating(Wrapper):
    """Its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        self.batches = iter(self.loader)
        return self

    def __next__(self) -> Any:
        return next(self.batches)


class Listed(Wrapper):
    def __init__(self, loader: Any) -> None:
        self.loaders = [loader]

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.loaders)


class Held(Wrapper):
    """The loader in something, found by a path."""

    def __init__(self, held: Any, find: Callable[[Any], Any]) -> None:
        self.held, self.find = held, find

    def __iter__(self) -> Iterator[Any]:
        yield from self.find(self.held)


class Stream(IterableDataset[Any]):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Made:
    """A factory, called for each pass."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


class Factory:
    """No iterable, and has a method that gives one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def make(self) -> Any:
        return self.loader


def generated(loader: Any) -> Iterator[Any]:
    yield from loader


@attrs.define
class Record:
    loader: Any


Pair = namedtuple("Pair", ["name", "loader"])

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "wrapper": Wrapper,
    "with a length": lambda loader: Sized(loader) if hasattr(loader, "__len__") else Wrapper(loader),
    "iter": Direct,
    "set_epoch": Epochs,
    "set_epoch, forwarding": Forwarding,
    "set_epoch, counting": Counting,
    "its own iterator": Iterating,
    "list": Listed,
    "tuple": lambda loader: Held((1, loader), lambda held: held[1]),
    "named tuple": lambda loader: Held([Pair("a", loader)], lambda held: held[0].loader),
    "nested": lambda loader: Held({"a": [("b", {"c": loader})]}, lambda held: held["a"][0][1]["c"]),
    "namespace": lambda loader: Held(SimpleNamespace(a=loader), lambda held: held.a),
    "record": lambda loader: Held(Record(loader), lambda held: held.loader),
    "plain object": lambda loader: Held(Factory(loader), lambda held: held.make()),
    "bare stream": Stream,
    "stream": lambda loader: DataLoader(Stream(loader), batch_size=None),
    "lambda": lambda loader: Made(lambda: iter(loader)),
    "partial": lambda loader: Made(functools.partial(generated, loader)),
    "method": lambda loader: Made(Factory(loader).make),
}


def samples(batches: list[Any]) -> list[float]:
    """The samples in their order, and other numbers that batches have."""
    return [value for leaf in tree_leaves(batches) for value in torch.as_tensor(leaf).double().reshape(-1).tolist()]


def by_hand(make: Callable[[], Any], seed: int, epochs: int = 3) -> list[list[float]]:
    """Passes over a new object, which is told the epoch where it has a ``set_epoch``, as are a loader's sampler and
    dataset."""
    loader = make()
    parts = [part for part in parts_of(loader) if callable(getattr(part, "set_epoch", None))]
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    result = []
    for epoch in range(epochs):
        for part in parts:
            part.set_epoch(epoch)
        result.append(samples(list(loader)))
    return result


def parts_of(loader: Any) -> list[Any]:
    """All that a user could tell the epoch: what is reachable by attributes."""
    found: list[Any] = []
    pending = [loader]
    while pending:
        value = pending.pop()
        if any(value is each for each in found) or isinstance(value, torch.Tensor | type):
            continue
        found.append(value)
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, functools.partial):
            pending += value.args
        elif callable(value):
            pending += [each.cell_contents for each in getattr(value, "__closure__", None) or ()]
            pending.append(getattr(value, "__self__", None))
        elif isinstance(value, Record):
            pending.append(value.loader)
        else:
            pending += getattr(value, "__dict__", {}).values()
    return found


def distinct(orders: list[list[float]]) -> bool:
    return all(one != other for one, other in itertools.combinations(orders, 2))


def all_equal(counts: list[Counter[float]]) -> bool:
    return all(one == counts[0] for one in counts)


def check(
    make: Callable[[], Any], limit: int | None = None, epochs: int = 3, *, everywhere: bool = True, counts: bool = False
) -> None:
    """The law. ``make`` gives an object that was never iterated over; ``everywhere``: resumed at each position."""
    hand, other_hand = by_hand(make, 0, epochs), by_hand(make, 1, epochs)

    def run(seed: int) -> list[list[Any]]:
        data = source(make(), seed=seed, stream="train", batches_per_epoch=limit)
        try:
            seen = 0
            result = []
            for epoch in range(epochs):
                result.append(list(data.epoch(epoch, 0, seen)))
                seen += len(result[-1])
            return result
        finally:
            data.close()

    batches = run(0)
    orders, others = [list(map(samples, each)) for each in (batches, run(1))]
    if counts and limit is None:
        assert orders == hand, "epoch k is not pass k"
    many = len(orders[0]) >= 6  # of fewer samples two orders may be equal
    if many and distinct(hand):
        assert distinct(orders), "one order for ever"
    if many and distinct([hand[0], other_hand[0]]):
        assert distinct([orders[0], others[0]]), "one order for every seed"
        assert distinct([orders[1], others[1]])
    if limit is None:
        wanted, got, other = [list(map(Counter, each)) for each in (hand, orders, other_hand)]
        if wanted == other and all_equal(wanted):
            assert got == wanted, "other samples than by hand"
        else:  # drop_last leaves out other ones in each epoch
            assert [sorted(each.values()) for each in got] == [sorted(each.values()) for each in wanted]
        # By hand set_epoch is not heard in workers that stay.
        if everywhere and hand == other_hand and not distinct(hand):
            assert orders == hand, "what is deterministic by itself is as by hand"
    assert same(run(0), batches), "another run with the same seed differs"
    sizes = list(itertools.accumulate(map(len, batches), initial=0))
    for epoch, wanted in enumerate(batches):
        for start in (0, 1, len(wanted) - 1) if everywhere else (1,):
            resumed = source(make(), seed=0, stream="train", batches_per_epoch=limit)
            try:
                assert same(list(resumed.epoch(epoch, start, sizes[epoch] + start)), wanted[start:]), (epoch, start)
                if epoch + 1 < epochs:
                    assert same(list(resumed.epoch(epoch + 1, 0, sizes[epoch + 1])), batches[epoch + 1]), epoch
            finally:
                resumed.close()


cores = st.sampled_from(sorted(CORES))
wrappers = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3)


def surrounded(loader: Any, around: list[str]) -> Any:
    return functools.reduce(lambda loader, kind: WRAPPERS[kind](loader), around, loader)


def wrapped(core: str, around: list[str]) -> Any:
    return surrounded((CORES | COUNTING)[core](), around)


@examples(50, 1500)
@given(cores, wrappers, st.none() | st.sampled_from([2, 3, 7]))
@example("shuffle", ["wrapper"], None)
@example("shuffle", ["wrapper"], 2)
@example("shuffle", ["set_epoch"], None)
@example("bare stream with epochs", [], None)
@example("own loader, random sampler", [], None)
def test_over_everything_that_can_be_a_dataloader(core: str, around: list[str], limit: int | None) -> None:
    """Two epochs differ and two seeds differ where they do by hand, resumption equals, no sample comes twice.

    DataLoaders, samplers with generators of their own or of the process, batch samplers, counters, streams in a
    DataLoader or bare, with ``set_epoch`` or without; in wrappers of wrappers, in containers and records, in functions.
    """
    length = source(wrapped(core, around), seed=0, stream="train").loader_length
    if limit is not None and length is not None:
        limit = min(limit, length)
    check(lambda: wrapped(core, around), limit)


IN_WORKERS: dict[str, Callable[..., Any]] = {
    "shuffle": shuffled,
    "own sampler": lambda **options: of_sampler(Mine("numpy"), **options),
    "stream, random sampler": lambda **options: DataLoader(OfSampler(RandomSampler(range(N))), SIZE, **options),
    "stream, own sampler": lambda **options: DataLoader(OfSampler(Mine("global")), SIZE, **options),
    "stream with epochs": lambda **options: DataLoader(OfSamplerWithEpochs(RandomSampler(range(N))), SIZE, **options),
    "stream of a sampler with epochs": lambda **options: DataLoader(OfSampler(Knowing()), SIZE, **options),
    "stream of a stream with epochs": lambda **options: DataLoader(
        Stream(OfSamplerWithEpochs(SubsetRandomSampler(range(N)))), SIZE, **options
    ),
    "counting stream": lambda **options: DataLoader(CountingStream(N, "number"), SIZE, **options),
    "stream that counts at its end": lambda **options: DataLoader(CountingStreamAtTheEnd(N, "number"), SIZE, **options),
}


@pytest.mark.slow  # processes
@pytest.mark.parametrize("persistent", [False, True])
def test_over_everything_in_workers(persistent: bool) -> None:
    """By itself and in a wrapper, with one worker or two."""
    options: dict[str, Any] = {"persistent_workers": persistent, "multiprocessing_context": "fork"}
    for number, (kind, make) in enumerate(IN_WORKERS.items()):
        workers = 1 if "counting" in kind or "counts" in kind else 1 + number % 2
        check(functools.partial(make, num_workers=workers, **options), epochs=2, everywhere=False)
    arounds: dict[str, list[str]] = {
        "shuffle": ["wrapper"],
        "stream, random sampler": ["set_epoch", "list"],
        "counting stream": ["lambda"],
    }
    for kind, around in arounds.items():
        inner = functools.partial(IN_WORKERS[kind], num_workers=1, **options)
        check(lambda: surrounded(inner(), around), epochs=2, everywhere=False)


def test_two_workers_have_two_orders() -> None:
    """As by hand: each worker's copy of a sampler draws by itself, so that the same samples don't come in pairs."""
    for loader in (
        DataLoader(OfSampler(RandomSampler(range(N))), None, num_workers=2, persistent_workers=True),
        DataLoader(OfSamplerWithEpochs(RandomSampler(range(N))), None, num_workers=2),
    ):
        data = source(loader, seed=0, stream="train")
        try:
            order = samples(list(data.epoch(0)))
        finally:
            data.close()
        assert sorted(order) == sorted([*map(float, range(N))] * 2)
        assert order[::2] != order[1::2]


@examples(40, 800)
@given(st.sampled_from(sorted(COUNTING)), wrappers, st.none() | st.sampled_from([2, 3]), st.integers(1, 4))
def test_epoch_k_is_pass_k(core: str, around: list[str], limit: int | None, epochs: int) -> None:
    """Counters of all kinds, at the beginning and at the end of a pass, in place, nested, seeding a generator.

    Samplers, batch samplers, torch's own around one, samplers of batches, subclasses of DataLoader, iterable datasets,
    loaders of the user's own; in wrappers; epochs cut.
    """
    length = source(wrapped(core, around), seed=0, stream="train").loader_length
    limit = None if limit is None or length is None else min(limit, length)
    check(lambda: wrapped(core, around), limit, epochs, counts=True)


def test_each_counter_counts() -> None:
    for core in COUNTING:
        check(COUNTING[core], epochs=2, everywhere=False, counts=True)


class LacksPass(Private):
    """The seed of a pass lacks its number."""

    def begin(self, seed: int, epoch: int) -> Any:
        return super().begin(0, epoch)


class LacksRun(Private):
    """The seed of a pass lacks that of the run."""

    def begin(self, seed: int, epoch: int) -> Any:
        return super().begin(epoch, epoch)


class LacksReplay(Private):
    """Passes are taken for independent of those before."""

    independent = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("wrong", "core", "message"),
    [
        (LacksPass, "shuffle", "one order for ever"),
        (LacksRun, "shuffle", "one order for every seed"),
        (LacksReplay, "number", r"\(1, 0\)"),
    ],
)
def test_a_wrong_source_breaks_the_law(
    wrong: type[Private], core: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pure_loop.data.source.Private", wrong)
    with pytest.raises(AssertionError, match=message):
        check(lambda: wrapped(core, ["wrapper"]))


def test_a_run_resumes_from_each_state_over_a_wrapper() -> None:
    around = ["set_epoch", "lambda"]

    def run(start: Any) -> list[Any]:
        loader = wrapped("shuffle", around)
        stream = pl.fit(start, loader, task=task, optimizer=pl.optim.sgd(lr=0.01), max_duration="2ep", seed=3)
        return [state for event, state in stream if event is Event.BATCH_END]

    task = pl.Task(
        forward=lambda model, batch: model(batch[0][:, None]), loss=lambda outputs, batch: outputs.square().mean()
    )
    torch.manual_seed(0)
    states = run(torch.nn.Linear(1, 1))
    orders = [samples([state.batch for state in states[i : i + 4]]) for i in (0, 4)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(N))
    assert orders[0] != orders[1]
    for number, state in enumerate(states[:-1]):
        rest = run(state)
        assert same([each.batch for each in rest], [each.batch for each in states[number + 1 :]])
        assert torch.equal(rest[-1].params["weight"], states[-1].params["weight"])
