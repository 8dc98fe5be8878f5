"""Selective backprop, in real training loops, with losses of samples by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import hardest, mixup, selective_backprop
from pure_loop.algorithms.selective_backprop import probabilities
from tests.support.runs import convnet, cross_entropy, equal, images, mlp, noise, points, stream, train


def test_probabilities_by_rank() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    wanted = torch.tensor([0.0625, 0.1875, 0.3125, 0.4375], dtype=torch.float64)
    found = probabilities(losses, 0.5)
    torch.testing.assert_close(found / found.sum(), wanted)
    found = probabilities(losses[:3], 1 / 3)
    torch.testing.assert_close(found / found.sum(), torch.tensor([0.0286, 0.2571, 0.7143]).double(), atol=1e-4, rtol=0)


def test_draws_have_these_probabilities() -> None:
    losses, random = torch.tensor([4.0, 1.0, 3.0, 2.0]), noise()
    drawn = torch.cat([hardest(losses, 0.25, random) for _ in range(8000)])
    wanted = probabilities(losses, 0.25)
    torch.testing.assert_close(drawn.bincount(minlength=4) / 8000, wanted / wanted.sum(), atol=0.02, rtol=0)
    several = torch.stack([hardest(losses, 0.75, random) for _ in range(100)])
    assert (several.diff(dim=1) > 0).all()
    assert hardest(torch.ones(3), 0.01, random).shape == (1,)


def sizes(algorithms: Any, data: Any, model: Any = None, **options: Any) -> list[int]:
    pairs = stream(model or mlp(), data, algorithms, **options)
    return [len(state.batch[0]) for event, state in pairs if event is Event.BATCH_START]


def test_when_it_is_on() -> None:
    data = points(batches=4, size=6)
    always = selective_backprop(0.5, start=0, end="1dur", interrupt=0)
    assert sizes([always], data) == [3] * 8
    assert sizes([selective_backprop(0.5, start="0.25dur", end="0.75dur", interrupt=0)], data) == [
        6,
        6,
        3,
        3,
        3,
        3,
        6,
        6,
    ]
    assert sizes([selective_backprop(0.5, start=0, end="1dur")], data) == [3, 6, 3, 6] * 2
    assert sizes([selective_backprop(0.5, start=0, end="1dur", interrupt=3)], data) == [3, 3, 6, 3] * 2
    by_schedule = selective_backprop(pl.schedules.linear(1.0, 0.5, "3ba"), start=0, end="1dur", interrupt=0)
    assert sizes([by_schedule], data, max_duration="1ep") == [6, 5, 4, 3]
    assert train(mlp(), data, [always]).timestamp.sample == 48


@pytest.mark.parametrize("own", [None, lambda outputs, batch: cross_entropy(outputs, batch[1], reduction="none")])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_samples_with_large_losses_stay(own: Any, microbatch_size: Any) -> None:
    """With a small share almost always the largest; all leaves of a batch are cut."""
    g, kept = noise(), []
    data = [
        {
            "x": torch.randn(8, 4, generator=g),
            "y": torch.randint(3, (8,), generator=g),
            "id": torch.arange(8),
            "one": 1.0,
        }
        for _ in range(30)
    ]
    model = mlp()
    task = pl.Task(
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda outputs, batch: cross_entropy(outputs, batch["y"]),
    )
    if own is not None:

        def own(outputs: Tensor, batch: Any) -> Tensor:
            return cross_entropy(outputs, batch["y"], reduction="none")

    algorithm = selective_backprop(0.125, start=0, end="1dur", interrupt=0, per_sample_loss=own)
    options = {"task": task, "loss": None, "max_duration": "1ep", "optimizer": pl.optim.sgd(lr=0.0)}
    for event, state in stream(model, data, [algorithm], microbatch_size=microbatch_size, **options):
        if event is Event.BATCH_START:
            assert len(state.batch["x"]) == len(state.batch["y"]) == 1
            whole = data[state.timestamp.batch]
            losses = cross_entropy(model(whole["x"]), whole["y"], reduction="none")
            kept.append(int(losses.argsort().argsort()[state.batch["id"]]))
            assert torch.equal(state.batch["x"][0], whole["x"][state.batch["id"][0]])
    # The largest of 8 with a probability of 0.63, the second largest with 0.24.
    assert sum(rank >= 6 for rank in kept) > 20


def test_its_forward_leaves_no_trace() -> None:
    """BatchNorm's statistics and dropout's draws are those of training on the samples that stayed."""
    chosen: list[Any] = []
    algorithm = selective_backprop(0.5, start=0, end="1dur", interrupt=0)
    for event, state in stream(convnet(), images(size=6), [algorithm]):
        if event is Event.BATCH_START:
            chosen.append(state.batch)
    by_hand = train(convnet(), chosen[:3], max_duration="3ba")
    selected = train(convnet(), images(size=6), [algorithm], max_duration="3ba")
    equal(by_hand.params, selected.params)
    equal(by_hand.buffers, selected.buffers)


def test_it_comes_before_what_changes_the_batch() -> None:
    for algorithms in ([mixup(), selective_backprop(0.5, start=0, end="1dur", interrupt=0)],):
        assert sizes(algorithms, points(size=6)) == [3] * 6
        assert sizes(algorithms[::-1], points(size=6)) == [3] * 6


def test_images_can_be_scored_at_a_smaller_size() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    algorithm = selective_backprop(0.5, start=0, end="1dur", interrupt=0, scale=0.5)
    pairs = list(stream(model, images(size=4), [algorithm], max_duration="1ba"))
    assert [state.batch[0].shape for event, state in pairs if event is Event.BATCH_START] == [(2, 3, 12, 12)]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"keep": 0.0}, "keep"),
        ({"keep": 1.1}, "keep"),
        ({"interrupt": 1}, "it would never run"),
        ({"start": "0.5dur", "end": "0.5dur"}, "does not come after"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_settings_that_are_refused(settings: Any, text: str) -> None:
    with pytest.raises(pl.ArgumentError, match=text):
        selective_backprop(**settings)


def test_a_loss_that_is_none_of_samples() -> None:
    def mean(outputs: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch[1])

    wrong = selective_backprop(start=0, per_sample_loss=mean)
    with pytest.raises(pl.DataError, match=r"returned shape \(\), and has to return one number for each of 5 samples"):
        train(mlp(), points(), [wrong])
    with pytest.raises(pl.ArgumentTypeError, match="per_sample_loss=3 is not a function"):
        selective_backprop(per_sample_loss=3)  # type: ignore[arg-type]
