"""Algorithms of batches, in steps that accumulate over several batches of the dataloader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from tests.support.runs import noise, stream, train

OF_IMAGES: dict[str, pl.Algorithm] = {
    "mixup": A.mixup(1.0),
    "cutmix": A.cutmix(),
    "cutout": A.cutout(),
    "randaugment": A.randaugment(magnitude=20),
    "augmix": A.augmix(),
    "colout": A.colout(0.5, 0.5),
    "progressive_resizing": A.progressive_resizing(mode="crop"),
    "transform": A.transform(lambda image: image + torch.rand(())),
    "selective_backprop": A.selective_backprop(start=0, interrupt=0),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layer(images.mean((2, 3)))
        return out


def pictures() -> Any:
    """Each batch twice."""
    g = noise()
    once = [(torch.rand(8, 3, 16, 16, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(2)]
    return [batch for batch in once for _ in range(2)]


def inputs(algorithm: pl.Algorithm, data: Any, **options: Any) -> list[Tensor]:
    pairs = stream(Net(), data, [algorithm], max_duration="1ba", **options)
    return [state.microbatch[0] for event, state in pairs if event is Event.BEFORE_FORWARD]


@pytest.mark.parametrize("name", OF_IMAGES)
def test_each_batch_of_a_step_has_draws_of_its_own(name: str) -> None:
    """The first one those of a step alone."""
    first, second = inputs(OF_IMAGES[name], pictures(), batches_per_step=2)
    (alone,) = inputs(OF_IMAGES[name], pictures())
    assert torch.equal(first, alone)
    assert first.shape == second.shape
    assert not torch.equal(first, second)
    assert not torch.equal(first, pictures()[0][0])


@pytest.mark.parametrize("name", OF_IMAGES)
def test_training_with_several_batches_a_step(name: str) -> None:
    options: dict[str, Any] = {"batches_per_step": 2, "max_duration": "2ep"}
    state = train(Net(), pictures(), [OF_IMAGES[name]], **options)
    half = train(Net(), pictures(), [OF_IMAGES[name]], **{**options, "max_duration": "2ba"})
    # Fractions of the duration are those of the whole run.
    if name not in ("progressive_resizing", "selective_backprop"):
        resumed = train(half, pictures(), [OF_IMAGES[name]], **options)
        assert torch.equal(resumed.params["layer.weight"], state.params["layer.weight"])
    assert state.params["layer.weight"].isfinite().all()


def test_strides_and_lengths_of_each_batch() -> None:
    conv = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for event, state in stream(conv, pictures(), [A.channels_last()], batches_per_step=2, max_duration="1ba"):
        if event is Event.BEFORE_FORWARD:
            assert state.microbatch[0].is_contiguous(memory_format=torch.channels_last)
    words = torch.arange(32).view(2, 16) % 9
    language = nn.Sequential(nn.Embedding(9, 9), nn.Flatten(2))
    task = pl.Task(loss=lambda outputs, batch: outputs.square().mean())
    warm = A.sequence_length_warmup("10ba", max_length=16)
    pairs = stream(language, [(words, words)] * 2, [warm], batches_per_step=2, max_duration="1ba", task=task, loss=None)
    assert [state.microbatch[0].shape for event, state in pairs if event is Event.BEFORE_FORWARD] == [(2, 8)] * 2


def test_batches_that_are_a_tensor() -> None:
    task = pl.Task(forward=lambda model, images: model(images), loss=lambda outputs, images: outputs.square().mean())
    images = [torch.rand(4, 3, 8, 8, generator=noise())]
    algorithm = A.transform(lambda image: image * 0)
    for event, state in stream(Net(), images, [algorithm], max_duration="1ba", task=task, loss=None):
        if event is Event.BEFORE_FORWARD:
            assert state.microbatch.shape == (4, 3, 8, 8)
            assert not state.microbatch.any()
