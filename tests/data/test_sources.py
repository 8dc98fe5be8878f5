"""Over everything that can be a dataloader: batches are those of the seed, the epoch and the position.

What is right is asked of a loop by hand over a new object: whether two of its epochs differ, whether it depends on the
global generators, and which samples an epoch has.
"""

from __future__ import annotations

import functools
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, RandomSampler, Sampler, Subset, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.torch_private import end_workers, iterator_of_loader
from pure_loop.data.copies import Private
from pure_loop.data.dataloaders import source
from pure_loop.data.group import Share
from tests.support import loaders
from tests.support.loaders import COUNTING, LOADERS, Counted, Make, N, loader, order_of, same, snapshot, surrounded
from tests.support.tiers import examples


def samples(batches: list[Any]) -> list[int]:
    """The samples in their order, and other numbers that batches have."""
    return [int(value) for leaf in tree_leaves(batches) for value in torch.as_tensor(leaf).double().reshape(-1)]


def parts_of(value: Any) -> list[Any]:
    """What is reachable from a loader by attributes, in containers and in functions."""
    found: list[Any] = []
    pending = [value]
    while pending:
        value = pending.pop()
        if any(value is each for each in found) or isinstance(value, type | torch.Tensor):
            continue
        found.append(value)
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, functools.partial):
            pending += value.args
        elif callable(value):
            pending += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
            pending.append(getattr(value, "__self__", None))
        elif isinstance(value, loaders.Record):
            pending.append(value.loader)
        else:
            pending += getattr(value, "__dict__", {}).values()
    return found


def by_hand(make: Make, seed: int, epochs: int) -> list[list[int]]:
    """Passes over a new object, which is told the epoch where a part of it has a ``set_epoch``."""
    given, result = make(), list[list[int]]()
    parts = parts_of(given)
    settable = [part for part in parts if callable(getattr(part, "set_epoch", None))]
    loaders.scramble(seed)
    for epoch in range(epochs):
        for part in settable:
            part.set_epoch(epoch)
        result.append(samples(list(given)))
    # Workers that stay, where they are collected together with their queues, are waited for in vain: 5 s for each.
    for dataloader in [part for part in parts if isinstance(part, DataLoader)]:
        end_workers(iterator_of_loader(dataloader))
    return result


