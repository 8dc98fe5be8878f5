"""A file with a score holds the weights that were measured: loaded into a plain module, they give the recorded score.

Tried as neighbours: ema, swa (with statistics of its own, and one that replaces the weights after an evaluation), both
at once, schedule-free optimizers, algorithms that put the weights back at EVAL_END and that have other weights for
another evaluator; several evaluators with a saver each, one run and a resumed one, saved in the background and with
``donate=True``, compiled, replicated and sharded; the export at FIT_END, once more for a run that has ended; the best
parameters of early_stopping; whole States whose weights changed after they were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event, State
from pure_loop.algorithms import averaged, early_stopping, ema, restored, swa
from pure_loop.callbacks import CheckpointSaver, ExportForInferenceCallback
from tests.support.tiers import examples
from tests.support.worlds import pool

mse = nn.functional.mse_loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 2, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


DATA, VAL, TEST = batches(4, 0), batches(1, 1), batches(1, 2)


def stream(start: Any, algorithms: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "loss": mse,
        "optimizer": pl.optim.sgd(lr=0.2, momentum=0.9),
        "max_duration": "3ep",
        "evaluators": {"val": VAL, "test": TEST},
    }
    return pl.fit(start, DATA, algorithms=algorithms, **{**settings, **options})


def loss_of(module: nn.Module, data: list[tuple[Tensor, Tensor]] = VAL) -> float:
    with torch.no_grad():
        return float(mse(module.eval()(data[0][0]), data[0][1]))


def plain(path: Any) -> nn.Module:
    """A module without pure_loop, with the weights of a file."""
    module = model()
    module.load_state_dict(load_file(path))
    return module


def differ(module: nn.Module, state: State) -> bool:
    """Whether a module has other weights than those in training."""
    return any(not torch.equal(tensor, state.params[name]) for name, tensor in module.named_parameters())


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


def assert_scores(folder: Path, data: list[tuple[Tensor, Tensor]] = VAL, label: str = "val") -> None:
    """Of each file with a score, and of the best; there is at least one."""
    scores = {}
    for path in folder.glob("*.safetensors"):
        notes = pl.checkpoint.describe(path)["notes"]
        if "score" in notes:
            assert loss_of(plain(path), data) == pytest.approx(notes["score"], rel=1e-5), path.name
            scores[path.name] = notes["score"]
    best = pl.best(folder, metric=f"{label}/loss")
    assert best is not None
    assert loss_of(plain(best), data) == pytest.approx(min(scores.values()), rel=1e-5)


@pytest.mark.slow  # every evaluation and every average that a checkpoint may hold
@examples(20, 200)
@given(
    kind=st.sampled_from(sorted(ALGORITHMS)),
    interval=st.sampled_from(["1ba", "3ba", "1ep"]),
    eval_interval=st.sampled_from(["1ba", "2ba", "4ba", "1ep"]),
    keep_best=st.integers(1, 3),
    keep_last=st.sampled_from([None, 1, 3]),
    background=st.booleans(),
    donate=st.sampled_from(["auto", True, False]),
)
def test_files_hold_what_was_measured(
    kind: str, interval: str, eval_interval: str, keep_best: int, keep_last: Any, background: bool, donate: Any
) -> None:
    with TemporaryDirectory() as folder:
        savers = [
            CheckpointSaver(
                f"{folder}/{label}", weights_only=True, interval=interval, keep_best=keep_best, keep_last=keep_last,
                metric=f"{label}/loss", background=background,
            )
            for label in ("val", "test")
        ]  # fmt: skip
        pl.run(stream(model(), ALGORITHMS[kind](), callbacks=savers, eval_interval=eval_interval, donate=donate))
        if eval_interval in (interval, "1ba", "1ep", "4ba"):  # else it may be that nothing that is saved was measured
            assert_scores(Path(folder, "val"))
            assert_scores(Path(folder, "test"), TEST, "test")


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_the_best_weights_are_those_that_were_measured(kind: str, tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, weights_only=True, interval="1ba", keep_best=2, metric="val/loss")
    recorded = {}
    for event, state in stream(model(), ALGORITHMS[kind](), callbacks=[saver], eval_interval="1ba"):
        if event is Event.EVAL_END and state.evaluator == "val":
            recorded[state.timestamp.batch] = float(state.metrics["val"]["loss"])
    assert_scores(tmp_path)
    best = pl.best(tmp_path)
    assert best is not None
    assert loss_of(plain(best)) == pytest.approx(min(recorded.values()), rel=1e-5)
    assert loss_of(plain(tmp_path / "best")) == pytest.approx(min(recorded.values()), rel=1e-5)


def test_whole_states_have_both(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, interval="1ba", keep_best=1, metric="val/loss")
    pl.run(stream(model(), [ema(half_life="3ba")], callbacks=[saver], eval_interval="1ba"))
    best = pl.best(tmp_path)
    assert best is not None
    state = pl.load(best, model=model())
    score = pl.checkpoint.describe(best)["notes"]["score"]
    assert loss_of(averaged(state).module()) == pytest.approx(score, rel=1e-5)
    assert differ(averaged(state).module(), state)


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_that_changed_after_they_were_measured(weights_only: bool, tmp_path: Path) -> None:
    """Measured after the last batch of an epoch; at EPOCH_END of the second one the mean takes their place."""
    saver = CheckpointSaver(
        tmp_path, interval="1ep", keep_last=9, keep_best=1, metric="val/loss", weights_only=weights_only
    )
    algorithm = swa("0ba", "2ep", replace=True, evaluate=False)
    pl.run(stream(model(), [algorithm], callbacks=[saver], eval_interval="4ba"))
    scored = {
        path.name: pl.checkpoint.describe(path)["notes"].get("score") for path in tmp_path.glob("ep*.safetensors")
    }
    assert len(scored) == 3
    if weights_only:
        assert_scores(tmp_path)
        assert None not in scored.values()
    else:
        assert scored.pop("ep2-ba8.safetensors") is None
        for name, score in scored.items():
            assert loss_of(pl.load(tmp_path / name, model=model()).module()) == pytest.approx(score, rel=1e-5)


@pytest.mark.parametrize("stop", [3, 6, 9])
def test_a_resumed_run(stop: int, tmp_path: Path) -> None:
    def run() -> Any:
        weights = CheckpointSaver(
            tmp_path / "weights", weights_only=True, interval="1ba", keep_best=1, keep_last=2, metric="val/loss"
        )
        options = {"callbacks": [weights], "autoresume": tmp_path / "run", "eval_interval": "1ba"}
        return stream(model(), [ema(half_life="3ba")], **options)

    for event, state in run():
        if event is Event.BATCH_START and state.timestamp.batch == stop:
            break
    pl.run(run())
    assert_scores(tmp_path / "weights")


def test_schedule_free_weights(tmp_path: Path) -> None:
    schedulefree: Any = pytest.importorskip("schedulefree")
    optimizer = pl.optim.from_torch(schedulefree.AdamWScheduleFree, lr=0.1, warmup_steps=2)

    @pl.algorithm(Event.EVAL_START, Event.PREDICT_START)
    def averages(state: State) -> State:
        return state.replace(params=pl.optim.evaluation_params(state, optimizer))

    callbacks = [
        CheckpointSaver(tmp_path / "w", weights_only=True, interval="1ba", keep_best=2, metric="val/loss"),
        ExportForInferenceCallback(tmp_path / "end.safetensors", "safetensors"),
    ]
    state = pl.run(stream(model(), [averages], optimizer=optimizer, callbacks=callbacks, eval_interval="1ba"))
    assert_scores(tmp_path / "w")
    loss = float(state.metrics["val"]["loss"])
    assert loss_of(plain(tmp_path / "end.safetensors")) == pytest.approx(loss, rel=1e-5)
    assert differ(plain(tmp_path / "end.safetensors"), state)


@pytest.mark.parametrize(
    ("kind", "eval_interval"), [("ema", "1ep"), ("swa, replace", "4ba"), ("both", "5ba"), ("swapped", "1ep")]
)
def test_the_export_is_the_model_that_was_measured_last(kind: str, eval_interval: str, tmp_path: Path) -> None:
    def run(start: Any) -> Any:
        export = ExportForInferenceCallback(tmp_path / "model.pt", sample=VAL[0][0])
        return stream(start, ALGORITHMS[kind](), callbacks=[export], eval_interval=eval_interval)

    state = pl.run(run(model()))
    loss = float(state.metrics["val"]["loss"])
    module = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loss_of(module) == pytest.approx(loss, rel=1e-5)
    pl.run(run(state))  # which has ended, so that nothing is evaluated
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loss_of(again) == pytest.approx(loss, rel=1e-5)


def test_exports_of_a_named_average_and_without_evaluators(tmp_path: Path) -> None:
    names: dict[str, Any] = {"named": "swa", "measured": None}
    exports = [
        ExportForInferenceCallback(tmp_path / f"{name}.safetensors", "safetensors", average=average, overwrite=True)
        for name, average in names.items()
    ]
    state = pl.run(stream(model(), ALGORITHMS["both"](), callbacks=exports))
    wanted = {"named": averaged(state, "swa"), "measured": averaged(state, "ema")}
    for name, expected in wanted.items():
        assert loss_of(plain(tmp_path / f"{name}.safetensors")) == loss_of(expected.module())
    state = pl.run(stream(model(), ALGORITHMS["both"](), callbacks=exports, evaluators=None))
    assert loss_of(plain(tmp_path / "named.safetensors")) == loss_of(averaged(state, "swa").module())
    assert loss_of(plain(tmp_path / "measured.safetensors")) == loss_of(state.module())


@pytest.mark.parametrize("kind", ["both", "other", "swa, replace"])
def test_the_best_parameters_of_early_stopping(kind: str) -> None:
    algorithms = [early_stopping("val/loss", patience=100), *ALGORITHMS[kind]()]
    pairs = stream(model(), algorithms, eval_interval="1ba")
    losses = [
        float(s.metrics["val"]["loss"]) for e, s in pairs if e is Event.EVAL_END and s.evaluator == "val"
    ]  # fmt: skip
    state = pl.run(stream(model(), algorithms, eval_interval="1ba"))
    assert loss_of(restored(state).module()) == pytest.approx(min(losses), rel=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("donate", ["auto", True])
def test_compiled(donate: Any, tmp_path: Path) -> None:
    callbacks = [
        CheckpointSaver(tmp_path / "w", weights_only=True, interval="1ba", keep_best=2, metric="val/loss"),
        CheckpointSaver(tmp_path / "s", interval="1ba", keep_best=9, metric="val/loss"),
    ]
    options: dict[str, Any] = {"compile": True, "donate": donate, "eval_interval": "1ba", "watch": ()}
    pl.run(stream(model(), [ema(half_life="3ba")], callbacks=callbacks, **options))
    assert_scores(tmp_path / "w")
    for path in (tmp_path / "s").glob("ep*.safetensors"):
        score = pl.checkpoint.describe(path)["notes"]["score"]
        assert loss_of(averaged(pl.load(path, model=model())).module()) == pytest.approx(score, rel=1e-4)


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_on_two_ranks(kind: str, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        callbacks = [
            CheckpointSaver(tmp_path / "w", weights_only=True, interval="1ba", keep_best=2, metric="val/loss"),
            ExportForInferenceCallback(tmp_path / "end.safetensors", "safetensors"),
        ]
        state = pl.run(stream(model(), [ema(half_life="3ba")], callbacks=callbacks, eval_interval="1ba", parallel=kind))
        assert loss_of(plain(tmp_path / "end.safetensors")) == pytest.approx(
            float(state.metrics["val"]["loss"]), rel=1e-5
        )

    pool(kind=kind).run(program)
    assert_scores(tmp_path / "w")
