"""What a rehearsal passes does not fail later, and what it finds is named with its phase: Hypothesis draws mistakes."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import pure_loop as pl
from tests.support.tiers import examples

E = pl.Event

Options = dict[str, Any]


def batch(**changes: Any) -> dict[str, torch.Tensor]:
    tensors = {"x": torch.linspace(-1, 1, 12).view(4, 3), "y": torch.tensor([0, 1, 1, 0])}
    return {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}


WRONG = {
    "shape": batch(x=torch.zeros(4, 5)),
    "dtype": batch(x=torch.zeros(4, 3, dtype=torch.int64)),
    "dtype of targets": batch(y=torch.tensor([0.0, 1.0, 1.0, 0.0])),
    "key": batch(y=None),
}


TASK = pl.Task(
    forward=lambda model, batch: model(batch["x"]), loss=lambda outputs, batch: cross_entropy(outputs, batch["y"])
)


def plain(folder: Path) -> Options:
    """A run without a mistake."""
    return {
        "train": [batch()] * 3,
        "evaluators": {"val": pl.Evaluator([batch()] * 2, metrics=[pl.metrics.loss(), accuracy("y")])},
        "loss": TASK,
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


Change = Callable[[Options, Path], object]


def given(**options: Any) -> Change:
    """Other options, and more of those that are lists; values may be functions of the folder."""

    def change(run: Options, folder: Path) -> None:
        for name, value in options.items():
            made = value(folder) if inspect.isfunction(value) else value
            run[name] = [*run[name], made] if name in ("algorithms", "callbacks") else made

    return change


def blocked(folder: Path) -> Path:
    folder.joinpath("file").write_text("in the way")
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


def evaluator(label: str, *metrics: pl.Metric, data: Any = None) -> Change:
    return lambda run, _: run["evaluators"].update({label: pl.Evaluator([data or batch()], metrics=list(metrics))})


def saver(options: Options, folder: Path) -> None:
    options["callbacks"][0] = pl.callbacks.CheckpointSaver(blocked(folder))


KEEPER = pl.Algorithm("keeper", {E.BATCH_END: lambda state: state}, init=lambda state: {"a": object()})
FALLING = pl.optim.sgd(lr=lambda t: 0.1 - 0.2 * (t.batch > 6))
LOGGER = lambda folder: [pl.loggers.JSONLinesLogger(blocked(folder) / "metrics.jsonl")]  # noqa: E731
# What is changed, and the words of the phase that finds it.
MISTAKES: dict[str, tuple[Change, str]] = {
    **{f"{kind} in training": (given(train=[wrong] * 3), "batch 0") for kind, wrong in WRONG.items()},
    **{
        f"{kind} in evaluation": (evaluator("test", pl.metrics.loss(), data=wrong), "evaluator 'test', first batch")
        for kind, wrong in WRONG.items()
    },
    "key in a metric": (evaluator("iou", accuracy("labels")), "metric 'right' of evaluator 'iou'"),
    "end of a metric": (evaluator("end", accuracy("y", fails_at_the_end=True)), "metric 'right' of evaluator 'end'"),
    "key in a callback": (given(callbacks=lambda folder: reads_too_early), "callback"),
    "an algorithm of the last epoch": (given(algorithms=penalty), "algorithm 'penalty' at AFTER_LOSS"),
    "an algorithm that is rarely due": (given(algorithms=cut), "algorithm 'cut' at BATCH_END"),
    "path of checkpoints": (saver, "folder of CheckpointSaver"),
    "path of a logger": (given(loggers=LOGGER), "path of JSONLinesLogger"),
    "checkpoint": (given(load_path=lambda folder: folder / "missing.safetensors"), "arguments of fit"),
    "rate below 0": (given(optimizer=FALLING), "schedule of learning rate, end of the run"),
    "an object in algorithm state": (given(algorithms=KEEPER), "callback CheckpointSaver at FIT_START"),
}
TOGETHER = ("evaluator", "folder", "path", "schedule")  # of which one doesn't keep the others from being found


def failing(how: Any, drawn: list[str], folder: Path, **more: Any) -> Any:
    """The error of a rehearsal, or of a run."""
    options = plain(folder)
    for name in drawn:
        MISTAKES[name][0](options, folder)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    try:
        found = how(model, options.pop("train"), **options | more)
        if how is pl.fit:
            pl.run(found)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_phase_and_ends_the_run(name: str, tmp_path: Path) -> None:
    error = failing(pl.rehearse, [name], tmp_path)
    ((phase, cause),) = error.failures
    assert MISTAKES[name][1] in phase
    assert MISTAKES[name][1] in str(error)
    assert error.__cause__ is cause
    assert failing(pl.fit, [name], tmp_path) is not None


@examples(12, 100)
@hypothesis.given(st.lists(st.sampled_from(sorted(MISTAKES)), unique_by=lambda name: MISTAKES[name][1], max_size=3))
def test_what_passes_does_not_fail_later_and_what_fails_fails(drawn: list[str]) -> None:
    phases = [MISTAKES[name][1] for name in drawn]
    with tempfile.TemporaryDirectory() as name:
        error = failing(pl.rehearse, drawn, Path(name))
        assert (error is not None) == bool(drawn)
        if all(phase.startswith(TOGETHER) for phase in phases):
            assert all(phase in str(error) for phase in phases)
        assert {path.name for path in Path(name).iterdir()} <= {"file"}
        assert (failing(pl.fit, drawn, Path(name)) is not None) == bool(drawn)


def test_a_place_is_tried_where_the_arguments_are_refused(tmp_path: Path) -> None:
    saver = pl.callbacks.CheckpointSaver(blocked(tmp_path), keep_best=1, metric="test/loss")
    error = failing(pl.rehearse, [], tmp_path, callbacks=[saver])
    assert [phase for phase, _ in error.failures] == ["arguments of fit", "folder of CheckpointSaver"]