def by_source(make: Make, seed: int, epochs: int, limit: int | None = None) -> list[list[Any]]:
    """The batches of epochs: global generators may be anything, and stay so; by hand the object is as a new one."""
    given, seen, result = make(), 0, []
    with closing(source(given, seed=seed, stream="train", batches_per_epoch=limit)) as data:
        for epoch in range(epochs):
            loaders.scramble(epoch)
            before, batches = snapshot(), []
            for batch in data.epoch(epoch, 0, seen):
                assert snapshot() == before
                batches.append(batch)
                loaders.scramble(len(batches))
                before = snapshot()
            assert snapshot() == before
            result.append(batches)
            seen += len(batches)
        assert data.loader_length in (None, seen // epochs) or limit
    assert by_hand(lambda: given, 0, 1) == by_hand(make, 0, 1), "the object was changed"
    return result


def distinct(*orders: list[int]) -> bool:
    return all(one != other for one, other in itertools.combinations(orders, 2))


def check(
    make: Make, limit: Any = None, epochs: int = 3, point: int = 1, counts: bool = False, workers: bool = False
) -> None:
    """The law. ``make`` gives an object that was never iterated over; it resumes at a point of each epoch."""
    hand, other_hand = by_hand(make, 0, epochs), by_hand(make, 1, epochs)
    batches, others = (by_source(make, seed, epochs, limit) for seed in (0, 1))
    orders, other_orders = [list(map(samples, each)) for each in (batches, others)]
    if counts and limit is None:
        assert orders == hand, "epoch k is not pass k"
    if len(orders[0]) >= 6:  # of fewer samples two orders may be equal
        if distinct(*hand):
            assert distinct(*orders), "one order for ever"
        if distinct(hand[0], other_hand[0]):
            assert distinct(orders[0], other_orders[0]), "one order for every seed"
            assert epochs == 1 or distinct(orders[1], other_orders[1])
    if limit is None:
        wanted, got, other = [list(map(Counter, each)) for each in (hand, orders, other_hand)]
        if wanted == other and all(each == wanted[0] for each in wanted):
            assert got == wanted, "other samples than by hand"
        else:  # drop_last leaves out other ones in each epoch
            assert [sorted(each.values()) for each in got] == [sorted(each.values()) for each in wanted]
        if not workers and hand == other_hand and not distinct(*hand):  # workers that stay don't hear set_epoch
            assert orders == hand, "what is deterministic by itself is as by hand"
    assert same(by_source(make, 0, epochs, limit), batches), "another run with the same seed differs"
    sizes = list(itertools.accumulate(map(len, batches), initial=0))
    for epoch, expected in enumerate(batches):
        start = point % len(expected)
        with closing(source(make(), seed=0, stream="train", batches_per_epoch=limit)) as resumed:
            assert same(list(resumed.epoch(epoch, start, sizes[epoch] + start)), expected[start:]), (epoch, start)
            if epoch + 1 < epochs:
                assert same(list(resumed.epoch(epoch + 1, 0, sizes[epoch + 1])), batches[epoch + 1]), epoch


def cut(given: Any, limit: int | None) -> int | None:
    """A limit for each epoch, not above the length of what has one."""
    length = source(given, seed=0, stream="train").loader_length
    return limit if limit is None or length is None else min(limit, length)


kinds, EVERY = st.sampled_from(sorted(LOADERS | COUNTING)), LOADERS | COUNTING
around = st.lists(st.sampled_from(sorted(loaders.WRAPPERS)), max_size=3)


def test_each_kind_by_itself() -> None:
    """Epoch k of what counts its passes is pass k, in whatever it counts."""
    for kind, make in EVERY.items():
        check(make, epochs=2, counts=kind in COUNTING)


@examples(60, 2000)
@given(kinds, around, st.none() | st.sampled_from([2, 3, 7]), st.integers(1, 4), st.integers(0, N))
@example("shuffle", ["wrapper"], 2, 3, 1)
@example("bare stream with epochs", [], None, 3, 1)
@example("own loader, random sampler", [], None, 3, 1)
def test_over_everything_that_can_be_a_dataloader(kind: str, around: Any, limit: Any, epochs: int, point: int) -> None:
    """Two epochs differ and two seeds differ where they do by hand, resumption equals, no sample comes twice.

    In wrappers of wrappers, in containers and records, in functions; whole epochs and such that are cut.
    """
    make = functools.partial(surrounded, EVERY[kind], around)
    check(make, cut(make(), limit), epochs, point, counts=kind in COUNTING)


IN_WORKERS: dict[str, Callable[..., Any]] = {
    "shuffle": lambda **options: loader(shuffle=True, **options),
    "own sampler": lambda **options: loader(sampler=loaders.DRAWN["numpy"](), **options),
    "stream, random sampler": lambda **options: loader(loaders.Stream(RandomSampler(range(N))), **options),
    "stream, own sampler": lambda **options: loader(loaders.Stream(loaders.DRAWN["global python"]()), **options),
    "stream with epochs": lambda **options: loader(loaders.StreamWithEpochs(RandomSampler(range(N))), **options),
    "stream of a sampler with epochs": lambda **options: loader(loaders.Stream(loaders.Knowing()), **options),
    "stream of a stream": lambda **options: loader(loaders.Stream(LOADERS["bare stream with epochs"]()), **options),
    "counting stream": lambda **options: loader(loaders.CountingStream(), **options),
    "counting at its end": lambda **options: loader(loaders.CountingStreamAtTheEnd(), **options),
}


@pytest.mark.slow  # processes
@pytest.mark.parametrize("persistent", [False, True])
def test_over_everything_in_workers(persistent: bool) -> None:
    """By itself and in a wrapper, with one worker or two."""
    options: dict[str, Any] = {"persistent_workers": persistent, "multiprocessing_context": "fork"}
    cases: list[tuple[str, list[str]]] = [(kind, []) for kind in IN_WORKERS]
    cases += [("shuffle", ["wrapper"]), ("stream, own sampler", ["set_epoch", "list"]), ("counting stream", ["lambda"])]
    for number, (kind, around) in enumerate(cases):
        options["num_workers"] = 1 if "counting" in kind or around else 1 + number % 2
        make = functools.partial(IN_WORKERS[kind], **options)
        check(functools.partial(surrounded, make, around), epochs=2, workers=True)


def test_two_workers_have_two_orders() -> None:
    """As by hand: each worker's copy of a sampler draws by itself, so that the same samples don't come in pairs."""
    for kind, stays in ((loaders.Stream, True), (loaders.StreamWithEpochs, False)):
        given = loader(kind(RandomSampler(range(N))), size=None, num_workers=2, persistent_workers=stays)
        with closing(source(given, seed=0, stream="train")) as data:
            order = samples(list(data.epoch(0)))
        assert sorted(order) == sorted([*range(N)] * 2)
        assert order[::2] != order[1::2]


class LacksPass(Private[Any]):
    def begin(self, seed: int, epoch: int) -> Any:
        return super().begin(0, epoch)


class LacksRun(Private[Any]):
    def begin(self, seed: int, epoch: int) -> Any:
        return super().begin(epoch, epoch)


class LacksReplay(Private[Any]):
    """Passes are taken for independent of those before."""

    independent = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("wrong", "make", "message"),
    [
        (LacksPass, LOADERS["table"], "one order for ever"),
        (LacksRun, LOADERS["table"], "one order for every seed"),
        (LacksReplay, COUNTING["number"], r"\(1, 1\)"),
    ],
)
def test_a_wrong_source_breaks_the_law(wrong: Any, make: Make, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("pure_loop.data.streams.Private", wrong)
    with pytest.raises(AssertionError, match=message):
        check(lambda: surrounded(make, ["wrapper"]))


# What is peculiar to one kind


def epoch_of(given: Any, epoch: int = 0, start: int = 0, stream: str = "train") -> list[Any]:
    return list(source(given, seed=0, stream=stream).epoch(epoch, start))


def test_what_was_seen_is_not_loaded_again() -> None:
    for kind in ("shuffle", "in place", "getitems", "batches by index", "random batches", "collate", "samples"):
        given = EVERY[kind]()
        rest = epoch_of(given, 1, 2)
        loaded = len(rest) if kind in ("batches by index", "samples") else sum(len(tree_leaves(b)[0]) for b in rest)
        assert given.dataset.loads == loaded, kind


def test_streams_differ_and_sources_in_turn_are_as_alone() -> None:
    given, other = LOADERS["shuffle"](), LOADERS["own loader, own sampler"]()
    alone = [epoch_of(given), epoch_of(other, 1, stream="val"), epoch_of(given)]
    assert not same(alone[0], epoch_of(given, stream="val"))
    data = source(given, seed=0, stream="train")
    turns = zip(data.epoch(0), source(other, seed=0, stream="val").epoch(1), data.epoch(0), strict=True)
    assert same([list(batches) for batches in zip(*turns, strict=True)], alone)


def test_long_orders_are_skipped_across_blocks() -> None:
    sampler = loaders.Drawn(lambda _: (random.randrange(9) for _ in range(140)))
    sampler.n = 140
    given = loader(range(140), size=1, sampler=sampler)
    whole = epoch_of(given)
    assert len(whole) == 140
    assert not same(whole[:64], whole[64:128])
    for start in (1, 63, 64, 65, 128, 139):
        assert same(epoch_of(given, start=start), whole[start:])


def test_an_error_passes_and_leaves_the_generators() -> None:
    """In a dataset; and in a sampler after what it gave before."""

    class Failing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            loaders.noise()
            raise LookupError("sampler")

    for sampler in (*loaders.DRAWN.values(), Failing):
        broken = None if sampler is Failing else 4
        before, got = snapshot(), list[Any]()
        batches = source(loader(loaders.Items(broken=broken), 2, sampler=sampler()), seed=0, stream="train").epoch(0)
        with pytest.raises(LookupError, match="sampler" if sampler is Failing else "sample 4"):
            got.extend(batches)
        assert samples(got) == [0, 1, 2, 3] if sampler is Failing else 4 not in samples(got)
        assert snapshot() == before


def test_a_tables_rows_are_what_its_loader_gives() -> None:
    image = torch.arange(5 * 12.0).reshape(5, 3, 2, 2).to(memory_format=torch.channels_last)
    whole = TensorDataset(image, torch.arange(5))
    for dataset in (whole, Subset(whole, torch.arange(5))):  # type: ignore[arg-type]
        given = loader(dataset, 2, sampler=[*range(5), -1])
        got, expected = epoch_of(given), list(given)
        assert same(got, expected)
        for mine, theirs in zip(got, expected, strict=True):
            assert [x.stride() for x in mine] == [x.stride() for x in theirs]
            assert mine[0].untyped_storage().data_ptr() != image.untyped_storage().data_ptr()


def test_a_batch_is_let_go_of_when_the_next_one_is_asked_for() -> None:
    given = surrounded(lambda: [None], ["lambda"])
    given.make = lambda: (torch.full((2,), float(i)) for i in range(4))
    batches = source(given, seed=0, stream="train").epoch(0)
    seen = [weakref.ref(next(batches)), weakref.ref(next(batches)), weakref.ref(next(batches))]
    assert [each() for each in seen[:2]] == [None, None]


def test_a_part_of_a_batch_that_ends_an_iteration_ends_no_epoch() -> None:
    share = Share(0, 2, len, lambda batch, size: [next(iter(()))])
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(source([torch.zeros(4)] * 3, seed=0, stream="train", share=share).epoch(0))


def test_streams_that_change_nothing_are_not_gone_through_again() -> None:
    """Going on in epoch 2 draws what was seen of epoch 2, and of the epochs before it no more than a first batch.

    That shows of a stream that changes its attributes whether ``set_epoch`` says what a pass is.
    """
    drawn: list[int] = []

    def draws(_: Any) -> Iterator[int]:
        return (drawn.append(i) or i for i in range(4))  # type: ignore[func-returns-value]

    class Knows(loaders.StreamWithEpochs):
        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            yield from (each + 10 * self.epoch for each in super().__iter__())

    for kind, wanted in ((loaders.Stream, [1, 2, 3]), (Knows, [21, 22, 23])):
        drawn.clear()
        assert samples(epoch_of(loader(kind(loaders.Drawn(draws)), size=None), 2, 1)) == wanted
        assert drawn[-4:] == [0, 1, 2, 3]
        assert set(drawn[:-4]) <= {0}
        assert len(drawn) <= 7


def test_what_is_changed_in_a_sampler_holds_from_the_next_epoch_on() -> None:
    """As by hand: attributes set, lists and arrays written to; what is not changed is counted further."""

    class Outer(Sampler[int]):
        def __init__(self) -> None:
            self.inner, self.weights, self.extra = Counted(n=4), [0, 0], list[int]()

        def __iter__(self) -> Iterator[int]:
            yield from self.inner
            yield from [0] * self.weights[0] if self.extra else []

    sampler = Outer()
    data = source(loader(size=4, sampler=sampler), seed=0, stream="train")
    knowing = loaders.Knowing()
    assert samples(epoch_of(loader(sampler=knowing), 3)) == order_of(3)
    assert not vars(knowing), "a copy is told the epoch"
    for _ in range(3):  # evaluations all see the first pass
        assert samples(list(data.epoch(0))) == order_of(0, 4)
    sampler.inner.n = 3
    assert samples([next(data.epoch(1))]) == order_of(1, 3)
    list(data.epoch(0)), list(data.epoch(1))
    sampler.weights[0] = 1
    sampler.extra = [1]
    assert samples([next(data.epoch(2))]) == [*order_of(2, 3), 0]
    assert sampler.inner.held == 0


def test_a_run_resumes_from_each_state() -> None:
    """Over a counter that no epoch is told; with the sampler that was used, and with a new one."""
    task = pl.Task(
        forward=lambda model, batch: model(batch.float()[:, None]), loss=lambda outputs, batch: outputs.mean()
    )
    used = loader(sampler=Counted())

    def run(start: Any, data: Any) -> list[pl.State]:
        stream = pl.fit(start, data, loss=task, optimizer=pl.optim.sgd(lr=1e-4), max_duration="2ep", seed=3)
        return [state for event, state in stream if event is Event.BATCH_END]

    states = run(torch.nn.Linear(1, 1), used)
    assert samples([state.batch for state in states]) == order_of(0) + order_of(1)
    for number, state in enumerate(states[:-1]):
        rest = run(state, used if number % 2 else loader(sampler=Counted()))
        assert same([each.batch for each in rest], [each.batch for each in states[number + 1 :]])
        assert torch.equal(rest[-1].params["weight"], states[-1].params["weight"])
