"""``steps_per_call=``: batches are loaded ahead of the steps that go through them, where that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils import collate

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema
from pure_loop.compile.segment import Segment
from pure_loop.data.dataloaders import source
from pure_loop.data.source import Listed
from pure_loop.data.streams import Iterated
from tests.support import problem
from tests.support.compiling import assert_close, every_third, fit, mlp

pytestmark = pytest.mark.usefixtures("interpreted")

SEVEN = problem.points(7, 8, 1)
ROWS = [(torch.zeros(1), i) for i in range(4)]


@pytest.fixture(autouse=True)
def torchs_collate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries extend it when they are imported, and one that was extended is not trusted."""
    functions = collate.default_collate_fn_map
    for kind in [kind for kind, function in functions.items() if function.__module__ != collate.__name__]:
        monkeypatch.delitem(functions, kind)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each call went through."""
    found, real = list[int](), Segment.again
    monkeypatch.setattr(
        Segment, "again", lambda this, state, calls: (found.append(len(calls)), real(this, state, calls))[1]
    )
    return found


class Overwriting:
    """A loader that gives the same memory each time, with other numbers."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = (each.clone() for each in SEVEN[0])
        return ((x.copy_(inputs), y.copy_(targets)) for inputs, targets in SEVEN)


def as_often(model: Any = problem.mlp, **settings: Any) -> None:
    settings = {"model": model, "data": SEVEN, **settings}
    assert_close(fit(compile=True, steps_per_call=3, **settings), fit(**settings))


def remembering(step: Callable[[Any], Any]) -> dict[str, Any]:
    """An algorithm that remembers a number, which each step makes another one of."""

    def update(state: pl.State) -> pl.State:
        memory = state.algorithm_state["remembers"]
        beside_whole_numbers = torch.ones((), dtype=torch.int64) + memory
        params = {name: tensor + 0.01 * beside_whole_numbers for name, tensor in state.params.items()}
        return state.replace(params=params).remember("remembers", step(memory))

    return {"algorithms": [pl.Algorithm("remembers", {Event.BATCH_END: update}, init=lambda state: 0)]}


@pl.algorithm(Event.AFTER_LOSS)
def halves(state: pl.State) -> pl.State:
    """A count becomes a float beside whole numbers; it is not remembered, so that no type in the State changes."""
    return state.replace(loss=state.loss * (torch.ones((), dtype=torch.int32) * 2 ** (3 - state.timestamp.batch)))


# Settings, and through how many steps the first calls go: the first step after a State was observed copies, and is the
# loop's.
CALLS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "dropout and an average of the weights": ({"model": mlp, "algorithms": [ema(half_life="5sp")]}, [3, 3, 0]),
    "a loader that overwrites": ({"data": Overwriting()}, [1, 1, 1, 1, 1, 1, 0]),
    "ragged": ({"data": problem.points(size=(8, 8, 8, 8, 8, 5), seed=1)}, [3, 1, 0]),
    # Batch 3 (and 6) needs another graph, and so does what follows it.
    "another graph": ({"algorithms": [every_third]}, [2, 0]),
    # The loop takes those after which an evaluator is due (2, 5, 8), and those after them.
    "evaluators": ({"evaluators": problem.points(1), "eval_interval": "3ba"}, [1, 1, 0, 0]),
    "a count beside whole numbers": ({"algorithms": [halves]}, []),
    "one that becomes a float": (remembering(lambda number: number * 0.5 + 1.5), []),
    # Without a question that a graph would depend on: in the next call.
    "a float after 3": (remembering(lambda number: number + 1 + 0 * 2 ** (3 - number)), []),
}


@pytest.mark.parametrize("name", CALLS)
def test_several_steps_are_those_one_by_one(name: str, together: list[int]) -> None:
    settings, wanted = CALLS[name]
    as_often(**settings)
    assert together
    assert together[: len(wanted)] == wanted


def test_a_duration_in_seconds_is_looked_at_after_each_batch(together: list[int]) -> None:
    fit(problem.mlp, compile=True, steps_per_call=3, data=SEVEN, max_duration="40s", clock=count().__next__)
    assert set(together) <= {0, 1}


def test_loading_ahead_what_is_overwritten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Iterated, "batches_stay", True)
    with pytest.raises(AssertionError):
        as_often(data=Overwriting())


def own_collate(rows: list[Any]) -> Tensor:
    return torch.stack([x for x, _ in rows])


def test_which_batches_stay_and_which_that_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy: Any = type("Lazy", (), {"__len__": lambda self: 2, "__getitem__": lambda self, index: torch.zeros(2, 1)})()
    loaders: list[tuple[Any, bool, bool]] = [
        ([torch.zeros(2, 1)], True, True),
        (lazy, False, False),
        (iter([torch.zeros(2, 1)]), False, False),
        (DataLoader(ROWS, batch_size=2), True, True),
        (DataLoader(lazy, batch_size=None), False, False),
        (DataLoader(ROWS, batch_size=2, collate_fn=own_collate), False, False),
        (DataLoader(ROWS, batch_size=2, collate_fn=own_collate, num_workers=1), True, True),
        # In pinned memory of its own, whatever the loader does with what it was made of.
        (DataLoader(lazy, batch_size=None, pin_memory=True), False, True),
    ]
    for loader, *wanted in loaders:
        given = source(loader, seed=0, stream="train")
        assert [given.batches_stay, given.keeps_pinned] == wanted, loader
    # A collate that was extended is not trusted.
    monkeypatch.setitem(collate.default_collate_fn_map, torch.nn.Parameter, lambda batch, **_: batch[0])
    assert not source(DataLoader(ROWS, batch_size=2), seed=0, stream="train").batches_stay


def divides(state: pl.State) -> pl.State:
    step = torch.ones(()) * (2 if 1 / (4 - state.timestamp.batch) > 0.1 else 3)
    return state.replace(loss=state.loss * step)


def test_what_fails_fails_after_the_steps_before_it() -> None:
    """Whether the fifth step belongs to a call is asked before the call's steps run, and divides by zero."""
    settings: dict[str, Any] = {"compile": True, "model": problem.mlp}
    dividing = pl.Algorithm("divides", {Event.AFTER_LOSS: divides})
    for bad in (3, 6):
        data = [(x * float("nan") if i == bad else x, y) for i, (x, y) in enumerate(SEVEN)]
        with pytest.raises(pl.errors.NonFiniteError, match=rf"batch {bad} \(epoch 0, batch {bad} in it\)"):
            fit(steps_per_call=3, data=data, **settings)
        with pytest.raises(pl.errors.NonFiniteError if bad < 4 else ZeroDivisionError):
            fit(steps_per_call=4, data=data, algorithms=[dividing], **settings)


def test_no_second_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances by one when a batch is loaded, and by ten with a step or an evaluation."""
    now = [0.0]

    def later(seconds: float, function: Any) -> Any:
        def call(*given: Any) -> Any:
            now[0] += seconds
            return function(*given)

        return call

    monkeypatch.setattr(Segment, "_given", later(10, Segment._given))
    monkeypatch.setattr(Listed, "batches_stay", True)
    data: Any = type("Slow", (list,), {"__getitem__": later(1, list.__getitem__)})(SEVEN)
    settings: dict[str, Any] = {"evaluators": problem.points(1), "eval_interval": "5ba", "clock": lambda: now[0]}
    for steps in (1, 3):
        now[0] = 0.0
        state = fit(problem.mlp, data=data, compile=True, steps_per_call=steps, **settings)[0][1]
        # Those of the last step and of what follows it are counted with the next batch.
        assert state.timestamp.total_seconds == 7 + 6 * 10 + 10
