"""Metrics of evaluators are never those of an earlier evaluation where a new one is about to come at the same event."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from tests.support import problem
from tests.support.tiers import examples

BATCH = torch.ones(2, 1)
TASK = pl.Task(forward=lambda module, batch: module(batch), loss=lambda outputs, batch: outputs.mean())


def model() -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def fit(start: Any = None, *, batches: int = 3, sized: bool = True, **changes: Any) -> pl.Stream:
    """Training in which the loss of any data after k batches is -k: each step takes 1 from the weight."""
    data = [BATCH] * batches
    unsized: Any = type("Unsized", (), {"__iter__": lambda self: iter(data)})()
    arguments = {"loss": TASK, "optimizer": pl.optim.sgd(lr=1.0), "max_duration": "3ep", "strict": None}
    settings = {**arguments, "evaluators": {"val": [BATCH]}, **changes}
    return problem.fit(model() if start is None else start, data if sized else unsized, **settings)


def at_epochs(state: pl.State) -> bool:
    return state.event is Event.EPOCH_END


INTERVALS: list[Any] = [
    *("1ep", "2ep", "1ba", "2ba", "3ba", "4sp", "0.25dur", "0.5dur", at_epochs),
    lambda state: state.timestamp.batch % 2 == 0,
    lambda state: state.timestamp.batch > 3 and not state.metrics,
]


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    labels = ["val", "test", "other"][: draw(st.integers(1, 3))]
    return {
        "batches": draw(st.integers(1, 4)),
        "sized": draw(st.booleans()),
        "max_duration": draw(st.sampled_from(["1ep", "2ep", "3ep", "5ba", "4ba"])),
        "evaluators": {label: pl.Evaluator([BATCH], interval=draw(st.sampled_from(INTERVALS))) for label in labels},
        "order": draw(st.sampled_from(["current", "2021"])),
        **draw(st.sampled_from([{}, {"train_metrics": [pl.metrics.loss()]}, {"verify": "2ba"}, {"strict": True}])),
    }


def to_come(pairs: list[tuple[Event, pl.State]], index: int) -> set[str | None]:
    """The evaluators that begin after an event with the same counts, and before a checkpoint or the next batch.

    What was not due at the last batch or epoch is measured before FIT_END, and may be read until EVAL_BEFORE_ALL.
    """
    (_, now), found = pairs[index], set()
    for event, state in pairs[index + 1 :]:
        if event in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.BEFORE_DATALOADER, Event.EPOCH_END):
            break
        if (state.timestamp.batch, state.timestamp.epoch) != (now.timestamp.batch, now.timestamp.epoch):
            break
        if event is Event.EVAL_START and pairs[index][0] not in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT):
            found.add(state.evaluator)
    return found


@examples(40, 1000)
@given(run=runs())
def test_metrics_are_of_the_last_evaluation_and_not_there_where_new_ones_are_to_come(run: dict[str, Any]) -> None:
    """Intervals in epochs, batches, samples, fractions, by functions of the State (one of which reads metrics); several
    evaluators, loaders without a length, both orders, training that ends within an epoch, metrics of training.

    A callback and an algorithm see what the body sees, and so does a run that resumes.
    """
    seen: list[list[str]] = []
    handled: dict[Any, list[str]] = {}

    @pl.algorithm(Event.BATCH_END)
    def own(state: pl.State) -> pl.State:
        handled[state.timestamp] = list(state.metrics)
        return state

    pairs = list(fit(callbacks=[lambda event, state: seen.append(list(state.metrics))], algorithms=[own], **run))
    labels, last = list(run["evaluators"]), dict[str, int]()
    for index, (event, state) in enumerate(pairs):
        if event is Event.EVAL_END:
            last[str(state.evaluator)] = state.timestamp.batch
        under_way = {state.evaluator} if event.is_eval and event is not Event.EVAL_END else set()
        expected = {label: batch for label, batch in last.items() if label not in under_way | to_come(pairs, index)}
        found = {label: -round(float(state.metrics[label]["loss"])) for label in labels if label in state.metrics}
        assert found == expected, (index, event, state.timestamp)
        if event is Event.EPOCH_END and last.keys() - found.keys():
            with pytest.raises(pl.errors.MissingNameError, match="read the new ones at BATCH_CHECKPOINT or EPOCH_CHE"):
                state.metrics[min(last.keys() - found.keys())]
        assert [label for label in state.metrics if label != "train"] == [label for label in labels if label in found]
        assert seen[index] == list(state.metrics)
        assert event is not Event.BATCH_END or handled[state.timestamp] == seen[index]
    if run["order"] == "current":
        middle = next(index for index, (event, _) in enumerate(pairs) if event is Event.BATCH_CHECKPOINT)
        again = list(fit(pairs[middle][1], **run))
        assert [state.metrics for _, state in again[1:]] == [state.metrics for _, state in pairs[middle + 1 :]]


def test_evaluation_by_itself_has_no_metrics_of_an_earlier_one() -> None:
    trained = pl.run(fit(max_duration="2ba", evaluators={"val": [BATCH], "other": [BATCH]}))
    moved = trained.replace(params={"weight": torch.tensor([[5.0]])})
    for event, state in pl.evaluate(moved, {"val": [BATCH]}, loss=TASK):
        new = event in (Event.EVAL_END, Event.EVAL_STANDALONE_END)
        assert state.metrics.get("val", {}).get("loss") == (5.0 if new else None)
        assert state.metrics["other"]["loss"] == -2.0
