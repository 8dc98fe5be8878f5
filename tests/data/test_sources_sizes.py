"""Training that resumes in the middle of an epoch with batches of another size has each sample of it once, or refuses.

Tried: sizes larger and smaller, boundaries inside of a new batch, drop_last, shuffled and in order, batches_per_step,
microbatches, cut epochs; lists, streams, iterators and batch samplers of one's own, which have no order of samples by
which could be skipped; collates that change the number of samples, with which nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset, default_collate
from torch.utils.data._utils import collate

import pure_loop as pl
from pure_loop import Event
from tests.support.loaders import same
from tests.support.tiers import examples

TASK = pl.Task(
    forward=lambda model, batch: model(batch[0][:, None]), loss=lambda outputs, batch: outputs.square().mean()
)


def loader(n: int, size: int, **options: Any) -> Any:
    return DataLoader(TensorDataset(torch.arange(float(n))), batch_size=size, **options)


def run(start: Any, data: Any, **settings: Any) -> list[Any]:
    settings = {"max_duration": "2ep", "seed": 4, "task": TASK, **settings}
    return [
        state
        for event, state in pl.fit(start, data, optimizer=pl.optim.sgd(lr=1e-3), **settings)
        if event is Event.BATCH_END
    ]


def model() -> Any:
    with pl.random.seeded(0):
        return torch.nn.Linear(1, 1)


def samples(states: list[Any]) -> list[float]:
    parts = [
        part for state in states for part in (state.batch if isinstance(state.batch, pl.Batches) else [state.batch])
    ]
    return [value for part in parts for value in part[0].tolist()]


@examples(12, 200)
@given(
    st.integers(5, 14), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.none() | st.just(2)
)
def test_each_sample_of_the_epoch_comes_once(
    n: int, size: int, other: int, boundary: int, shuffle: bool, microbatch: int | None
) -> None:
    """Whatever the two sizes are, and on which side of the boundary a batch of the new size ends."""
    seen = run(model(), loader(n, size, shuffle=shuffle), max_duration="1ep")
    order = samples(seen)
    boundary = min(boundary, len(seen) - 1)
    if boundary < 1:
        return
    kept = seen[boundary - 1]
    data = loader(n, other, shuffle=shuffle)
    if boundary * size < other:
        with pytest.raises(pl.ResumeError, match=r"The first batch|They end within the first batch"):
            run(kept, data)
        return
    rest = run(kept, data, microbatch_size=microbatch)
    first = [state for state in rest if state.timestamp.sample <= n]
    assert samples(first) == order[boundary * size :]
    assert sorted(samples(rest[len(first) :])) == sorted(order)
    assert rest[-1].timestamp.sample == 2 * n
    assert first[-1].timestamp.batch_in_epoch == -(-n // other)
    # What was resumed resumes again, from each of its States.
    for number, state in enumerate(rest[:-1]):
        again = run(state, data, microbatch_size=microbatch)
        assert same([each.batch for each in again], [each.batch for each in rest[number + 1 :]])
        assert torch.equal(again[-1].params["weight"], rest[-1].params["weight"])


def test_a_class_that_a_library_adds_to_torchs_collate_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many batches of another size, too: whether they end within the first one."""
    monkeypatch.setitem(collate.default_collate_fn_map, Buckets, lambda batch, **_: batch[0])
    for n, size, other in ((5, 3, 4), (5, 4, 3), (9, 5, 8), (9, 8, 5)):
        seen = run(model(), loader(n, size, shuffle=True), max_duration="1ep")
        data = loader(n, other, shuffle=True)
        if size < other:
            with pytest.raises(pl.ResumeError, match="They end within the first batch"):
                run(seen[0], data, max_duration="1ep")
        else:
            assert samples(run(seen[0], data, max_duration="1ep")) == samples(seen)[size:]


