"""Algorithms that watch a metric: early stopping, thresholds, and rates that are reduced on a plateau."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop.algorithms._monitored import Monitored
from pure_loop.compile import interpreted
from pure_loop.state import POSITIONS
from pure_loop.testing.comparison import differences
from tests.support.problem import fit, points, run
from tests.support.tiers import examples

DATA = [(torch.full((2, 3), 0.1 * i), torch.ones(2, 1)) for i in range(1, 4)]


def scores(values: list[float]) -> dict[str, Any]:
    """Evaluators, of which the accuracy of one has these values, one evaluation after the other."""
    following = iter([*values, *values[-1:] * 20])
    made = pl.metrics.Metric("accuracy", lambda: 0, lambda acc, outputs, batch: acc, lambda acc: next(following))
    return {"evaluators": {"val": pl.Evaluator(DATA[:1], metrics=[made])}, "max_duration": f"{len(values)}ep"}


def stream(algorithms: Any, start: Any = None, **settings: Any) -> pl.Stream:
    with pl.random.seeded(0):
        model = nn.Linear(3, 1)
    options = {"max_duration": "20ep", "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "loss": functional.mse_loss}
    return fit(model if start is None else start, DATA, algorithms, strict=False, **options | settings)


def expected(values: list[float], patience: int, delta: float, mode: str) -> tuple[int, float, int]:
    """The last epoch, what was best, and when."""
    best, at = math.nan, 0
    for epoch, value in enumerate(values, 1):
        gain = value - best if mode == "max" else best - value
        if math.isfinite(value) and (not at or gain > delta):
            best, at = value, epoch
        elif epoch - at >= patience:
            return epoch, best, at
    return len(values), best, at


@examples(25, 300)
@given(
    values=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.25, 0.5, 0.75]), min_size=1, max_size=5),
    patience=st.integers(1, 4),
    unit=st.sampled_from(["evaluations", "ep", "ba"]),
    delta=st.sampled_from([0.0, 0.25]),
    mode=st.sampled_from(["min", "max"]),
    average=st.booleans(),
    order=st.sampled_from(["current", "2021"]),
)
def test_training_ends_where_patience_ends_and_restored_gives_what_was_best(
    values: list[float], patience: int, unit: str, delta: float, mode: Any, average: bool, order: Any
) -> None:
    """At every event: the parameters that were evaluated, of an average too; of values that aren't finite none is."""
    written = {"evaluations": patience, "ep": f"{patience}ep", "ba": f"{3 * patience}ba"}[unit]
    stopping = A.early_stopping("val/accuracy", patience=written, mode=mode, min_delta=delta)
    seen: list[dict[str, Tensor]] = []
    for event, state in stream([stopping, *[A.ema("2ba")] * average], order=order, **scores(values)):
        if event is Event.EVAL_END:
            seen.append({name: tensor.clone() for name, tensor in state.params.items()})
        _, best, at = expected(values[: len(seen)], 9, delta, mode)
        if "early_stopping" not in state.algorithm_state:
            continue
        if not at:
            what = rf"not finite in any of its {len(seen)} evaluations" if seen else "was not evaluated yet"
            with pytest.raises(pl.ArgumentError, match=f"no best parameters under 'early_stopping': .*{what}"):
                A.restored(state)
        else:
            assert not differences(dict(A.restored(state).params), seen[at - 1], name="")
    end, best, at = expected(values, patience, delta, mode)
    memory = state.algorithm_state["early_stopping"]
    assert (state.timestamp.epoch, memory["since"]["epoch"]) == (end, at)
    assert float(memory["best"]) == pytest.approx(best, nan_ok=True)
    assert state.stop is (end - at >= patience)


def test_training_ends_at_a_threshold() -> None:
    for threshold, mode, epochs in ((0.6, None, 2), (0.55, None, 2), (0.58, "min", 1)):
        algorithm = A.threshold_stopping("val/accuracy", threshold, mode)  # type: ignore[arg-type]
        end = pl.run(stream([algorithm], **scores([0.5, 0.6, 0.59])))
        assert (end.timestamp.epoch, end.stop) == (epochs, True)
    by_batch = stream([A.threshold_stopping("train/loss", 0.05, at="batch")])
    losses = [float(state.loss) for event, state in by_batch if event is Event.BATCH_END]
    assert losses[-1] <= 0.05 < min(losses[:-1])


