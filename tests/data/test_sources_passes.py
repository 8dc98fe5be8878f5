"""How long an epoch is: endless data, data without a length, wrong lengths, and iterators that are drawn from once.

That epoch k is pass k of what counts its passes is asked in test_sources_orders.py; here it is of runs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

import pure_loop as pl
from pure_loop import Event
from pure_loop.data.dataloaders import source
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from tests.support.loaders import Again, Augmented, CustomBatches, Made, SizedStream, Stream, same, table
from tests.support.passes import (
    Counted,
    CountingStream,
    Items,
    order_of,
)
from tests.support.tiers import examples

Make = Callable[[], Any]


def test_streams_that_change_nothing_are_not_gone_through_again() -> None:
    """Going on in epoch 2 draws what was seen of epoch 2, and of the epochs before it no more than a first batch.

    That shows of a stream that changes its attributes whether ``set_epoch`` says what a pass is.
    """
    drawn: list[int] = []

    class Alike(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for i in range(4):
                drawn.append(i)
                yield torch.tensor(i)

    class Knowing(Alike):
        epoch, passes = 0, 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            yield from (each + 10 * self.epoch for each in super().__iter__())

    for stream, wanted in ((Alike(), [1, 2, 3]), (Knowing(), [21, 22, 23])):
        drawn.clear()
        loader = DataLoader(stream, batch_size=None)
        assert [int(x) for x in source(loader, seed=0, stream="train").epoch(2, start=1)] == wanted
        assert drawn[-4:] == [0, 1, 2, 3]
        assert set(drawn[:-4]) <= {0}
        assert len(drawn) <= 7


def fit(start: Any, data: Any, **options: Any) -> list[tuple[Any, list[float]]]:
    """The State after each batch, and its samples."""
    settings: dict[str, Any] = {"loss": torch.nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=1e-6)}
    stream = pl.fit(start, data, **settings, **{"max_duration": "3ep", **options})
    return [(state, state.batch[0].flatten().tolist()) for event, state in stream if event is Event.BATCH_END]


def assert_resumes(whole: list[tuple[Any, list[float]]], make: Make, **options: Any) -> None:
    for number, (state, _) in enumerate(whole[:-1]):
        rest = fit(state, make(), **options)
        assert [batch for _, batch in rest] == [batch for _, batch in whole[number + 1 :]]
    assert torch.equal(rest[-1][0].params["weight"], whole[-1][0].params["weight"])


@pytest.mark.parametrize("form", ["sampler", "torch's batch sampler"])
def test_a_run_sees_pass_k_in_epoch_k(form: str) -> None:
    def loader(sampler: Any) -> Any:
        if form == "sampler":
            return DataLoader(Pairs(), batch_size=2, sampler=sampler)
        return DataLoader(Pairs(), batch_sampler=BatchSampler(sampler, 2, drop_last=False))

    sampler = Counted(5, "number")
    whole = fit(torch.nn.Linear(1, 1), loader(sampler), watch={Event.BATCH_END})
    assert [x for _, batch in whole for x in batch] == [float(i) for epoch in range(3) for i in order_of(5, epoch)]
    assert sampler.number == 0
    for made in (lambda: loader(sampler), lambda: loader(Counted(5, "number"))):
        assert_resumes(whole, made)


class Pairs(Items):
    def __init__(self) -> None:
        super().__init__(5)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.tensor([1.0])


def test_evaluations_all_see_the_first_pass() -> None:
    data = source(DataLoader(Items(5), batch_size=5, sampler=Counted(5, "number")), seed=0, stream="val")
    for _ in range(3):
        assert [batch.tolist() for batch in data.epoch(0)] == [[float(i) for i in order_of(5, 0)]]


def test_what_is_changed_in_a_sampler_holds_from_the_next_epoch_on() -> None:
    """As by hand: attributes set, lists and arrays written to; what is not changed is counted further."""
    sampler = Epochs(Counted(4, "number"))
    data = source(DataLoader(Items(4), batch_size=4, sampler=sampler), seed=0, stream="train")
    assert next(data.epoch(0)).tolist() == [float(i) for i in order_of(4, 0)]
    list(data.epoch(0))
    sampler.inner.n = 3
    assert next(data.epoch(1)).tolist() == [float(i) for i in order_of(3, 1)]
    list(data.epoch(0)), list(data.epoch(1))
    sampler.weights[0] = 1
    sampler.extra = [1]
    assert next(data.epoch(2)).tolist() == [*[float(i) for i in order_of(3, 2)], 0.0]
    assert sampler.inner.number == 0


class Epochs(Sampler[int]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.weights = [0, 0]
        self.extra: list[int] = []

    def __iter__(self) -> Iterator[int]:
        yield from self.inner
        if self.extra:
            yield from [0] * (self.weights[0])


def test_a_sampler_that_is_an_iterator_is_drawn_from_once() -> None:
    loader = DataLoader(Items(9), batch_size=2, sampler=iter(range(9)))  # type: ignore[arg-type]
    data = source(loader, seed=0, stream="train", batches_per_epoch=2)
    assert [batch.tolist() for batch in data.epoch(0)] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in data.epoch(1, seen=2)] == [[4, 5], [6, 7]]
    with pytest.raises(DataError, match=r"the train dataloader's sampler is an iterator.*a list of indices"):
        list(data.epoch(0))


# ---- endless data, and data without a length


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(torch.tensor, itertools.count())


class EndlessSampler(Sampler[int]):
    """The indices of a table again and again, in an order that a seed gives: no length."""

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            yield from order_of(7, number)


class EndlessBatches:
    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(EndlessSampler())
        while True:
            yield list(itertools.islice(indices, 2))


class OwnEndless:
    def __iter__(self) -> Iterator[Any]:
        return map(torch.tensor, itertools.count())


UNSIZED: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(Endless(), batch_size=2),
    "bare stream": Endless,
    "own loader": OwnEndless,
    "sampler": lambda: DataLoader(Items(7), batch_size=2, sampler=EndlessSampler()),
    "batch sampler": lambda: DataLoader(Items(7), batch_sampler=EndlessBatches()),  # type: ignore[arg-type]
    "no batches": lambda: DataLoader(Items(7), batch_size=None, sampler=EndlessSampler()),
}


@examples(25, 150)
@given(st.sampled_from(sorted(UNSIZED)), st.integers(1, 40), st.integers(0, 4), st.integers(0, 39))
def test_epochs_of_endless_data_go_on(kind: str, limit: int, epoch: int, start: int) -> None:
    """Streams, own iterables, endless samplers and batch samplers: as a generator is divided into epochs."""
    start = min(start, limit - 1)
    alone = list(itertools.islice(UNSIZED[kind](), limit * (epoch + 2)))
    data = source(UNSIZED[kind](), seed=0, stream="train", batches_per_epoch=limit)
    whole = [batch for e in range(epoch + 2) for batch in data.epoch(e, 0, e * limit)]
    assert same(whole, alone)
    resumed = source(UNSIZED[kind](), seed=0, stream="train", batches_per_epoch=limit)
    seen = epoch * limit + start
    assert same(list(resumed.epoch(epoch, start, seen)), alone[seen : (epoch + 1) * limit])
    assert same(list(resumed.epoch(epoch + 1, 0, (epoch + 1) * limit)), alone[(epoch + 1) * limit :])
    assert same(list(data.epoch(0)), alone[:limit])
    data.close()


@examples(12, 150)
@given(st.integers(1, 7), st.integers(1, 8), st.integers(1, 7), st.booleans())
def test_data_without_a_length_is_divided_pass_by_pass(n: int, limit: int, epochs: int, counts: bool) -> None:
    """A pass that ends in the middle of an epoch ends it; the next epoch begins the next pass."""
    make = (lambda: CountingStream(n, "number")) if counts else (lambda: DataLoader(Short(n), batch_size=None))
    wanted = []
    for number in range(epochs):
        order = order_of(n, number) if counts else list(range(n))
        wanted += [order[i : i + limit] for i in range(0, n, limit)]
    seen = 0
    data = source(make(), seed=0, stream="train", batches_per_epoch=limit)
    for epoch, batches in enumerate(wanted):
        assert [int(x) for x in data.epoch(epoch, 0, seen)] == batches
        for start in range(len(batches) + 1):
            resumed = source(make(), seed=0, stream="train", batches_per_epoch=limit)
            assert [int(x) for x in resumed.epoch(epoch, start, seen + start)] == batches[start:]
            if epoch + 1 < len(wanted):
                assert [int(x) for x in resumed.epoch(epoch + 1, 0, seen + len(batches))] == wanted[epoch + 1]
        seen += len(batches)


class Short(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return map(torch.tensor, range(self.n))


@pytest.mark.slow  # processes
def test_endless_data_in_workers_resumes() -> None:
    data = source(DataLoader(Endless(), batch_size=2, num_workers=1), seed=0, stream="train", batches_per_epoch=3)
    got = [batch.tolist() for epoch in range(3) for batch in data.epoch(epoch, 0, 3 * epoch)]
    assert got == [[2 * i, 2 * i + 1] for i in range(9)]
    data.close()


def test_sized_data_is_cut_and_a_run_of_endless_data_resumes() -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return ((torch.tensor([float(i)]), torch.tensor([1.0])) for i in itertools.count())

    def make() -> Any:
        return DataLoader(Rows(), batch_size=1)

    whole = fit(torch.nn.Linear(1, 1), make(), batches_per_epoch=4)
    assert [batch for _, batch in whole] == [[i] for i in range(12)]
    assert_resumes(whole, make, batches_per_epoch=4)
    rows = [(torch.tensor([[float(i)]]), torch.tensor([[1.0]])) for i in range(6)]
    assert [batch for _, batch in fit(torch.nn.Linear(1, 1), rows, batches_per_epoch=4)] == [[0], [1], [2], [3]] * 3


# ---- lengths that are wrong


class Wrong:
    def __init__(self, says: int, gives: int) -> None:
        self.says, self.gives = says, gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(2, 1), torch.ones(2, 1)) for _ in range(self.gives))


class WrongStream(Wrong, IterableDataset[Any]):
    pass


class WrongSampler(Wrong):
    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1]] * self.gives)


class Ones(Items):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(1), torch.ones(1)


WRONG: dict[str, Callable[[int, int], Any]] = {
    "own loader": Wrong,
    "stream": lambda says, gives: DataLoader(WrongStream(says, gives), batch_size=None),
    "bare stream": WrongStream,
    "batch sampler": lambda says, gives: DataLoader(Ones(4), batch_sampler=WrongSampler(says, gives)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_length_that_is_wrong(kind: str) -> None:
    """Too small, it is an error as soon as the batch comes that is one too many; too large, it ends the epoch."""

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


@pytest.mark.parametrize("kind", WRONG)
def test_a_run_on_a_wrong_length_is_an_error(kind: str) -> None:
    """The epoch isn't closed at the length, where a duration falls there, nor is a third batch trained on."""
    for order, max_duration in (("current", "2ba"), ("current", "2ep"), ("2021", "3ba"), ("2021", "2ba")):
        check_a_run(kind, order, max_duration)


