"""How long an epoch is: endless data, data without a length, wrong lengths, and iterators that are drawn from once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler

import pure_loop as pl
from pure_loop import Event
from pure_loop.data.dataloaders import source
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from tests.support import loaders, problem
from tests.support.loaders import CountingStream, Items, Stream, Wrapper, loader, order_of
from tests.support.tiers import examples


class Endless:
    """Numbers that never end, or the indices of seven samples again and again: no length."""

    def __init__(self, size: int | None = None, of: int = 10**6) -> None:
        self.size, self.of = size, of

    def __iter__(self) -> Iterator[Any]:
        passes = (range(self.of) if self.of > 7 else order_of(number, 7) for number in itertools.count())
        numbers = itertools.chain.from_iterable(passes)
        return numbers if self.size is None else iter(lambda: [next(numbers) for _ in range(self.size)], None)  # type: ignore[arg-type]


def endless_stream() -> Any:
    return Stream(Wrapper(Endless(), lambda held: map(torch.tensor, held)))


UNSIZED: dict[str, Callable[[], Any]] = {
    "stream": lambda: loader(endless_stream(), 2),
    "bare stream": endless_stream,
    "own loader": lambda: Wrapper(endless_stream()),
    "sampler": lambda: loader(range(7), 2, sampler=Endless(of=7)),
    "batch sampler": lambda: loader(range(7), 1, batch_sampler=Endless(2, of=7)),
    "no batches": lambda: loader(range(7), None, sampler=Endless(of=7)),
}


def numbers(batches: Any) -> list[int]:
    return [int(each) for batch in batches for each in torch.as_tensor(batch).reshape(-1)]


@examples(25, 150)
@given(st.sampled_from(sorted(UNSIZED)), st.integers(1, 40), st.integers(0, 4), st.integers(0, 39))
def test_epochs_of_endless_data_go_on(kind: str, limit: int, epoch: int, start: int) -> None:
    """As a generator is divided into epochs, which begins anew where the first epoch is asked for again."""
    start = min(start, limit - 1)
    alone = list(itertools.islice(UNSIZED[kind](), limit * (epoch + 2)))
    data, resumed = (source(UNSIZED[kind](), seed=0, stream="train", batches_per_epoch=limit) for _ in range(2))
    whole = [batch for e in range(epoch + 2) for batch in data.epoch(e, 0, e * limit)]
    assert numbers(whole) == numbers(alone)
    seen = epoch * limit + start
    assert numbers(resumed.epoch(epoch, start, seen)) == numbers(alone[seen : (epoch + 1) * limit])
    assert numbers(resumed.epoch(epoch + 1, 0, (epoch + 1) * limit)) == numbers(alone[(epoch + 1) * limit :])
    assert numbers(data.epoch(0)) == numbers(alone[:limit])
    data.close()


@examples(12, 150)
@given(st.integers(1, 7), st.integers(1, 8), st.integers(1, 7), st.booleans())
def test_data_without_a_length_is_divided_pass_by_pass(n: int, limit: int, epochs: int, counts: bool) -> None:
    """A pass that ends in the middle of an epoch ends it; the next epoch begins the next pass."""
    make = (lambda: CountingStream(n=n)) if counts else (lambda: Wrapper(torch.arange(n), lambda held: iter(held)))
    wanted = []
    for number in range(epochs):
        order = order_of(number, n) if counts else list(range(n))
        wanted += [order[i : i + limit] for i in range(0, n, limit)]
    seen = 0
    data = source(make(), seed=0, stream="train", batches_per_epoch=limit)
    for epoch, batches in enumerate(wanted):
        assert numbers(data.epoch(epoch, 0, seen)) == batches
        for start in range(len(batches) + 1):
            resumed = source(make(), seed=0, stream="train", batches_per_epoch=limit)
            assert numbers(resumed.epoch(epoch, start, seen + start)) == batches[start:]
            if epoch + 1 < len(wanted):
                assert numbers(resumed.epoch(epoch + 1, 0, seen + len(batches))) == wanted[epoch + 1]
        seen += len(batches)


@pytest.mark.slow  # processes
def test_endless_data_in_workers_resumes() -> None:
    given = loader(endless_stream(), 2, num_workers=1)
    data = source(given, seed=0, stream="train", batches_per_epoch=3)
    assert [numbers(data.epoch(epoch, 0, 3 * epoch)) for epoch in (0, 1)] == [[*range(6)], [*range(6, 12)]]
    data.close()


def test_a_run_of_endless_data_resumes_and_an_endless_sampler_is_cut() -> None:
    def run(start: Any) -> list[pl.State]:
        rows = Wrapper(Endless(), lambda held: ((torch.full((1, 4), float(i)), torch.tensor([i % 3])) for i in held))
        stream = problem.fit(start, rows, batches_per_epoch=3)
        return [state for event, state in stream if event is Event.BATCH_END]

    whole = run(None)
    assert [int(state.batch[0][0, 0]) for state in whole] == list(range(6))
    for number, state in enumerate(whole[:-1]):
        (*_, last) = run(state)
        assert [int(each.batch[0][0, 0]) for each in run(state)] == list(range(number + 1, 6))
        problem.close(last.params, whole[-1].params, 0.0)
    items = Items(7)
    data = source(loader(items, 2, sampler=Endless(of=7)), seed=0, stream="train", batches_per_epoch=100)
    assert len(list(data.epoch(0, start=90))) == 10
    assert items.loads == 20


# Lengths that are wrong


class Wrong:
    def __init__(self, says: int, gives: int) -> None:
        self.says, self.gives = says, gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))] * self.gives)


class WrongStream(Wrong, IterableDataset[Any]):
    pass


class WrongSampler(Wrong):
    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1]] * self.gives)


ONES = [(torch.ones(4), torch.tensor(0))] * 4
WRONG: dict[str, Callable[[int, int], Any]] = {
    "own loader": Wrong,
    "stream": lambda says, gives: loader(WrongStream(says, gives), None),
    "bare stream": WrongStream,
    "batch sampler": lambda says, gives: loader(ONES, 1, batch_sampler=WrongSampler(says, gives)),
}


class EndlessSampler(Sampler[int]):
    """Of eight samples in order, again and again, with a length."""

    def __iter__(self) -> Iterator[int]:
        return (number % 8 for number in itertools.count())

    def __len__(self) -> int:
        return 8


def test_what_never_ends_and_has_a_length_goes_on_as_an_iterator() -> None:
    loader = DataLoader(torch.arange(8), sampler=EndlessSampler(), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"length of 4, .* never ends, give iter\(loader\) and batches_per_epoch=4"):
        list(source(loader, seed=0, stream="train").epoch(0, 0))
    epochs = source(iter(loader), seed=0, stream="train", batches_per_epoch=3)
    found = [[batch.tolist() for batch in epochs.epoch(number, 0, 3 * number)] for number in range(2)]
    assert found == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [0, 1], [2, 3]]]


@pytest.mark.parametrize("kind", WRONG)
def test_a_length_that_is_wrong(kind: str) -> None:
    """Too small, it is an error as soon as the batch comes that is one too many; too large, it ends the epoch.

    A run neither closes the epoch at the length, where a duration falls there, nor trains on the batch after.
    """

    def epoch(says: int, gives: int, start: int, limit: int | None = None) -> Iterator[Any]:
        return source(WRONG[kind](says, gives), seed=0, stream="val", batches_per_epoch=limit).epoch(1, start)

    says = "the val dataloader has a length of 3, and gave batch 4 of epoch 1: its __len__ is too small"
    for start in (0, 1, 3):
        for limit in (None, 4):
            got: list[Any] = []
            with pytest.raises(DataError, match=says):
                got.extend(epoch(3, 5, start, limit))
            assert len(got) == 3 - start
        assert len(list(epoch(3, 5, start, limit=3))) == len(list(epoch(3, 3, start))) == 3 - start
    with pytest.raises(DataError, match="has a length of 0, and gave batch 1"):
        list(epoch(0, 5, 0))
    assert len(list(epoch(5, 3, 0))) == 3
    for order, max_duration in (("current", "2ba"), ("current", "2ep"), ("2021", "3ba"), ("2021", "2ba")):
        stream, ends = problem.fit(None, WRONG[kind](2, 5), max_duration=max_duration, order=order), []
        with pytest.raises(DataError, match="length of 2, and gave batch 3 of epoch 0"):
            ends.extend(event for event, _ in stream if event in (Event.BATCH_END, Event.EPOCH_END))
        assert ends == [Event.BATCH_END] * 2


# Iterators


def test_an_iterator_is_drawn_from_once() -> None:
    """What was seen is dropped where training resumes, and closing an epoch leaves the iterator open."""

    def of(n: int, limit: int | None = None) -> Any:
        return source(iter([torch.tensor(i) for i in range(n)]), seed=0, stream="train", batches_per_epoch=limit)

    assert numbers(of(7).epoch(0)) == list(range(7))
    data = of(7, 3)
    assert [numbers(data.epoch(epoch, seen=3 * epoch)) for epoch in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert data.length == 3
    assert of(7).length is None
    with pytest.raises(DataError, match="train dataloader gave no batch in epoch 3: its iterator is exhausted"):
        list(data.epoch(3, seen=7))
    for limit, seen in ((1, 0), (2, 3), (4, 5), (4, 4)):
        end = seen // limit * limit + limit
        assert numbers(of(6, limit).epoch(seen // limit, seen % limit, seen)) == list(range(seen, min(end, 6)))
    data = of(5, 2)
    batches = data.epoch(0)
    next(batches)
    batches.close()
    assert numbers(data.epoch(0, start=1, seen=1)) == [1]
    with pytest.raises(DataError, match="already yielded 2 batches and can't go back to batch 1"):
        next(data.epoch(0, start=1, seen=1))
    with pytest.raises(DataError, match="gave 5 batches, but 9 were seen"):
        next(data.epoch(4, start=1, seen=9))


def test_a_sampler_that_is_an_iterator_is_drawn_from_once() -> None:
    data = source(loader(range(9), 2, sampler=iter(range(9))), seed=0, stream="train", batches_per_epoch=2)
    assert [numbers(data.epoch(epoch, seen=2 * epoch)) for epoch in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataError, match=r"the train dataloader's sampler is an iterator.*a list of indices"):
        list(data.epoch(0))


# What is refused, and lengths


NO_LOADERS: list[tuple[Any, str]] = [
    (None, "NoneType is no dataloader"),
    (lambda: iter([]), "call a generator function"),
    (torch.zeros(3, 2), "Tensor is no dataloader.*TensorDataset"),
    (np.zeros(3), "ndarray is no dataloader"),
    ("text", "str is no dataloader"),
    ({"a": 1}, "dict is no dataloader"),
    ({1, 2}, "set is no dataloader"),
    (loaders.table(3), r"TensorDataset is a dataset.*DataLoader\(dataset, batch_size=\.\.\.\)"),
]


def test_what_is_no_dataloader_and_what_is_empty() -> None:
    for wrong, message in NO_LOADERS:
        with pytest.raises(ArgumentTypeError, match=message):
            source(wrong, seed=0, stream="train")
    for limit in (0, -1, 2.0, True):
        with pytest.raises(ArgumentError, match=f"batches_per_epoch={limit}"):
            source([1], seed=0, stream="train", batches_per_epoch=limit)  # type: ignore[arg-type]
    for empty in ([], loader(Items(2), drop_last=True), loader(Stream([])), Wrapper([]), iter([])):
        with pytest.raises(DataError, match="the val dataloader gave no batch in epoch 2"):
            list(source(empty, seed=0, stream="val").epoch(2))
        assert list(source(empty, seed=0, stream="val").epoch(2, start=1)) == []


def test_lengths() -> None:
    sized = loader(loaders.SizedStream())
    for each, whole, cut in (
        ([1, 2, 3], 3, 2),
        ([1], 1, 1),
        (loader(), 4, 2),
        (loader(drop_last=True), 3, 2),
        (loaders.Made(), loaders.N, 2),
        (sized, 4, 2),
        (loader(batch_sampler=loaders.RandomBatches(), size=1), None, 2),
        (DataLoader(Stream()), None, 2),
        (Wrapper([]), None, 2),
        (iter([1]), None, 2),
    ):
        assert source(each, seed=0, stream="train").length == whole
        assert source(each, seed=0, stream="train", batches_per_epoch=2).length == cut
    assert sized._IterableDataset_len_called is None  # type: ignore[attr-defined]
