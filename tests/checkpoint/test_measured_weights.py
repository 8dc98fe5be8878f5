"""A file with a score holds the weights that were measured: loaded into a plain module, they give that score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import pure_loop as pl
from pure_loop import Event, State
from pure_loop.algorithms import averaged, early_stopping, ema, restored, swa
from pure_loop.callbacks import CheckpointSaver, ExportForInferenceCallback
from tests.support import problem
from tests.support.sharding import pool
from tests.support.tiers import examples


def model() -> nn.Module:
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


DATA, VAL, TEST = problem.points(4), problem.points(1, seed=1), problem.points(1, seed=2)
BEST: dict[str, Any] = {"weights_only": True, "interval": "1ba", "keep_best": 2, "metric": "val/loss"}


def stream(algorithms: Any, start: Any = None, **options: Any) -> pl.Stream:
    settings: dict[str, Any] = {
        "optimizer": pl.optim.sgd(lr=0.2, momentum=0.9),
        "max_duration": "3ep",
        "evaluators": {"val": VAL, "test": TEST},
        "eval_interval": "1ba",
        "strict": None,
    }
    return problem.fit(model() if start is None else start, DATA, algorithms, **{**settings, **options})


def loss_of(module: nn.Module, data: Any = VAL) -> Any:
    with torch.no_grad():
        return pytest.approx(float(problem.cross_entropy(module.eval()(data[0][0]), data[0][1])), rel=1e-5)


def plain(path: Any) -> nn.Module:
    """A module without pure_loop, with the weights of a file."""
    module = model()
    module.load_state_dict(load_file(path))
    return module


@pl.algorithm(Event.EVAL_START, Event.EVAL_END, name="swapped")
def swapped(state: State) -> State:
    """Halves the weights for an evaluation, and puts them back."""
    factor = 0.5 if state.event is Event.EVAL_START else 2.0
    return state.replace(params={name: tensor * factor for name, tensor in state.params.items()})


@pl.algorithm(Event.EVAL_START, name="other")
def other_for_the_test(state: State) -> State:
    factor = 0.5 if state.evaluator == "test" else 1.0
    return state.replace(params={name: tensor * factor for name, tensor in state.params.items()})


ALGORITHMS: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "ema": lambda: [ema(half_life="3ba")],
    "ema, warmup": lambda: [ema(half_life="8ba", warmup=True, offload=True)],
    "swa": lambda: [swa("1ep", interval="1ba")],
    "swa, statistics": lambda: [swa("1ba", interval="2ba", batchnorm_data=DATA)],
    "swa, replace": lambda: [swa("0ba", "2ep", replace=True)],
    "both": lambda: [swa("1ba", interval="1ba"), ema(half_life="3ba")],
    "swapped": lambda: [swapped],
    "other": lambda: [other_for_the_test],
}


def assert_scores(folder: Path, data: Any = VAL, label: str = "val") -> float:
    """Of each file with a score, and of the best and the link to it; there is at least one."""
    scores = {}
    for path in folder.glob("*.safetensors"):
        score = pl.checkpoint.describe(path)["notes"].get("score")
        if score is not None and not path.is_symlink():
            assert loss_of(plain(path), data) == score, path.name
            scores[path.name] = score
    best = pl.best_path(folder, metric=f"{label}/loss")
    assert best is not None
    for path in (Path(best), folder / "best"):
        assert loss_of(plain(path), data) == min(scores.values())
    return float(min(scores.values()))


@examples(8, 300)
@given(
    kind=st.sampled_from(sorted(ALGORITHMS)),
    eval_interval=st.sampled_from(["1ba", "2ba", "5ba", "1ep"]),
    stop=st.none() | st.integers(2, 11),
    options=st.fixed_dictionaries(
        {"keep_best": st.integers(1, 3), "keep_last": st.sampled_from([None, 1, 3]), "background": st.booleans()}
    ),
    donate=st.sampled_from(["auto", True, False]),
)
def test_files_hold_what_was_measured(
    tmp_path_factory: pytest.TempPathFactory, kind: str, eval_interval: str, stop: Any, options: Any, donate: Any
) -> None:
    """Of two evaluators with a saver each, also in a run that was left and resumed; so do export and early stopping."""
    folder = tmp_path_factory.mktemp("run")

    def run(start: Any = None) -> pl.Stream:
        callbacks: list[Any] = [
            CheckpointSaver(folder / label, **{**BEST, **options, "metric": f"{label}/loss"})
            for label in ("val", "test")
        ]
        callbacks.append(ExportForInferenceCallback(folder / "end.safetensors", "safetensors", overwrite=True))
        settings = {"callbacks": callbacks, "eval_interval": eval_interval, "donate": donate}
        algorithms = [early_stopping("val/loss", patience=99), *ALGORITHMS[kind]()]
        return stream(algorithms, start, **settings, **({} if start else {"autoresume": folder / "run"}))

    for _, state in run() if stop else ():
        if state.timestamp.batch == stop and state.event is Event.BATCH_START:
            break
    state = pl.run(run())
    best = assert_scores(folder / "val")
    # After an epoch its State is measured when that of its last batch is saved.
    assert eval_interval == "1ep" or loss_of(restored(state).module()) == best
    assert_scores(folder / "test", TEST, "test")
    label, data = ("test", TEST) if kind == "other" else ("val", VAL)  # the one that was measured last
    for start in (None, state):  # once more of a run that has ended, in which nothing is measured
        if start is not None:
            pl.run(run(start))
        assert loss_of(plain(folder / "end.safetensors"), data) == float(state.metrics[label]["loss"])


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_that_changed_after_they_were_measured(weights_only: bool, tmp_path: Path) -> None:
    """Measured after the last batch of an epoch; at EPOCH_END of the second one the mean takes their place."""
    options: Any = {"keep_best": 1, "metric": "val/loss", "weights_only": weights_only}
    saver = CheckpointSaver(tmp_path, interval="1ep", keep_last=9, **options)
    pl.run(stream([swa("0ba", "2ep", replace=True, evaluate=False)], callbacks=[saver], eval_interval="4ba"))
    scored = {path.name: pl.checkpoint.describe(path)["notes"].get("score") for path in tmp_path.glob("ep*")}
    assert len(scored) == 3
    if weights_only:
        assert_scores(tmp_path)
        assert None not in scored.values()
        return
    assert scored.pop("ep2-ba8.safetensors") is None
    for name, score in scored.items():
        assert loss_of(pl.load(tmp_path / name, model=model()).module()) == score


def test_exports_of_a_named_average_and_without_evaluators(tmp_path: Path) -> None:
    names: dict[str, Any] = {"named": "swa", "measured": None}
    exports = [
        ExportForInferenceCallback(tmp_path / f"{name}.safetensors", "safetensors", average=average, overwrite=True)
        for name, average in names.items()
    ]
    for evaluators in ({"val": VAL}, None):
        state = pl.run(stream(ALGORITHMS["both"](), callbacks=exports, evaluators=evaluators, eval_interval="1ep"))
        measured = state if evaluators is None else averaged(state, "ema")
        for name, wanted in (("named", averaged(state, "swa")), ("measured", measured)):
            problem.close(plain(tmp_path / f"{name}.safetensors").state_dict(), {**wanted.params, **wanted.buffers}, 0)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("compiled", [False, True])
def test_whole_states_have_both_also_compiled(compiled: bool, tmp_path: Path) -> None:
    states = CheckpointSaver(tmp_path / "s", **{**BEST, "keep_best": 9, "weights_only": False})
    options: Any = {"callbacks": [CheckpointSaver(tmp_path / "w", **BEST), states], "compile": compiled, "donate": True}
    pl.run(stream([ema(half_life="3ba")], watch=(), **options))
    assert_scores(tmp_path / "w")
    for path in (tmp_path / "s").glob("ep*.safetensors"):
        state, score = pl.load(path, model=model()), pl.checkpoint.describe(path)["notes"]["score"]
        assert loss_of(averaged(state).module()).expected == pytest.approx(score, rel=1e-4)
        assert loss_of(state.module()) != score


def test_on_two_ranks(tmp_path: Path) -> None:
    def program(rank: int) -> list[float]:
        losses = []
        for kind in ("replicate", "shard"):
            export = ExportForInferenceCallback(tmp_path / f"{kind}.safetensors", "safetensors")
            callbacks = [CheckpointSaver(tmp_path / kind, **BEST), export]
            state = pl.run(stream([ema(half_life="3ba")], callbacks=callbacks, parallel=kind))
            losses.append(float(state.metrics["val"]["loss"]))
        return losses

    # One rank writes the file, which the others may not find before it is there.
    losses, _ = pool().run(program)
    for kind, loss in zip(("replicate", "shard"), losses, strict=True):
        assert loss_of(plain(tmp_path / f"{kind}.safetensors")) == loss
        assert_scores(tmp_path / kind)
