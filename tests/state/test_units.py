"""When intervals and schedules come round in a run, and those in a unit that never moves there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from pure_loop.errors import ArgumentError, DataError
from tests.support.problem import cross_entropy, fit, points, run

S = pl.schedules


def noted(event: Event, interval: str, **options: Any) -> list[int]:
    """After how many batches an algorithm at this event is called, of two epochs of four."""
    called: list[int] = []

    @pl.algorithm(event, when=pl.every(interval))
    def note(state: pl.State) -> pl.State:
        called.append(state.timestamp.batch)
        return state

    run(algorithms=[note], **{"data": points(4), **options})
    return called


class Unsized:
    def __iter__(self) -> Any:
        return iter(points(4))


def test_an_interval_is_due_at_the_same_batches_for_all() -> None:
    for event, interval, options, batches in (
        (Event.BATCH_END, "3ba", {}, [3, 6]),
        (Event.BATCH_END, "0.25dur", {"max_duration": "8ba"}, [2, 4, 6, 8]),
        (Event.BATCH_END, "0.25dur", {}, [2, 4, 6, 8]),
        (Event.BATCH_END, "0.25dur", {"batches_per_epoch": 2}, [1, 2, 3, 4]),
        (Event.BATCH_END, "0.25dur", {"data": iter(points(8)), "batches_per_epoch": 4}, [2, 4, 6, 8]),
        (Event.BATCH_END, "0.25dur", {"data": Unsized()}, []),  # its fractions are at the ends of epochs
        (Event.EPOCH_END, "0.25dur", {"data": Unsized()}, [4, 8]),
        *((Event.EPOCH_END, interval, {}, [4, 8]) for interval in ("1ep", "0.5dur", "4ba")),
        *((Event.EPOCH_END, interval, {}, [8]) for interval in ("2ep", "1dur")),
    ):
        assert noted(event, interval, **options) == batches
    assert run(evaluators=points(1), eval_interval=0).timestamp.batch == 6  # never


class Reports(pl.Callback):
    def __init__(self, interval: str) -> None:
        self.every = pl.every(interval)

    def batch_end(self, state: pl.State, logger: Any) -> None:
        self.every(state)


def shrink(event: Event, interval: str) -> pl.Algorithm:
    return pl.Algorithm("shrink", {event: lambda state: state}, when=pl.every(interval))


def partition(lr: Any) -> pl.optim.Optimizer:
    parts = {"a": pl.optim.sgd(lr=0.1), "b": pl.optim.from_torch(torch.optim.RMSprop, lr=lr)}
    return pl.optim.partition(parts, label=lambda name, tensor: "a" if tensor.ndim > 1 else "b")


LINE, WARM = S.linear(0.1, 0.0, "100tok"), S.warmup("10tok", S.cosine("9ba", peak=1.0))
IN_TOKENS: dict[str, Callable[[str], dict[str, Any]]] = {
    "rate of sgd ('100tok')": lambda path: {"optimizer": pl.optim.sgd(lr=LINE)},
    "rate of adamw ('10tok')": lambda path: {"optimizer": pl.optim.adamw(lr=WARM)},
    "rate of sgd ('50tok')": lambda path: {"optimizer": pl.optim.sgd(lr=S.multistep(["1ep", "50tok"], gamma=0.1))},
    "rate of lion ('100tok')": lambda path: {"optimizer": pl.optim.lion(lr=0.5 * LINE)},
    "rate of from_torch(RMSprop) ('b')": lambda path: {"optimizer": partition(LINE)},
    "evaluator 'val' ('50tok')": lambda path: {"evaluators": {"val": points(1)}, "eval_interval": "50tok"},
    "algorithm 'shrink' ('100tok')": lambda path: {"algorithms": [shrink(Event.BATCH_END, "100tok")]},
    "algorithm 'ema' ('100tok')": lambda path: {"algorithms": [pl.algorithms.ema(half_life="100tok")]},
    "Reports ('7tok')": lambda path: {"callbacks": [Reports("7tok")]},
    "ConsoleLogger ('7tok')": lambda path: {"loggers": [pl.loggers.ConsoleLogger(interval="7tok")]},
    "CheckpointSaver (": lambda path: {"callbacks": [pl.callbacks.CheckpointSaver(path, interval="50tok")]},
}
WAYS: list[dict[str, Any]] = [
    {},
    {"watch": {Event.BATCH_END}},
    {"order": "2021"},
    {"compile": True, "watch": {Event.BATCH_END}, "strict": None},
]


@pytest.mark.parametrize("says", IN_TOKENS)
def test_whatever_counts_tokens_that_no_batch_has_is_named_before_the_first_trains(says: str, tmp_path: Any) -> None:
    make = IN_TOKENS[says]
    for way in WAYS if "100tok" in says and ("sgd" in says or "shrink" in says) else WAYS[:1]:
        seen: list[Event] = []
        with interpreted(), pytest.raises(DataError) as caught:
            seen.extend(event for event, _ in fit(**make(str(tmp_path)), **way))
        for text in (says, "counts tokens, and batch 0 has none", "loss=pl.Task(loss=..., tokens="):
            assert text in str(caught.value)
        assert Event.BATCH_END not in seen
    task = pl.Task(loss=lambda outputs, batch: cross_entropy(outputs, batch[1]), tokens=lambda batch: len(batch[0]))
    assert run(loss=task, **make(str(tmp_path))).timestamp.token == 24


def test_batches_without_tokens_between_others() -> None:
    """A count of one's own may be 0 in the first batch, and any in a later one."""
    counts = iter([0, 5, 0])
    task = pl.Task(loss=lambda outputs, batch: cross_entropy(outputs, batch[1]), tokens=lambda batch: next(counts))
    assert run(loss=task, optimizer=pl.optim.sgd(lr=LINE), max_duration="1ep").timestamp.token == 5


def test_iterations_that_there_are_not() -> None:
    """At the call; with an iteration_length there are some."""
    for options, says in (
        ({"optimizer": pl.optim.sgd(lr=S.linear(0.1, 0.0, "2iter"))}, r"rate of sgd \('2iter'\)"),
        ({"algorithms": [shrink(Event.ITERATION_END, "1iter")]}, r"algorithm 'shrink' \('1iter'\)"),
        ({"callbacks": [Reports("1iter")]}, r"Reports \('1iter'\)"),
    ):
        with pytest.raises(ArgumentError, match=rf"{says} counts iterations.*iteration_length="):
            fit(**options)
        assert run(iteration_length="1ep", **options).timestamp.iteration == 2
