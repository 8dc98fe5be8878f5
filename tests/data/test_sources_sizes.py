"""Training that resumes within an epoch with batches of another size has each sample of it once, or says no."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset, default_collate
from torch.utils.data._utils import collate

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ResumeError
from tests.support.loaders import Wrapper, loader, same
from tests.support.tiers import examples

TASK = pl.Task(forward=lambda model, batch: model(batch[0][:, None]), loss=lambda outputs, batch: outputs.mean())


def numbers(n: int, size: int, **options: Any) -> Any:
    return loader(TensorDataset(torch.arange(float(n))), size, **options)


def run(start: Any, data: Any, **settings: Any) -> list[pl.State]:
    if start is None:
        with pl.random.seeded(0):
            start = torch.nn.Linear(1, 1)
    settings = {"max_duration": "1ep", "seed": 4, "loss": TASK, "optimizer": pl.optim.sgd(lr=1e-3), **settings}
    return [state for event, state in pl.fit(start, data, **settings) if event is Event.BATCH_END]


def samples(states: list[pl.State]) -> list[float]:
    batches = [state.batch for state in states]
    parts = [part for batch in batches for part in (batch if isinstance(batch, pl.Batches) else [batch])]
    return [value for part in parts for value in part[0].tolist()]


sizes = st.integers(1, 5)


@examples(12, 200)
@given(st.integers(5, 14), sizes, sizes, st.integers(1, 6), st.booleans(), st.none() | st.just(2))
def test_each_sample_of_the_epoch_comes_once(
    n: int, size: int, other: int, boundary: int, shuffle: bool, microbatch: int | None
) -> None:
    """Whatever the two sizes are, and on which side of the boundary a batch of the new size ends."""
    seen = run(None, numbers(n, size, shuffle=shuffle))
    order = samples(seen)
    boundary = min(boundary, len(seen) - 1)
    if boundary < 1:
        return
    kept, data = seen[boundary - 1], numbers(n, other, shuffle=shuffle)
    options: dict[str, Any] = {"max_duration": "2ep", "microbatch_size": microbatch}
    if boundary * size < other:
        with pytest.raises(ResumeError, match=r"The first batch|They end within the first batch"):
            run(kept, data, **options)
        return
    rest = run(kept, data, **options)
    first = [state for state in rest if state.timestamp.sample <= n]
    assert samples(first) == order[boundary * size :]
    assert sorted(samples(rest[len(first) :])) == sorted(order)
    assert rest[-1].timestamp.sample == 2 * n
    assert first[-1].timestamp.batch_in_epoch == -(-n // other)
    # What was resumed resumes again, from each of its States.
    for number, state in enumerate(rest[:-1]):
        again = run(state, data, **options)
        assert same([each.batch for each in again], [each.batch for each in rest[number + 1 :]])
        assert torch.equal(again[-1].params["weight"], rest[-1].params["weight"])


@dataclass
class Row:
    value: torch.Tensor


def test_a_library_may_add_its_classes_to_torchs_collate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes nothing for other classes. Where it leaves samples out, positions are batches."""
    first = lambda batch, **_: default_collate([(row.value,) for row in batch[:1]])  # noqa: E731
    monkeypatch.setitem(collate.default_collate_fn_map, Row, first)
    for n, size, other in ((5, 3, 4), (5, 4, 3), (9, 5, 8), (9, 8, 5)):
        seen, data = run(None, numbers(n, size, shuffle=True)), numbers(n, other, shuffle=True)
        if size < other:
            with pytest.raises(ResumeError, match="They end within the first batch"):
                run(seen[0], data)
        else:
            assert samples(run(seen[0], data)) == samples(seen)[size:]
    rows = loader([Row(torch.tensor(float(i))) for i in range(12)], 4)
    seen = run(None, rows)
    assert samples(seen) == [0, 4, 8]
    assert samples(run(seen[0], rows)) == [4, 8]


def test_other_ways_to_divide_an_epoch() -> None:
    """drop_last leaves out what a run of the new size leaves out; steps of several batches; epochs that are cut."""
    seen = run(None, numbers(40, 4, drop_last=True, shuffle=True))
    rest = run(seen[2], numbers(40, 7, drop_last=True, shuffle=True))
    assert samples(rest) == samples(seen)[12:35]
    assert [len(state.batch[0]) for state in rest] == [2, 7, 7, 7]
    seen = run(None, numbers(40, 4))
    assert samples(run(seen[3], numbers(40, 4), batches_per_step=2)) == samples(seen)[16:]
    with pytest.raises(ResumeError, match="They end within a step"):
        run(seen[2], numbers(40, 4), batches_per_step=2)
    # Another batches_per_epoch alone changes nothing of what was seen.
    assert samples(run(seen[1], numbers(40, 4), batches_per_epoch=4)) == samples(seen)[8:16]
    data = TensorDataset(torch.arange(24.0))
    of_torch = lambda size: loader(data, 1, batch_sampler=BatchSampler(RandomSampler(data), size, False))  # noqa: E731
    seen = run(None, of_torch(4))
    for size in (6, 5):
        assert samples(run(seen[2], of_torch(size))) == samples(seen)[12:]


def listed(size: int) -> list[Any]:
    return [(part,) for part in torch.arange(24.0).split(size)]


WITHOUT: dict[str, Callable[[int], Any]] = {
    "a list": listed,
    "a stream": lambda size: Wrapper(listed(size)),
    "an iterator": lambda size: iter(listed(size)),
    "a batch sampler": lambda size: numbers(24, 1, batch_sampler=[x.tolist() for x in torch.arange(24).split(size)]),
    "a collate": lambda size: numbers(24, size, collate_fn=lambda rows: default_collate(rows * 2)),
}


def test_what_has_no_order_of_samples_says_so_before_training() -> None:
    for make in WITHOUT.values():
        seen = run(None, make(4))
        for other in (2, 8):
            with pytest.raises(ResumeError, match=r"first 3 batches of epoch 0, and the State has seen \d+ in as"):
                run(seen[2], make(other))
        assert len(run(seen[2], make(4))) == 3


def test_collates_that_change_the_number_of_samples_resume_as_they_were() -> None:
    """Samples are dropped, or come several times: positions are batches."""
    for factor in (1, 2):
        rows_of = lambda rows: [row for row in rows if row[0] % 5 != 3] * factor  # noqa: E731
        data = numbers(23, 4, shuffle=True, collate_fn=lambda rows: default_collate(rows_of(rows)))
        seen = run(None, data, max_duration="2ep")
        for number, state in enumerate(seen[:-1]):
            rest = run(state, data, max_duration="2ep")
            assert same([each.batch for each in rest], [each.batch for each in seen[number + 1 :]])
