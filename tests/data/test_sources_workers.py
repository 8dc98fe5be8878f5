"""Sources with worker processes: they load the same batches, and end with the epoch."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from pure_loop.data.dataloaders import source
from pure_loop.data.workers import _Reseeding
from tests.support import loaders
from tests.support.loaders import Items, Stream, Together, loader, same, snapshot

BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads() -> None:
    """The threads that ran before a test: those of other files' process pools end when they like."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def alive() -> tuple[int, int]:
    """Worker processes and threads of this test, once those that were told to end had the time to."""
    gc.collect()
    for _ in range(100):
        left = multiprocessing.active_children(), set(threading.enumerate()) - BEFORE
        if not any(left):
            break
        time.sleep(0.02)
    return len(left[0]), len(left[1])


KINDS: list[Callable[..., Any]] = [
    lambda **k: loader(Items(7), 2, sampler=[*range(7)], collate_fn=loaders.noisy_collate, in_order=not k, **k),
    lambda **k: loader(Together(), 2, sampler=loaders.DRAWN["lazy"](), **k),
    lambda **k: loader(Items(5), None, shuffle=True, **k),
    lambda **k: loader(loaders.table(7), 2, shuffle=True, **k),
]


def test_workers_give_what_one_process_gives() -> None:
    for make in KINDS:
        before = snapshot()
        whole = list(source(make(), seed=0, stream="train").epoch(1))
        data = source(make(num_workers=2), seed=0, stream="train")
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
    given = loader(dataset, 2, shuffle=True, num_workers=2)
    assert len(list(source(given, seed=0, stream="train", batches_per_epoch=5).epoch(0, start=3))) == 2
    assert dataset.loads.value == 4


def test_workers_of_a_stream() -> None:
    data = source(loader(Stream(), 2, num_workers=2), seed=0, stream="train")
    loaders.scramble(1)
    before = snapshot()
    whole = list(data.epoch(1))
    assert snapshot() == before
    loaders.scramble(2)
    assert sorted(int(row) for batch in whole for row in batch) == list(range(11))
    assert same(list(data.epoch(1, start=2)), whole[2:])
    assert not same(list(data.epoch(0)), whole)


@pytest.mark.slow  # many processes, and the time that they take to end
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_the_workers(persistent: bool) -> None:
    def workers() -> set[Any]:
        return {child.pid for child in multiprocessing.active_children()}

    assert alive() == (0, 0)
    given = loader(Items(40), 2, shuffle=True, num_workers=2, persistent_workers=persistent)
    whole = [list(source(loader(Items(40), 2, shuffle=True), seed=0, stream="train").epoch(e)) for e in (0, 1)]
    data = source(given, seed=0, stream="train")
    batches = data.epoch(0)
    assert same(next(batches), whole[0][0])
    first = workers()
    assert len(first) == 2
    if persistent:
        other = data.epoch(1)  # another epoch at the same time gets workers of its own
        assert same(next(other), whole[1][0])
        assert same(next(batches), whole[0][1])
        other.close()
    batches.close()
    assert workers() == (first if persistent else set())
    assert same(list(data.epoch(1, start=3)), whole[1][3:])
    assert workers() == (first if persistent else set())
    data.close()
    assert given._iterator is None
    assert alive() == (0, 0)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_ends_the_workers(persistent: bool) -> None:
    given = loader(Items(9, broken=5), 2, num_workers=1, persistent_workers=persistent)
    with pytest.raises(LookupError, match="sample 5") as caught:
        list(source(given, seed=0, stream="train").epoch(0))
    assert alive() == (0, 0)
    del caught


class Seen(Dataset[Any]):
    """Shows what a worker's own code sees."""

    factor = 1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        return index * self.factor, info.dataset is self


def configure(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.factor = 10 + worker


def test_worker_info_shows_the_users_dataset() -> None:
    given = loader(Seen(), 2, num_workers=1, worker_init_fn=configure)
    batches = list(source(given, seed=0, stream="train").epoch(0))
    assert [batch[0].tolist() for batch in batches] == [[0, 10], [20, 30]]
    assert all(batch[1].all() for batch in batches)
    assert Seen.factor == 1


def test_what_spawned_workers_get_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(_Reseeding(Items(4))))
    before = torch.get_rng_state()
    try:
        assert same(again.__getitems__((7, [1, 2])), _Reseeding(Together(4)).__getitems__((7, [1, 2])))
    finally:
        torch.set_rng_state(before)
