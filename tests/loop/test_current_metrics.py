"""Metrics of evaluators are never those of an earlier evaluation where a new one is about to come at the same event."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event

pytestmark = pytest.mark.filterwarnings("error")


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


def mean(outputs: Tensor, batch: Tensor) -> Tensor:
    return outputs.mean()


def fit(start: Any = None, *, batches: int = 3, sized: bool = True, **changes: Any) -> pl.Stream:
    """Training in which the loss of any data after k batches is -k: each step takes 1 from the weight."""
    data = [torch.ones(2, 1)] * batches
    arguments: dict[str, Any] = {
        "task": pl.Task(forward=lambda module, batch: module(batch), loss=mean),
        "optimizer": pl.optim.sgd(lr=1.0),
        "max_duration": "3ep",
        "evaluators": {"val": [torch.ones(2, 1)]},
        **changes,
    }
    return pl.fit(model() if start is None else start, data if sized else Uncounted(data), **arguments)


INTERVALS: list[Any] = [
    *("1ep", "2ep", "1ba", "2ba", "3ba", "4sp", "0.25dur", "0.5dur"),
    lambda state: state.timestamp.batch % 2 == 0,
    lambda state: state.event is Event.EPOCH_END,
    lambda state: state.timestamp.batch > 3 and not state.metrics,
]


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    labels = ["val", "test", "other"][: draw(st.integers(1, 3))]
    data = [torch.ones(2, 1)]
    return {
        "batches": draw(st.integers(1, 4)),
        "sized": draw(st.booleans()),
        "max_duration": draw(st.sampled_from(["1ep", "2ep", "3ep", "5ba", "4ba"])),
        "evaluators": {label: pl.Evaluator(data, interval=draw(st.sampled_from(INTERVALS))) for label in labels},
        "order": draw(st.sampled_from(["current", "2021"])),
        "train_metrics": draw(st.sampled_from([None, [pl.metrics.loss()]])),
        "watch": draw(st.sampled_from([None, {Event.EPOCH_END, Event.BATCH_END, Event.FIT_END}])),
    }


def hold_to_the_law(run: dict[str, Any], start: Any = None, measured: dict[str, int] | None = None) -> None:
    """In a run with all events: what is there is of the last evaluation, and what will be measured at this count isn't.

    ``measured`` is the batch of the last evaluation of each label, where the run resumes.
    """
    pairs = [(event, state) for event, state in fit(start, **{**run, "watch": None})]
    labels = list(run["evaluators"])
    last: dict[str, int] = dict(measured or {})
    for index, (event, state) in enumerate(pairs):
        if event is Event.EVAL_END:
            last[str(state.evaluator)] = state.timestamp.batch
        under_way = {state.evaluator} if event.is_eval and event is not Event.EVAL_END else set()
        expected = {label: batch for label, batch in last.items() if label not in under_way | to_come(pairs, index)}
        found = {label: -round(float(state.metrics[label]["loss"])) for label in labels if label in state.metrics}
        assert found == expected, (index, event, state.timestamp)
        assert [label for label in state.metrics if label != "train"] == [label for label in labels if label in found]


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


@settings(deadline=None)
@given(run=runs())
def test_metrics_are_of_the_last_evaluation_and_not_there_where_they_are_about_to_be_measured(
    run: dict[str, Any],
) -> None:
    """Intervals in epochs, batches, samples, fractions, by functions of the State (one of which reads metrics); several
    evaluators, loaders without a length, both orders, training that ends within an epoch, metrics of training."""
    hold_to_the_law(run)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("interval", "at_epoch_end", "at_epoch_checkpoint"),
    [
        ("1ep", [None, None, None], [-3, -6, -9]),
        ("2ep", [None, None, -6], [None, -6, -6]),
        ("3ba", [-3, -6, -9], [-3, -6, -9]),
        ("2ba", [-2, -6, -8], [-2, -6, -8]),
        (0, [None, None, None], [None, None, None]),
        (lambda state: state.event is Event.EPOCH_END, [None, None, None], [-3, -6, -9]),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"watch": {Event.EPOCH_END, Event.EPOCH_CHECKPOINT}}, {"strict": True}])
def test_a_body_never_sees_the_epoch_before(
    interval: Any, at_epoch_end: list[Any], at_epoch_checkpoint: list[Any], settings: dict[str, Any], compile: bool
) -> None:
    """Three epochs of three batches; the loss after k batches is -k. None: not there."""
    if compile and settings.get("strict"):
        pytest.skip("strict=True and compile=True exclude each other")
    found: dict[str, list[Any]] = {"epoch_end": [], "epoch_checkpoint": []}
    last = None
    for event, last in fit(eval_interval=interval, compile=compile, **settings):
        if event in found:
            there = last.metrics.get("val")
            found[event].append(None if there is None else float(there["loss"]))
            if there is None:
                with pytest.raises(
                    pl.MissingNameError, match="read the new ones at BATCH_CHECKPOINT or EPOCH_CHECKPOINT"
                ):
                    last.metrics["val"]
    assert found == {"epoch_end": at_epoch_end, "epoch_checkpoint": at_epoch_checkpoint}


@pytest.mark.parametrize("settings", [{}, {"watch": {Event.FIT_END}}, {"verify": "2ba"}, {"microbatch_size": 1}])
def test_a_callback_and_an_algorithm_see_what_the_body_sees(settings: dict[str, Any]) -> None:
    """At each BATCH_END of two epochs of three batches, evaluated after batches 2, 4 and 6."""
    seen: dict[str, list[Any]] = {"callback": [], "algorithm": []}

    def loss_of(state: pl.State) -> float | None:
        return float(state.metrics["val"]["loss"]) if "val" in state.metrics else None

    class Own(pl.Callback):
        def batch_end(self, state: pl.State, logger: Any) -> None:
            seen["callback"].append(loss_of(state))

    @pl.algorithm(Event.BATCH_END)
    def own(state: pl.State) -> pl.State:
        seen["algorithm"].append(loss_of(state))
        return state

    pl.run(fit(eval_interval="2ba", max_duration="2ep", callbacks=[Own()], algorithms=[own], **settings))
    assert seen == {name: [None, None, -2.0, None, -4.0, None] for name in seen}


@pytest.mark.parametrize("interval", ["1ep", "2ep", "2ba", lambda state: state.timestamp.batch % 2 == 0])
def test_a_run_that_resumes_has_the_same_metrics_from_every_boundary(interval: Any, tmp_path: Any) -> None:
    """Kept in RAM and in a file, which has what the State has."""
    pairs = list(fit(eval_interval=interval))
    boundaries = [
        (index, state)
        for index, (event, state) in enumerate(pairs)
        if event in (Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)
    ]
    for index, state in boundaries:
        pl.save(state, tmp_path / "state.safetensors")
        loaded = pl.load(tmp_path / "state.safetensors", model=model())
        assert loaded.metrics == state.metrics
        rest = [(event, state.metrics) for event, state in pairs[index + 1 :]]
        for start in (state, loaded):
            again = [(event, state.metrics) for event, state in fit(start, eval_interval=interval)]
            assert again[1:] == rest, pairs[index][0]


def test_evaluation_by_itself_has_no_metrics_of_an_earlier_one() -> None:
    trained = pl.run(fit(max_duration="2ba", evaluators={"val": [torch.ones(2, 1)], "other": [torch.ones(2, 1)]}))
    moved = trained.replace(params={"weight": torch.tensor([[5.0]])})
    task = pl.Task(forward=lambda module, batch: module(batch), loss=mean)
    pairs = list(pl.evaluate(moved, {"val": [torch.ones(2, 1)]}, task=task))
    for event, state in pairs:
        new = event in (Event.EVAL_END, Event.EVAL_STANDALONE_END)
        assert state.metrics.get("val", {}).get("loss") == (5.0 if new else None)
        assert state.metrics["other"]["loss"] == -2.0


def test_what_compares_metrics_still_finds_them(tmp_path: Any) -> None:
    """Early stopping, a plateau, the best checkpoints and a logger, by hand: the loss is -1 a batch, three an epoch."""
    record = pl.loggers.InMemoryLogger()
    saver = pl.callbacks.CheckpointSaver(tmp_path, interval="1ep", keep_best=1, metric="val/loss", mode="max")
    last = pl.run(
        fit(
            max_duration="9ep",
            algorithms=[
                pl.algorithms.early_stopping("val/loss", mode="max", patience=2),
                pl.algorithms.reduce_on_plateau("val/loss", mode="max", patience=5),
            ],
            callbacks=[saver],
            loggers=[record],
        )
    )
    assert last.timestamp.epoch == 3
    assert [float(value) for _, value in record.metrics["val/loss"]] == [-3.0, -6.0, -9.0]
    assert float(pl.load(pl.best(tmp_path), model=model()).metrics["val"]["loss"]) == -3.0
    assert float(last.metrics["val"]["loss"]) == -9.0


def test_a_state_without_metrics_is_like_any_other() -> None:
    kept = next(state for event, state in fit() if event is Event.EPOCH_END and state.timestamp.epoch == 2)
    assert "val" not in kept.metrics
    leaves, structure = optree.tree_flatten(kept, namespace="pure_loop")
    assert "val" not in optree.tree_unflatten(structure, leaves).metrics
    for text in (repr(kept), str(kept), kept._repr_html_()):
        assert "val" not in text


@pytest.mark.slow
@settings(deadline=None, max_examples=500)
@given(run=runs())
def test_many_runs(run: dict[str, Any]) -> None:
    hold_to_the_law(run)
