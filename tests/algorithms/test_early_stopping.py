"""Early stopping in real training loops: where it ends, what it keeps, and that a resumed run ends there, too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import early_stopping, ema, restored
from pure_loop.compile import interpreted
from pure_loop.state import POSITIONS
from pure_loop.testing.comparison import differences
from tests.support.tiers import examples, tiers

DATA = [(torch.full((2, 3), 0.1 * i), torch.ones(2, 1)) for i in range(1, 4)]
SCORES = [0.5, 0.6, 0.59, 0.58, 0.57]


def scores(values: list[float]) -> pl.Evaluator:
    """An evaluator whose accuracy has these values, one evaluation after the other."""
    following = iter([*values, *values[-1:] * 20])
    made = pl.metrics.Metric("accuracy", lambda: 0, lambda acc, outputs, batch: acc, lambda acc: next(following))
    return pl.Evaluator(DATA[:1], metrics=[made])


def stream(algorithms: Any, start: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "max_duration": "20ep",
        "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9),
        "loss": nn.functional.mse_loss,
        **settings,
    }
    return pl.fit(nn.Linear(3, 1) if start is None else start, DATA, algorithms=algorithms, **options)


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"patience": 2}, 4),
        ({"patience": "2ep"}, 4),
        ({"patience": "6ba"}, 4),
        ({"patience": 1}, 3),
        ({"patience": 3}, 5),
        ({"patience": 2, "min_delta": 0.2}, 3),
    ],
)
@pytest.mark.parametrize("order", ["current", "2021"])
def test_where_training_ends(settings: dict[str, Any], epochs: int, order: Any) -> None:
    algorithm = early_stopping("val/accuracy", **settings)
    end = pl.run(stream([algorithm], evaluators={"val": scores(SCORES)}, order=order))
    assert end.timestamp.epoch == epochs
    assert end.stop
    memory = end.algorithm_state["early_stopping"]
    assert float(memory["best"]) == pytest.approx(0.6 if "min_delta" not in settings else 0.5)
    assert memory["since"]["epoch"] == (2 if "min_delta" not in settings else 1)


def test_it_does_not_stop_while_it_becomes_better() -> None:
    options: dict[str, Any] = {"evaluators": {"val": DATA}, "optimizer": pl.optim.sgd(lr=0.01), "max_duration": "3ep"}
    end = pl.run(stream([early_stopping("val/loss", patience=1)], **options))
    assert (end.timestamp.epoch, end.stop) == (3, False)


def test_a_value_that_is_no_number_is_not_better() -> None:
    evaluators = {"val": scores([float("nan"), 0.5, float("nan"), float("nan"), 0.9])}
    end = pl.run(stream([early_stopping("val/accuracy", patience=2)], evaluators=evaluators))
    assert end.timestamp.epoch == 4
    assert float(end.algorithm_state["early_stopping"]["best"]) == 0.5


@pytest.mark.parametrize("with_average", [False, True])
def test_the_best_parameters_are_those_that_were_evaluated(with_average: bool) -> None:
    algorithms = [early_stopping("val/accuracy", patience=2), *([ema("2ba")] * with_average)]
    pairs = stream(algorithms, evaluators={"val": scores(SCORES)})
    evaluated: list[dict[str, Tensor]] = []
    for event, state in pairs:
        if event is Event.EVAL_END:
            evaluated.append({name: tensor.clone() for name, tensor in state.params.items()})
    best = restored(state)
    for name, tensor in best.params.items():
        assert torch.equal(tensor, evaluated[1][name])
        assert not torch.equal(tensor, state.params[name])


def test_without_best_nothing_is_kept() -> None:
    end = pl.run(stream([early_stopping("val/accuracy", best=None)], evaluators={"val": scores(SCORES)}))
    assert "params" not in end.algorithm_state["early_stopping"]
    with pytest.raises(pl.errors.ArgumentError, match=r"no best parameters under 'early_stopping'.*best='keep'"):
        restored(end)


NOT_FINITE = st.sampled_from([float("nan"), float("inf"), float("-inf")])


@examples(15, 300)
@given(
    st.lists(NOT_FINITE | st.sampled_from([0.25, 0.5, 0.75]), min_size=1, max_size=4), st.sampled_from(["min", "max"])
)
def test_restored_gives_what_was_best_or_says_that_there_is_none(values: list[float], mode: Any) -> None:
    """At every event, from before the first evaluation on; of values that aren't finite none is best.

    Tried besides: the loss of training, average of another algorithm under the name, a State from a file.
    """
    algorithm = early_stopping("val/accuracy", mode=mode, patience=100)
    seen: list[tuple[float, dict[str, Tensor]]] = []
    for event, state in stream([algorithm], evaluators={"val": scores(values)}, max_duration=f"{len(values)}ep"):
        if event is Event.EVAL_END:
            seen.append((values[len(seen)], {name: tensor.clone() for name, tensor in state.params.items()}))
        finite = [value for value, _ in seen if math.isfinite(value)]
        if "early_stopping" not in state.algorithm_state:
            continue
        if not finite:
            what = rf"not finite in any of its {len(seen)} evaluations" if seen else "was not evaluated yet"
            with pytest.raises(pl.ArgumentError, match=f"no best parameters under 'early_stopping': .*{what}"):
                restored(state)
        else:
            best = max(finite) if mode == "max" else min(finite)
            expected = next(params for value, params in seen if value == best)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in restored(state).params.items())


def test_the_average_of_another_algorithm_is_not_what_was_best() -> None:
    """It has parameters and buffers, too."""
    end = pl.run(stream([ema("2ba")], max_duration="1ep"))
    with pytest.raises(pl.ArgumentError, match="no best parameters under 'ema'"):
        restored(end, "ema")


def test_no_loss_of_training_was_finite() -> None:
    @pl.algorithm(Event.AFTER_LOSS)
    def broken(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * float("inf"))

    algorithms = [early_stopping("train/loss"), broken]
    end = pl.run(stream(algorithms, max_duration="2ep", nonfinite="skip"))
    with pytest.raises(pl.ArgumentError, match="not finite in any of its 2 evaluations"):
        restored(end)


RUNS: dict[str, dict[str, Any]] = {
    "evaluations": {"algorithms": [early_stopping("val/loss", patience=2, min_delta=0.1)]},
    "within epochs": {
        "algorithms": [early_stopping("val/loss", patience="3ba", min_delta=0.1)],
        "eval_interval": "1ba",
    },
    "training": {"algorithms": [early_stopping("train/loss", patience=2, interval="2ba", min_delta=0.1)]},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_where_it_would_have_ended(name: str) -> None:
    run = {"evaluators": {"val": DATA}, **RUNS[name]}
    whole = list(stream(**run))
    assert whole[-1][1].stop
    assert 2 < whole[-1][1].timestamp.batch < 60
    for event, state in whole:
        if event in POSITIONS:
            assert not differences(pl.run(stream(start=state, **run)), whole[-1][1]), state


def test_a_run_that_trains_on_stops_again() -> None:
    run: dict[str, Any] = {**RUNS["evaluations"], "evaluators": {"val": DATA}}
    end = pl.run(stream(**run))
    later = pl.run(stream(start=end.replace(stop=False), **run))
    assert later.timestamp.epoch == end.timestamp.epoch + 1
    assert later.stop


@pytest.mark.parametrize("name", tiers(RUNS, ["training"]))
def test_compiled_steps_end_there_too(name: str) -> None:
    run = {"evaluators": {"val": DATA}, **RUNS[name]}
    with interpreted():
        compiled = pl.run(stream(compile=True, **run))
    assert compiled.timestamp.batch == pl.run(stream(**run)).timestamp.batch


def test_the_mean_of_the_training_loss_is_weighted_by_samples() -> None:
    data = [(torch.ones(1, 3), torch.zeros(1, 1)), (torch.ones(3, 3), torch.zeros(3, 1))]
    losses = []

    @pl.algorithm(Event.AFTER_LOSS)
    def known(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * 0 + float(len(state.microbatch[0])))

    algorithm = early_stopping("train/loss", patience=5)
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1)}
    for _, state in pl.fit(nn.Linear(3, 1), data, algorithms=[algorithm, known], max_duration="1ep", **options):
        losses.append(state.loss)
    assert float(state.algorithm_state["early_stopping"]["best"]) == (1 * 1 + 3 * 3) / 4
