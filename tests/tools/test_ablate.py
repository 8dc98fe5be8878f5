"""Ablation of a run's algorithms, from a model and from the State of a boundary, against forks by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import blurpool, ema, label_smoothing, mixup, sam
from tests.support.runs import convnet, cross_entropy, equal, images, mlp, points, stream

SETTINGS: dict[str, Any] = {
    "loss": cross_entropy,
    "optimizer": pl.optim.sgd(lr=pl.schedules.linear(0.1, 0.0, "1dur"), momentum=0.9),
    "max_duration": "4ep",
    "evaluators": {"val": points(seed=1)},
}


def by_hand(start: Any, algorithms: Any, until: int, **options: Any) -> pl.State:
    for event, state in pl.fit(start, points(), algorithms=algorithms, **{**SETTINGS, **options}):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == until:
            break
    return pl.run(pl.evaluate(state, SETTINGS["evaluators"], loss=cross_entropy, algorithms=algorithms))


def kept(algorithms: Any, batch: int) -> pl.State:
    for event, state in pl.fit(mlp(), points(), algorithms=algorithms, donate=False, clock=lambda: 0.0, **SETTINGS):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == batch:
            return state
    raise AssertionError


@pytest.mark.parametrize("batch", [0, 4])
def test_forks_are_those_by_hand(batch: int) -> None:
    algorithms = [mixup(0.4), label_smoothing(0.2), sam(0.1)]
    start: Any = kept(algorithms, batch) if batch else mlp()
    before = start.params["0.weight"].clone() if batch else start[0].weight.clone()
    result = pl.ablate(start, points(), algorithms, steps="5ba", metric="val/loss", **SETTINGS)
    assert result.start == batch
    assert result.everything == by_hand(start, algorithms, batch + 5).metrics["val"]["loss"]
    for number, name in enumerate(["mixup", "label_smoothing", "sam"]):
        others = algorithms[:number] + algorithms[number + 1 :]
        assert result.without[name] == by_hand(start, others, batch + 5).metrics["val"]["loss"]
    assert result.nothing == by_hand(start, [], batch + 5).metrics["val"]["loss"]
    assert len({*result.without.values(), result.everything, result.nothing}) == 5
    assert torch.equal(before, start.params["0.weight"] if batch else start[0].weight)


def test_the_loss_of_training() -> None:
    result = pl.ablate(mlp(), points(), [label_smoothing(0.5)], steps="1ep", metric="train/loss", **SETTINGS)
    for value, algorithms in ((result.everything, [label_smoothing(0.5)]), (result.nothing, [])):
        pairs = pl.fit(mlp(), points(), algorithms=algorithms, **SETTINGS)
        losses = [state.loss for event, state in pairs if event is Event.BATCH_END][:3]
        assert value == float(torch.stack(losses).double().mean())


def test_an_average_is_what_is_evaluated() -> None:
    result = pl.ablate(mlp(), points(), [ema(half_life="10ba")], steps="6ba", **SETTINGS)
    average = by_hand(mlp(), [ema(half_life="10ba")], 6)
    assert result.everything == average.metrics["val"]["loss"] != result.nothing


def test_algorithms_that_change_the_model() -> None:
    settings = {**SETTINGS, "evaluators": {"val": images(1, seed=1)}}
    result = pl.ablate(convnet(), images(), [blurpool()], steps="1ep", **settings)
    assert result.everything != result.without["blurpool"] == result.nothing
    state = pl.run(stream(convnet(), images(), [blurpool()], max_duration="1ep"))
    with pytest.raises(pl.ArgumentError, match="algorithm 'blurpool' binds INIT, and changed the model of this State"):
        pl.ablate(state, images(), [blurpool()], steps="1ep", **settings)


def test_the_table() -> None:
    result = pl.ablate(mlp(), points(), [mixup(), sam()], steps="3ba", **SETTINGS)
    lines = repr(result).splitlines()
    assert lines[0] == "ablate: val/loss after 3ba, from batch 0"
    assert [line.split()[0] for line in lines[2:]] == ["all", "without", "without", "none"]
    assert len({len(line) for line in lines[3:]}) == 1
    assert "<td>without mixup</td>" in result._repr_html_()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"algorithms": []}, pl.ArgumentError, "nothing to leave out"),
        ({"algorithms": mixup()}, pl.ArgumentTypeError, "is no list of algorithms"),
        ({"algorithms": [sam(), sam()]}, pl.ArgumentError, "sam"),
        ({"steps": "0ba"}, pl.ArgumentError, "give an amount of training"),
        ({"steps": "10s"}, pl.ArgumentError, "give an amount of training"),
        ({"metric": "val/accuracyy"}, pl.ArgumentError, "there are 'train/loss', 'val/loss'"),
        ({"max_durations": "1ep"}, TypeError, "max_durations"),
    ],
)
def test_what_is_refused(change: Any, error: Any, text: str) -> None:
    arguments = {"algorithms": [sam()], "steps": "1ba", **SETTINGS, **change}
    with pytest.raises(error, match=text):
        pl.ablate(mlp(), points(), **arguments)
    with pytest.raises(pl.ArgumentError, match="an iterator, which the first fork would use up"):
        pl.ablate(mlp(), iter(points()), [sam()], steps="1ba", **SETTINGS)


def test_nothing_of_the_state_changes() -> None:
    state = kept([sam()], 3)
    copy = kept([sam()], 3)
    pl.ablate(state, points(), [sam()], steps="2ba", **SETTINGS)
    equal(state, copy)
