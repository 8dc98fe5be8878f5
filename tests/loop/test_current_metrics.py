"""Metrics of evaluators are never those of an earlier evaluation where a new one is about to come at the same event."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from tests.support import problem
from tests.support.tiers import examples

BATCH = torch.ones(2, 1)


class Uncounted:
    """Batches without a length."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def model() -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


TASK = pl.Task(forward=lambda module, batch: module(batch), loss=lambda outputs, batch: outputs.mean())


def fit(start: Any = None, *, batches: int = 3, sized: bool = True, **changes: Any) -> pl.Stream:
    """Training in which the loss of any data after k batches is -k: each step takes 1 from the weight."""
    data: Any = [BATCH] * batches
    arguments = {"loss": None, "task": TASK, "optimizer": pl.optim.sgd(lr=1.0), "max_duration": "3ep", "strict": None}
    settings = {**arguments, "evaluators": {"val": [BATCH]}, **changes}
    return problem.fit(model() if start is None else start, data if sized else Uncounted(data), **settings)


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
        "train_metrics": draw(st.sampled_from([None, [pl.metrics.loss()]])),
        "strict": draw(st.sampled_from([None, True])),
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


@examples(60, 1000)
@given(run=runs())
def test_metrics_are_of_the_last_evaluation_and_not_there_where_they_are_about_to_be_measured(
    run: dict[str, Any],
) -> None:
    """Intervals in epochs, batches, samples, fractions, by functions of the State (one of which reads metrics); several
    evaluators, loaders without a length, both orders, training that ends within an epoch, metrics of training."""
    seen: list[list[str]] = []
    pairs = list(fit(callbacks=[lambda event, state: seen.append(list(state.metrics))], **run))
    labels, last = list(run["evaluators"]), dict[str, int]()
    for index, (event, state) in enumerate(pairs):
        if event is Event.EVAL_END:
            last[str(state.evaluator)] = state.timestamp.batch
        under_way = {state.evaluator} if event.is_eval and event is not Event.EVAL_END else set()
        expected = {label: batch for label, batch in last.items() if label not in under_way | to_come(pairs, index)}
        found = {label: -round(float(state.metrics[label]["loss"])) for label in labels if label in state.metrics}
        assert found == expected, (index, event, state.timestamp)
        assert [label for label in state.metrics if label != "train"] == [label for label in labels if label in found]
        assert seen[index] == list(state.metrics)  # a callback sees what the body sees


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])  # compiled: a graph each
def test_a_body_never_sees_the_epoch_before(compile: bool) -> None:
    """Three epochs of three batches; the loss after k batches is -k. None: not there."""
    watch, never = {Event.EPOCH_END, Event.EPOCH_CHECKPOINT}, [None, None, None]
    for interval, at_epoch_end, at_checkpoint in (
        ("2ep", [None, None, -6], [None, -6, -6]),
        ("2ba", [-2, -6, -8], [-2, -6, -8]),
        (0, never, never),
        (at_epochs, never, [-3, -6, -9]),
    ):
        found: dict[Event, list[Any]] = {event: [] for event in watch}
        with interpreted():
            for event, last in fit(eval_interval=interval, compile=compile, watch=watch):
                there = last.metrics.get("val")
                found[event].append(None if there is None else float(there["loss"]))
                if there is None:
                    with pytest.raises(pl.MissingNameError, match="read the new ones at BATCH_CHECKPOINT or EPOCH_CHE"):
                        last.metrics["val"]
        assert found == {Event.EPOCH_END: at_epoch_end, Event.EPOCH_CHECKPOINT: at_checkpoint}


def test_an_algorithm_sees_what_the_body_sees() -> None:
    """At each BATCH_END of two epochs of three batches, evaluated after batches 2, 4 and 6."""
    seen: list[Any] = []

    @pl.algorithm(Event.BATCH_END)
    def own(state: pl.State) -> pl.State:
        seen.append(float(state.metrics["val"]["loss"]) if "val" in state.metrics else None)
        return state

    for settings in ({}, {"watch": {Event.FIT_END}}, {"verify": "2ba"}, {"microbatch_size": 1}):
        pl.run(fit(eval_interval="2ba", max_duration="2ep", algorithms=[own], **settings))
        assert seen == [None, None, -2.0, None, -4.0, None], settings
        seen.clear()


@pytest.mark.parametrize("interval", ["2ep", INTERVALS[-2]], ids=["2ep", "function"])
def test_a_run_that_resumes_has_the_same_metrics_from_every_boundary(interval: Any, tmp_path: Any) -> None:
    """Kept in RAM and in a file, which has what the State has."""
    pairs = list(fit(eval_interval=interval))
    boundaries = (Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)
    for index, state in [(index, state) for index, (event, state) in enumerate(pairs) if event in boundaries]:
        pl.save(state, tmp_path / "state.safetensors")
        loaded = pl.load(tmp_path / "state.safetensors", model=model())
        assert loaded.metrics == state.metrics
        rest = [(event, state.metrics) for event, state in pairs[index + 1 :]]
        for start in (state, loaded):
            again = [(event, state.metrics) for event, state in fit(start, eval_interval=interval)]
            assert again[1:] == rest, pairs[index][0]


def test_evaluation_by_itself_has_no_metrics_of_an_earlier_one() -> None:
    trained = pl.run(fit(max_duration="2ba", evaluators={"val": [BATCH], "other": [BATCH]}))
    moved = trained.replace(params={"weight": torch.tensor([[5.0]])})
    for event, state in pl.evaluate(moved, {"val": [BATCH]}, task=TASK):
        new = event in (Event.EVAL_END, Event.EVAL_STANDALONE_END)
        assert state.metrics.get("val", {}).get("loss") == (5.0 if new else None)
        assert state.metrics["other"]["loss"] == -2.0


def test_what_compares_metrics_still_finds_them(tmp_path: Any) -> None:
    """Early stopping, a plateau, the best checkpoints and a logger, by hand: the loss is -1 a batch, three an epoch."""
    record = pl.loggers.InMemoryLogger()
    of_loss: dict[str, Any] = {"metric": "val/loss", "mode": "max"}
    saver = pl.callbacks.CheckpointSaver(tmp_path, interval="1ep", keep_best=1, **of_loss)
    stopping = pl.algorithms.early_stopping(patience=2, **of_loss)
    plateau = pl.algorithms.reduce_on_plateau(patience=5, **of_loss)
    last = pl.run(fit(max_duration="9ep", algorithms=[stopping, plateau], callbacks=[saver], loggers=[record]))
    assert last.timestamp.epoch == 3
    assert [float(value) for _, value in record.metrics["val/loss"]] == [-3.0, -6.0, -9.0]
    assert float(pl.load(pl.best(tmp_path), model=model()).metrics["val"]["loss"]) == -3.0
    assert float(last.metrics["val"]["loss"]) == -9.0


def test_a_state_without_metrics_is_like_any_other() -> None:
    kept = next(state for event, state in fit() if event is Event.EPOCH_END and state.timestamp.epoch == 2)
    leaves, structure = optree.tree_flatten(kept, namespace="pure_loop")
    assert "val" not in optree.tree_unflatten(structure, leaves).metrics
    assert not any("val" in text for text in (repr(kept), str(kept), kept._repr_html_(), kept.metrics))