def test_which_values_are_compared_and_what_is_kept() -> None:
    for metric, mode in (
        *(("val/loss", "min"), ("val/perplexity", "min"), ("train/loss/kl", "min")),
        *(("val/accuracy", "max"), ("val/f1/cat", "max")),
    ):
        assert Monitored.read("x", metric, None).mode == mode
    # In mappings metrics have the names under which they are logged.
    level = pl.metrics.Metric("pair", lambda: 0, lambda acc, outputs, batch: acc, lambda acc: {"a": 0.0, "b": 1.0})
    evaluators = {"val": pl.Evaluator(DATA, metrics=[level])}
    assert pl.run(stream([A.threshold_stopping("val/pair/b", 1.0, mode="max")], evaluators=evaluators)).stop
    end = pl.run(stream([A.early_stopping("val/accuracy", best=None)], **scores([0.6, 0.5])))
    assert "params" not in end.algorithm_state["early_stopping"]
    # The mean of the training loss is weighted by samples.
    known = pl.Algorithm("n", {Event.AFTER_LOSS: lambda s: s.replace(loss=s.loss * 0 + float(len(s.microbatch[0])))})
    state = run(None, points(size=(1, 3)), [A.early_stopping("train/loss", patience=5), known], max_duration="1ep")
    assert float(state.algorithm_state["early_stopping"]["best"]) == (1 * 1 + 3 * 3) / 4


EVAL: dict[str, Any] = {"evaluators": {"val": DATA}}
# Each ends, or reduces the rate, in the middle of the run.
RUNS: dict[str, tuple[pl.Algorithm, dict[str, Any]]] = {
    "evaluations": (A.early_stopping("val/loss", patience=2, min_delta=0.1), EVAL),
    "within epochs": (A.early_stopping("val/loss", patience="3ba", min_delta=0.1), EVAL | {"eval_interval": "1ba"}),
    "training": (A.early_stopping("train/loss", patience=2, interval="2ba", min_delta=0.1), {}),
    "threshold": (A.threshold_stopping("val/loss", 0.05), EVAL),
    "threshold of batches": (A.threshold_stopping("train/loss", 0.05, at="batch"), {}),
    "plateau": (A.reduce_on_plateau("val/loss", patience=1, threshold=0.5), EVAL | {"max_duration": "8ep"}),
    "plateau of training": (A.reduce_on_plateau("train/loss", patience=1, threshold=0.5), {"max_duration": "8ep"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_and_a_compiled_one_do_what_the_whole_would_have_done(name: str) -> None:
    algorithm, options = RUNS[name]
    pairs = list(stream([algorithm], donate=False, **options))
    end = pairs[-1][1]
    assert end.stop or (end.lr_scale is not None and end.lr_scale < 1)
    assert 2 < end.timestamp.batch < 60
    positions = [state for event, state in pairs if event in POSITIONS]
    for state in positions[:: len(positions) // 3]:
        assert not differences(pl.run(stream([algorithm], state, **options)), end), state
    with interpreted():
        compiled = pl.run(stream([algorithm], compile=True, **options))
    assert (compiled.timestamp.batch, compiled.lr_scale) == (end.timestamp.batch, end.lr_scale)
    if name == "evaluations":
        later = pl.run(stream([algorithm], end.replace(stop=False), **options))
        assert (later.timestamp.epoch, later.stop) == (end.timestamp.epoch + 1, True)


@examples(15, 300)
@given(
    values=st.lists(st.sampled_from([0.2, 0.4, 0.40001, 0.5, 0.9]), min_size=1, max_size=12),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    mode=st.sampled_from(["min", "max"]),
    threshold=st.sampled_from([(1e-4, "rel"), (0.0, "abs"), (0.15, "abs"), (0.3, "rel")]),
    min_scale=st.sampled_from([0.0, 0.03]),
)
def test_the_rate_is_reduced_where_torch_reduces_it(
    values: list[float], patience: int, cooldown: int, mode: Any, threshold: Any, min_scale: float
) -> None:
    settings: dict[str, Any] = {"patience": patience, "cooldown": cooldown, "threshold": threshold[0], "mode": mode}
    settings["threshold_mode"] = threshold[1]
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, min_lr=min_scale, eps=0.0, **settings)
    algorithm = A.reduce_on_plateau("val/accuracy", min_scale=min_scale, **settings)
    pairs = stream([algorithm], watch={Event.EPOCH_CHECKPOINT}, **scores(values))
    scales, wanted = [1.0 if state.lr_scale is None else float(state.lr_scale) for _, state in pairs], []
    for value in values:
        plateau.step(torch.tensor(value))  # type: ignore[arg-type]
        wanted.append(theirs.param_groups[0]["lr"])
    assert scales == pytest.approx(wanted, rel=1e-12)
