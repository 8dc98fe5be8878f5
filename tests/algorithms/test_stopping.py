"""What the three algorithms that compare metrics have in common: names, modes, bad input, order, ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.algorithms import early_stopping, reduce_on_plateau, threshold_stopping
from pure_loop.algorithms._monitored import Monitored
from pure_loop.errors import ArgumentError, ArgumentTypeError

DATA = [(torch.ones(4, 3), torch.zeros(4, 2))] * 2
FACTORIES: dict[str, Any] = {
    "early_stopping": early_stopping,
    "threshold_stopping": lambda metric, **k: threshold_stopping(metric, 0.5, **k),
    "reduce_on_plateau": reduce_on_plateau,
}


def fit(algorithm: pl.Algorithm, **settings: Any) -> Any:
    options: dict[str, Any] = {"evaluators": {"val": DATA}, "optimizer": pl.optim.sgd(lr=0.1), **settings}
    loss, algorithms = nn.functional.mse_loss, [algorithm]
    return pl.fit(nn.Linear(3, 2), DATA, loss=loss, max_duration="1ep", algorithms=algorithms, **options)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_metric_that_there_is_not_is_refused_at_the_call(name: str) -> None:
    with pytest.raises(
        ArgumentError, match=rf"{name}: there is no metric 'vall/loss'; did you mean 'val/loss'\? there"
    ):
        fit(FACTORIES[name]("vall/loss"))
    evaluators = {"val": pl.Evaluator(DATA, metrics=[pl.metrics.loss("mse")])}
    with pytest.raises(ArgumentError, match=r"there is no metric 'val/loss'.* there is 'train/loss', 'val/mse'"):
        fit(FACTORIES[name]("val/loss"), evaluators=evaluators)
    with pytest.raises(ArgumentError, match=r"metric='of/two/loss': the label of its evaluator contains a slash"):
        fit(FACTORIES[name]("of/two/loss"), evaluators={"of/two": DATA})


@pytest.mark.parametrize("name", FACTORIES)
def test_a_metric_that_an_evaluation_lacks_is_named_there(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}: there is no number 'val/accuracy'; there is 'val/loss'\."):
        pl.run(fit(FACTORIES[name]("val/accuracy")))


@pytest.mark.parametrize("name", FACTORIES)
def test_whether_more_is_better_has_to_be_known(name: str) -> None:
    with pytest.raises(ArgumentError, match=r'"?val/mine.* mode="min" or mode="max"'):
        FACTORIES[name]("val/mine")
    with pytest.raises(ArgumentError, match="the evaluator's label"):
        FACTORIES[name]("loss")
    with pytest.raises(ArgumentError, match="mode"):
        FACTORIES[name]("val/loss", mode="less")


def test_modes_are_known() -> None:
    def mode(metric: str) -> str:
        return Monitored.read("x", metric, None).mode

    assert [mode(f"val/{name}") for name in ("loss", "perplexity", "accuracy", "f1/cat")] == [
        "min",
        "min",
        "max",
        "max",
    ]
    assert mode("train/loss/kl") == "min"
    assert Monitored.read("x", "val/loss", "max").mode == "max"


def test_metrics_in_mappings_have_the_names_under_which_they_are_logged() -> None:
    def both(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.mean(dim=1)

    mean = pl.metrics.mean(both, "level")
    pair = pl.metrics.Metric("pair", mean.init, mean.update, lambda acc: {"a": mean.compute(acc), "b": torch.ones(())})
    evaluators = {"val": pl.Evaluator(DATA, metrics=[pair])}
    state = pl.run(fit(threshold_stopping("val/pair/b", 1.0, mode="max"), evaluators=evaluators))
    assert state.stop


def test_an_optimizer_that_does_not_take_the_scale() -> None:
    own = pl.optim.Optimizer(
        name="own", init=lambda params: {}, update=lambda g, o, p, t: (p, o), lr=lambda timestamp: 0.1
    )
    with pytest.raises(ArgumentError, match=r"reduce_on_plateau: optimizer 'own' .*takes_lr_scale=True"):
        fit(reduce_on_plateau("val/loss"), optimizer=own)


def test_loss_of_a_part_that_there_is_not() -> None:
    algorithm = threshold_stopping("train/loss/kl", 0.1, at="batch")
    with pytest.raises(ArgumentError, match=r"the loss has no part 'train/loss/kl'; did you mean 'train/loss'"):
        pl.run(fit(algorithm))


@pytest.mark.parametrize(("metric", "at"), [("train/loss", "eval"), ("val/loss", "batch")])
def test_a_place_that_does_not_fit_the_metric(metric: str, at: Any) -> None:
    with pytest.raises(ArgumentError, match="write "):
        threshold_stopping(metric, 0.1, at=at)


@pytest.mark.parametrize(
    ("metric", "says"),
    [("val/acc", "If 'val/accuracy' is meant"), ("val/los", "If 'val/loss' is meant"), ("val/reward", '"max".$')],
)
def test_a_metric_of_which_the_better_value_is_not_known(metric: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        early_stopping(metric)


def test_a_patience_in_text_is_not_said_to_count_epochs() -> None:
    with pytest.raises(ArgumentError, match='write a number of evaluations, 3, or an amount of training such as "3ep"'):
        early_stopping(patience="3")


@pytest.mark.parametrize("patience", [0, -1, "0ep", "10s", "0.5dur", "soon"])
def test_patience_out_of_range(patience: Any) -> None:
    with pytest.raises(ArgumentError, match="early_stopping: patience="):
        early_stopping(patience=patience)


@pytest.mark.parametrize("patience", [1.5, None, True])
def test_patience_of_another_type(patience: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="early_stopping: patience="):
        early_stopping(patience=patience)
