"""What a rehearsal passes does not fail later, and what it finds is named with its phase: Hypothesis draws mistakes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import pure_loop as pl

E = pl.Event
BATCHES = 3

Options = dict[str, Any]


def batch(**changes: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"x": torch.randn(4, 3, generator=generator), "y": torch.tensor([0, 1, 1, 0])}
    return {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}


def wrong_batch(mistake: str) -> dict[str, torch.Tensor]:
    return {
        "shape": batch(x=torch.zeros(4, 5)),
        "dtype": batch(x=torch.zeros(4, 3, dtype=torch.int64)),
        "dtype of targets": batch(y=torch.tensor([0.0, 1.0, 1.0, 0.0])),
        "key": batch(y=None),
        "key of inputs": batch(x=None),
    }[mistake]


KINDS = ["shape", "dtype", "dtype of targets", "key", "key of inputs"]


def plain(folder: Path) -> Options:
    """A run without a mistake."""
    task = pl.Task(
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda outputs, batch: cross_entropy(outputs, batch["y"]),
    )
    return {
        "train": [batch()] * BATCHES,
        "evaluators": {"val": pl.Evaluator([batch()] * 2, metrics=[pl.metrics.loss(), accuracy("y")])},
        "task": task,
        "optimizer": pl.optim.adamw(lr=pl.schedules.linear(0.01, 0.0, "1dur")),
        "max_duration": "3ep",
        "algorithms": [],
        "callbacks": [pl.callbacks.CheckpointSaver(folder / "checkpoints")],
        "loggers": [pl.loggers.CSVLogger(folder / "log" / "metrics.csv")],
    }


def accuracy(key: str, *, fails_at_the_end: bool = False) -> pl.Metric:
    def compute(pair: Any) -> Any:
        return pair[0] / pair[1 if not fails_at_the_end else 2]

    return pl.Metric(
        "right",
        lambda: (torch.tensor(0), 0),
        lambda pair, outputs, batch: (pair[0] + (outputs.argmax(1) == batch[key]).sum(), pair[1] + len(outputs)),
        compute,
    )


@attrs.frozen
class Mistake:
    """A change of the run, and the words of the phase that finds it."""

    name: str
    change: Callable[[Options, Path], None]
    phase: str

    def __repr__(self) -> str:
        return self.name


def mistakes() -> Iterator[Mistake]:
    for kind in KINDS:

        def in_training(options: Options, folder: Path, kind: str = kind) -> None:
            options["train"] = [wrong_batch(kind)] * BATCHES

        def in_evaluation(options: Options, folder: Path, kind: str = kind) -> None:
            options["evaluators"]["test"] = pl.Evaluator([wrong_batch(kind)], metrics=[pl.metrics.loss()])

        yield Mistake(f"{kind} in training", in_training, "batch 0")
        yield Mistake(f"{kind} in evaluation", in_evaluation, "evaluator 'test', first batch")

    def in_metric(options: Options, folder: Path) -> None:
        options["evaluators"]["iou"] = pl.Evaluator([batch()], metrics=[accuracy("labels")])

    def in_compute(options: Options, folder: Path) -> None:
        options["evaluators"]["end"] = pl.Evaluator([batch()], metrics=[accuracy("y", fails_at_the_end=True)])

    yield Mistake("key in a metric", in_metric, "metric 'right' of evaluator 'iou'")
    yield Mistake("index at the end of a metric", in_compute, "metric 'right' of evaluator 'end'")

    def in_callback(options: Options, folder: Path) -> None:
        def watch(event: pl.Event, state: pl.State) -> None:
            if event is E.EPOCH_CHECKPOINT:
                assert state.metrics["val"]["accuracy"] >= 0

        options["callbacks"].append(watch)

    yield Mistake("key in a callback", in_callback, "callback")

    def in_late_epoch(options: Options, folder: Path) -> None:
        @pl.algorithm(E.AFTER_LOSS)
        def penalty(state: pl.State) -> pl.State:
            if state.timestamp.epoch < 2:
                return state
            return state.replace(loss=state.loss + state.params["nowhere"].sum())

        options["algorithms"].append(penalty)

    def rarely(options: Options, folder: Path) -> None:
        @pl.algorithm(E.BATCH_END, when="7ba")
        def cut(state: pl.State) -> pl.State:
            return state.replace(params={name: tensor[:1] for name, tensor in state.params.items()})

        options["algorithms"].append(cut)

    yield Mistake("key in an algorithm of the last epoch", in_late_epoch, "algorithm 'penalty' at AFTER_LOSS")
    yield Mistake("shape in an algorithm that is rarely due", rarely, "algorithm 'cut' at BATCH_END")

    def blocked(folder: Path) -> Path:
        (folder / "file").write_text("in the way")
        return folder / "file" / "inside"

    def saver(options: Options, folder: Path) -> None:
        options["callbacks"][0] = pl.callbacks.CheckpointSaver(blocked(folder))

    def logger(options: Options, folder: Path) -> None:
        options["loggers"] = [pl.loggers.JSONLinesLogger(blocked(folder) / "metrics.jsonl")]

    def load_path(options: Options, folder: Path) -> None:
        options["load_path"] = folder / "missing.safetensors"

    yield Mistake("path of checkpoints", saver, "folder of CheckpointSaver")
    yield Mistake("path of a logger", logger, "path of JSONLinesLogger")
    yield Mistake("path of a checkpoint to load", load_path, "arguments of fit")

    def schedule(options: Options, folder: Path) -> None:
        options["optimizer"] = pl.optim.sgd(lr=lambda t: 0.1 - 0.2 * (t.batch > 6))

    def unsaved(options: Options, folder: Path) -> None:
        keeper = pl.Algorithm("keeper", {E.BATCH_END: lambda state: state}, init=lambda state: {"a": object()})
        options["algorithms"].append(keeper)

    yield Mistake("learning rate below 0", schedule, "schedule of learning rate, end of the run")
    yield Mistake("an object in algorithm state", unsaved, "callback CheckpointSaver at FIT_START")


MISTAKES = list(mistakes())
PATHS = {"path of checkpoints", "path of a logger", "path of a checkpoint to load"}


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def make(drawn: list[Mistake], folder: Path) -> Options:
    options = plain(folder)
    for mistake in drawn:
        mistake.change(options, folder)
    return options


def rehearsed(options: Options) -> pl.RehearsalError | None:
    options = dict(options)
    try:
        pl.rehearse(model(), options.pop("train"), **options)
    except pl.RehearsalError as error:
        return error
    return None


def trained(options: Options) -> Exception | None:
    options = dict(options)
    try:
        pl.run(pl.fit(model(), options.pop("train"), **options))
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("mistake", MISTAKES, ids=repr)
def test_a_mistake_is_named_with_its_phase_and_ends_the_run(mistake: Mistake, tmp_path: Path) -> None:
    error = rehearsed(make([mistake], tmp_path))
    assert error is not None
    phases = [phase for phase, _ in error.failures]
    assert len(phases) == 1
    assert mistake.phase in phases[0]
    assert mistake.phase in str(error)
    assert error.__cause__ is error.failures[0][1]
    assert trained(make([mistake], tmp_path)) is not None


@settings(max_examples=15)
@given(st.lists(st.sampled_from(MISTAKES), unique_by=repr, max_size=3))
def test_what_passes_does_not_fail_later_and_what_fails_fails(drawn: list[Mistake]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        error = rehearsed(make(drawn, folder))
        assert (error is not None) == bool(drawn)
        assert {path.name for path in folder.iterdir()} <= {"file"}
        assert (trained(make(drawn, folder)) is not None) == bool(drawn)


@settings(max_examples=15)
@given(st.lists(st.sampled_from(MISTAKES), unique_by=lambda mistake: mistake.phase, min_size=2, max_size=3))
def test_mistakes_of_evaluators_paths_and_schedules_are_found_together(drawn: list[Mistake]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        error = rehearsed(make(drawn, folder))
        assert error is not None
        if any("arguments of fit" in mistake.phase for mistake in drawn):
            return
        independent = ("evaluator", "folder", "path", "schedule")
        for mistake in drawn:
            if mistake.phase.startswith(independent):
                assert mistake.phase in str(error)
