"""Sources that are drawn from once, what is refused as a source, and how long an epoch is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler

from pure_loop.data.dataloaders import source
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from tests.support.loaders import LAW, Again, Augmented, CustomBatches, Made, SizedStream, Stream, same, table

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
    with pytest.raises(DataError, match="already yielded 2 batches and can't go back to batch 1"):
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