def check_a_run(kind: str, order: Any, max_duration: str) -> None:
    stream = pl.fit(
        torch.nn.Linear(1, 1),
        WRONG[kind](2, 5),
        loss=torch.nn.functional.mse_loss,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration=max_duration,
        order=order,
    )
    ends = []
    with pytest.raises(DataError, match="length of 2, and gave batch 3 of epoch 0"):
        ends.extend(event for event, _ in stream if event in (Event.BATCH_END, Event.EPOCH_END))
    assert ends == [Event.BATCH_END] * 2


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


@settings(max_examples=30)
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
    with pytest.raises(DataError, match="already yielded 2 batches and can't go back to batch 1"):
        next(data.epoch(0, start=1, seen=1))
    with pytest.raises(DataError, match="gave 5 batches, but 9 were seen"):
        next(data.epoch(4, start=1, seen=9))


# ---- what is refused, and lengths


NO_LOADERS: list[tuple[Any, str]] = [
    (None, "NoneType is no dataloader"),
    (lambda: iter([]), "call a generator function"),
    (torch.zeros(3, 2), "Tensor is no dataloader.*TensorDataset"),
    (np.zeros(3), "ndarray is no dataloader"),
    ("text", "str is no dataloader"),
    ({"a": 1}, "dict is no dataloader"),
    ({1, 2}, "set is no dataloader"),
    (table(3), r"TensorDataset is a dataset.*DataLoader\(dataset, batch_size=\.\.\.\)"),
]


def test_what_is_no_dataloader_is_refused() -> None:
    for loader, message in NO_LOADERS:
        with pytest.raises(ArgumentTypeError, match=message):
            source(loader, seed=0, stream="train")
    for limit in (0, -1, 2.0, True):
        with pytest.raises(ArgumentError, match=f"batches_per_epoch={limit}"):
            source([1], seed=0, stream="train", batches_per_epoch=limit)  # type: ignore[arg-type]


def test_an_empty_epoch_is_an_error_unless_it_was_begun() -> None:
    empty = DataLoader(Augmented(2), batch_size=3, drop_last=True)
    for loader in ([], empty, DataLoader(Stream(0)), Again(0), iter([])):
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
