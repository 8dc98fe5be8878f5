"""What a rehearsal passes does not fail later, and what it finds is named with its phase: Hypothesis draws mistakes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import pure_loop as pl
from tests.support.tiers import examples

E = pl.Event
BATCHES = 3

Options = dict[str, Any]


def batch(**changes: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"x": torch.randn(4, 3, generator=generator), "y": torch.tensor([0, 1, 1, 0])}
    return {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}


WRONG = {
    "shape": batch(x=torch.zeros(4, 5)),
    "dtype": batch(x=torch.zeros(4, 3, dtype=torch.int64)),
    "dtype of targets": batch(y=torch.tensor([0.0, 1.0, 1.0, 0.0])),
    "key": batch(y=None),
    "key of inputs": batch(x=None),
}


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


def setting(*path: str) -> Callable[[Any], Callable[[Options, Path], None]]:
    """A change of one option, or of one in another: to a value, or to what a function of the folder gives."""

    def to(value: Any) -> Callable[[Options, Path], None]:
        def change(options: Options, folder: Path) -> None:
            *outer, last = path
            for name in outer:
                options = options[name]
            new = value(folder) if callable(value) and not isinstance(value, pl.Algorithm) else value
            if isinstance(options.get(last), list) and last != "train":
                options[last].append(new)
            else:
                options[last] = new

        return change

    return to


def blocked(folder: Path) -> Path:
    (folder / "file").write_text("in the way")
    return folder / "file" / "inside"


def reads_too_early(event: pl.Event, state: pl.State) -> None:
    if event is E.EPOCH_CHECKPOINT:
        assert state.metrics["val"]["accuracy"] >= 0


@pl.algorithm(E.AFTER_LOSS)
def penalty(state: pl.State) -> pl.State:
    return state if state.timestamp.epoch < 2 else state.replace(loss=state.loss + state.params["nowhere"].sum())


@pl.algorithm(E.BATCH_END, when="7ba")
def cut(state: pl.State) -> pl.State:
    return state.replace(params={name: tensor[:1] for name, tensor in state.params.items()})


def evaluator(label: str, *metrics: pl.Metric, data: Any = None) -> Callable[[Options, Path], None]:
    return setting("evaluators", label)(pl.Evaluator([data or batch()], metrics=list(metrics)))


def saver(options: Options, folder: Path) -> None:
    options["callbacks"][0] = pl.callbacks.CheckpointSaver(blocked(folder))


def logger(options: Options, folder: Path) -> None:
    options["loggers"] = [pl.loggers.JSONLinesLogger(blocked(folder) / "metrics.jsonl")]


KEEPER = pl.Algorithm("keeper", {E.BATCH_END: lambda state: state}, init=lambda state: {"a": object()})
FALLING = pl.optim.sgd(lr=lambda t: 0.1 - 0.2 * (t.batch > 6))
MISTAKES = [
    Mistake(name, change, phase)
    for name, change, phase in (
        *((f"{kind} in training", setting("train")([wrong] * BATCHES), "batch 0") for kind, wrong in WRONG.items()),
        *(
            (f"{kind} in evaluation", evaluator("test", pl.metrics.loss(), data=wrong), "evaluator 'test', first batch")
            for kind, wrong in WRONG.items()
        ),
        ("key in a metric", evaluator("iou", accuracy("labels")), "metric 'right' of evaluator 'iou'"),
        (
            *("index at the end of a metric", evaluator("end", accuracy("y", fails_at_the_end=True))),
            "metric 'right' of evaluator 'end'",
        ),
        ("key in a callback", setting("callbacks")(lambda folder: reads_too_early), "callback"),
        ("an algorithm of the last epoch", setting("algorithms")(penalty), "algorithm 'penalty' at AFTER_LOSS"),
        ("an algorithm that is rarely due", setting("algorithms")(cut), "algorithm 'cut' at BATCH_END"),
        ("path of checkpoints", saver, "folder of CheckpointSaver"),
        ("path of a logger", logger, "path of JSONLinesLogger"),
        ("checkpoint", setting("load_path")(lambda folder: folder / "missing.safetensors"), "arguments of fit"),
        ("rate below 0", setting("optimizer")(FALLING), "schedule of learning rate, end of the run"),
        ("an object in algorithm state", setting("algorithms")(KEEPER), "callback CheckpointSaver at FIT_START"),
    )
]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def make(drawn: list[Mistake], folder: Path) -> Options:
    options = plain(folder)
    for mistake in drawn:
        mistake.change(options, folder)
    return options


def failing(how: Any, options: Options) -> Any:
    """The error of a rehearsal, or of a run."""
    try:
        found = how(model(), options["train"], **{name: each for name, each in options.items() if name != "train"})
        if how is pl.fit:
            pl.run(found)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("mistake", MISTAKES, ids=repr)
def test_a_mistake_is_named_with_its_phase_and_ends_the_run(mistake: Mistake, tmp_path: Path) -> None:
    error = failing(pl.rehearse, make([mistake], tmp_path))
    assert error is not None
    phases = [phase for phase, _ in error.failures]
    assert len(phases) == 1
    assert mistake.phase in phases[0]
    assert mistake.phase in str(error)
    assert error.__cause__ is error.failures[0][1]
    assert failing(pl.fit, make([mistake], tmp_path)) is not None


@examples(8, 100)
@given(st.lists(st.sampled_from(MISTAKES), unique_by=repr, max_size=3))
def test_what_passes_does_not_fail_later_and_what_fails_fails(drawn: list[Mistake]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        error = failing(pl.rehearse, make(drawn, folder))
        assert (error is not None) == bool(drawn)
        assert {path.name for path in folder.iterdir()} <= {"file"}
        assert (failing(pl.fit, make(drawn, folder)) is not None) == bool(drawn)


INDEPENDENT = [mistake for mistake in MISTAKES if mistake.phase.startswith(("evaluator", "folder", "path", "schedule"))]


@examples(8, 100)
@given(st.lists(st.sampled_from(INDEPENDENT), unique_by=lambda mistake: mistake.phase, min_size=2, max_size=3))
def test_mistakes_of_evaluators_paths_and_schedules_are_found_together(drawn: list[Mistake]) -> None:
    with tempfile.TemporaryDirectory() as name:
        error = failing(pl.rehearse, make(drawn, Path(name)))
        assert all(mistake.phase in str(error) for mistake in drawn)


def test_a_place_is_tried_where_the_arguments_are_refused(tmp_path: Path) -> None:
    saver = pl.callbacks.CheckpointSaver(blocked(tmp_path), keep_best=1, metric="test/loss")
    error = failing(pl.rehearse, plain(tmp_path) | {"callbacks": [saver]})
    assert [phase for phase, _ in error.failures] == ["arguments of fit", "folder of CheckpointSaver"]
