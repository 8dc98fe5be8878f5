"""Ablation of a run's algorithms, from a model and from the State of a boundary, against forks by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import blurpool, ema, label_smoothing, mixup, sam
from tests.support import problem
from tests.support.problem import convnet, cross_entropy, images, mlp, points
from tests.support.refused import Refusal, check
from tests.support.streams import assert_same

SETTINGS: dict[str, Any] = {
    "loss": cross_entropy,
    "optimizer": pl.optim.sgd(lr=pl.schedules.linear(0.1, 0.0, "1dur"), momentum=0.9),
    "max_duration": "4ep",
    "evaluators": {"val": points(seed=1)},
}


def stopped(start: Any, algorithms: Any, until: int) -> pl.State:
    for event, state in problem.fit(start, algorithms=algorithms, strict=False, donate=False, **SETTINGS):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == until:
            return state
    raise AssertionError


def by_hand(start: Any, algorithms: Any, until: int) -> Any:
    state = stopped(start, algorithms, until)
    evaluation = pl.evaluate(state, SETTINGS["evaluators"], loss=cross_entropy, algorithms=algorithms)
    return pl.run(evaluation).metrics["val"]["loss"]


def test_forks_are_those_by_hand() -> None:
    algorithms = [mixup(0.4), label_smoothing(0.2), ema(half_life="10ba")]
    for batch in (0, 4):
        start: Any = stopped(mlp(), algorithms, batch) if batch else mlp()
        result = pl.ablate(start, points(), algorithms=algorithms, steps="5ba", metric="val/loss", **SETTINGS)
        assert result.start == batch
        assert result.everything == by_hand(start, algorithms, batch + 5)
        for number, name in enumerate(["mixup", "label_smoothing", "ema"]):
            others = algorithms[:number] + algorithms[number + 1 :]
            assert result.without[name] == by_hand(start, others, batch + 5)
        assert result.nothing == by_hand(start, [], batch + 5)
        assert len({*result.without.values(), result.everything, result.nothing}) == 5
    assert_same(start, stopped(mlp(), algorithms, batch), "nothing of the State changes")


def test_the_loss_of_training_and_the_table() -> None:
    result = pl.ablate(mlp(), points(), algorithms=[label_smoothing(0.5)], steps="1ep", metric="train/loss", **SETTINGS)
    for value, algorithms in ((result.everything, [label_smoothing(0.5)]), (result.nothing, [])):
        pairs = pl.fit(mlp(), points(), algorithms=algorithms, **SETTINGS)
        losses: list[Any] = [state.loss for event, state in pairs if event is Event.BATCH_END][:3]
        assert value == float(torch.stack(losses).double().mean())
    lines = repr(result).splitlines()
    assert lines[0] == "ablate: train/loss after 1ep, from batch 0"
    assert [line.split()[0] for line in lines[2:]] == ["all", "without", "none"]
    assert len({len(line) for line in lines[3:]}) == 1
    assert "<td>without label_smoothing</td>" in result._repr_html_()


def test_algorithms_that_change_the_model() -> None:
    settings = {**SETTINGS, "evaluators": {"val": images(1, seed=1)}}
    result = pl.ablate(convnet(), images(), algorithms=[blurpool()], steps="1ep", **settings)
    assert result.everything != result.without["blurpool"] == result.nothing
    state = problem.run("convnet", algorithms=[blurpool()], max_duration="1ep")
    with pytest.raises(pl.errors.ArgumentError, match="'blurpool' binds INIT, and changed the model of this State"):
        pl.ablate(state, images(), algorithms=[blurpool()], steps="1ep", **settings)


def test_what_leaves_nothing_to_compare_is_refused() -> None:
    for says, change in (
        ("nothing to leave out", {"algorithms": []}),
        ("is no list of algorithms", {"algorithms": mixup()}),
        ("sam", {"algorithms": [sam(), sam()]}),
        ("give an amount of training", {"steps": "0ba"}),
        ("give an amount of training", {"steps": "10s"}),
        ("there are 'train/loss', 'val/loss'", {"metric": "val/x"}),
        ("max_durations", {"max_durations": "1ep"}),
        ("which the first fork would use up", {"train_dataloader": iter(points())}),
    ):
        options = {"train_dataloader": points(), "algorithms": [sam()], "steps": "1ba", **SETTINGS, **change}
        call = lambda options=options: pl.ablate(mlp(), **options)  # noqa: E731
        check(Refusal(says, call, pl.PureLoopError, (says,)))