def test_samples_that_an_addition_to_the_collate_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are batches, as they are with a collate of one's own."""

    def first(batch: list[Any], **_: Any) -> Any:
        return default_collate([(row.value,) for row in batch[:1]])

    def make() -> Any:
        return DataLoader([Row(torch.tensor(float(i))) for i in range(12)], batch_size=4)  # type: ignore[arg-type]

    monkeypatch.setitem(collate.default_collate_fn_map, Row, first)
    seen = run(model(), make(), max_duration="1ep")
    assert samples(seen) == [0, 4, 8]
    assert samples(run(seen[0], make(), max_duration="1ep")) == [4, 8]


def test_other_ways_to_divide_an_epoch() -> None:
    """drop_last leaves out what a run of the new size leaves out; steps of several batches; epochs that are cut."""
    seen = run(model(), loader(40, 4, drop_last=True, shuffle=True), max_duration="1ep")
    rest = run(seen[2], loader(40, 7, drop_last=True, shuffle=True), max_duration="1ep")
    assert samples(rest) == samples(seen)[12:35]
    assert [len(state.batch[0]) for state in rest] == [2, 7, 7, 7]
    seen = run(model(), loader(40, 4), max_duration="1ep")
    rest = run(seen[3], loader(40, 4), batches_per_step=2, max_duration="1ep")
    assert samples(rest) == samples(seen)[16:]
    with pytest.raises(pl.ResumeError, match="They end within a step"):
        run(seen[2], loader(40, 4), batches_per_step=2, max_duration="1ep")
    # Another batches_per_epoch alone changes nothing of what was seen.
    rest = run(seen[1], loader(40, 4), max_duration="1ep", batches_per_epoch=4)
    assert samples(rest) == samples(seen)[8:16]


@dataclass
class Row:
    value: torch.Tensor


class Numbers(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.tensor(float(i)),) for i in range(self.n))


class Buckets:
    def __init__(self, n: int, size: int) -> None:
        self.batches = [list(range(i, min(i + size, n))) for i in range(0, n, size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def listed(size: int) -> list[Any]:
    return [(part,) for part in torch.arange(24.0).split(size)]


WITHOUT = {
    "a list": listed,
    "a stream": lambda size: DataLoader(Numbers(24), batch_size=size),
    "an iterator": lambda size: iter(listed(size)),
    "a batch sampler": lambda size: DataLoader(TensorDataset(torch.arange(24.0)), batch_sampler=Buckets(24, size)),
    "a collate": lambda size: loader(24, size, collate_fn=lambda rows: default_collate(rows * 2)),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_what_has_no_order_of_samples_says_so_before_training(kind: str) -> None:
    make = WITHOUT[kind]
    seen = run(model(), make(4), max_duration="1ep")
    for other in (2, 8):
        with pytest.raises(
            pl.ResumeError, match=r"in the first 3 batches of epoch 0, and the State has seen \d+ in as many"
        ):
            run(seen[2], make(other), max_duration="1ep")
    assert len(run(seen[2], make(4), max_duration="1ep")) == 3


def test_collates_that_change_the_number_of_samples_resume_as_they_were() -> None:
    """Samples are dropped, or come several times: positions are batches."""
    for factor in (1, 2):

        def make() -> Any:
            rows_of = lambda rows: [row for row in rows if row[0] % 5 != 3] * factor  # noqa: E731
            return loader(23, 4, shuffle=True, collate_fn=lambda rows: default_collate(rows_of(rows)))

        seen = run(model(), make())
        for number, state in enumerate(seen[:-1]):
            assert same([each.batch for each in run(state, make())], [each.batch for each in seen[number + 1 :]])


def test_an_own_batch_sampler_of_torchs_kind_over_a_random_sampler() -> None:
    def make(size: int) -> Any:
        data = TensorDataset(torch.arange(24.0))
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), size, drop_last=False))

    seen = run(model(), make(4), max_duration="1ep")
    assert samples(run(seen[2], make(6), max_duration="1ep")) == samples(seen)[12:]
    assert samples(run(seen[2], make(5), max_duration="1ep")) == samples(seen)[12:]
