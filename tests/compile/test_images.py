"""Networks over images in a graph: numbers, and how they lie in memory, are those of eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from tests.support.streams import leaves

DATA = [
    (torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3 + i % 2) for i in range(3)
]
WATCHES = [{Event.BATCH_END}, {Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BATCH_END}]


class Net(nn.Module):
    """Two convolutions, with something in between, and after them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = relu, after: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.two = nn.Conv2d(4, 5, 3)
        self.between, self.after = between, after

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.two(self.between(self.norm(self.one(images))))
        return outputs, (outputs.flatten(1) if self.after is None else self.after(outputs))


class OneChannel(Net):
    """Strides say nothing of a single channel."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, (2, 5), padding=(0, 1), bias=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(images[:, :1].contiguous())


def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return cross_entropy(outputs[1], targets)


def states(net: nn.Module, **options: Any) -> list[pl.State]:
    stream = pl.fit(net, DATA, loss=loss, optimizer=pl.optim.sgd(lr=0.1, momentum=0.9), max_duration="2ep", **options)
    return [state for _, state in stream]


def assert_as_eager(make: Callable[[], nn.Module], **options: Any) -> None:
    compiled, eager = states(make(), compile=True, **options), states(make(), **options)
    assert len(compiled) == len(eager)
    for state, wanted in zip(compiled, eager, strict=True):
        actual, expected = leaves(state), leaves(wanted)
        assert any(isinstance(value, Tensor) and value.ndim == 4 for value in expected.values())
        for path, value in expected.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(actual[path], value, rtol=1e-4, atol=1e-5, check_stride=True, msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "watch", [WATCHES[0], pytest.param(WATCHES[1], marks=pytest.mark.thorough)], ids=["step", "pieces"]
)
def test_a_convolutional_network_through_the_compiler(watch: set[Event]) -> None:
    assert_as_eager(Net, watch=watch)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_images_of_one_channel_through_the_compiler(microbatch_size: int | None) -> None:
    """Those of a microbatch are a part of those of the batch."""
    assert_as_eager(OneChannel, watch={Event.BATCH_END}, microbatch_size=microbatch_size)


@torch.library.custom_op("pure_loop_tests::first_of_memory", mutates_args=())
def first_of_memory(tensor: Tensor) -> Tensor:
    """Takes it for granted that memory is in the order of the indices."""
    return torch.as_strided(tensor, tensor.shape, tensor.new_empty(tensor.shape, device="meta").stride()).clone()


@first_of_memory.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


first_of_memory.register_autograd(lambda _, gradient: gradient)


def strided(images: Tensor) -> Tensor:
    return images.as_strided(images.shape, (64, 1, 4, 16))


BY_LAYOUT = {"strides": strided, "a custom operation": lambda images: first_of_memory(images)}


@pytest.mark.parametrize("what", BY_LAYOUT)
def test_code_that_reads_memory_by_its_layout(what: str) -> None:
    with interpreted():
        assert_as_eager(lambda: Net(BY_LAYOUT[what]), watch={Event.BATCH_END})


def written(images: Tensor) -> Tensor:
    images = images.clone()
    images.view(len(images), -1)[:, 3] = 1.0
    return images


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "a view of a mean": lambda images: images.mean(2).view(len(images), -1),
    "a transposed view": lambda images: images.permute(0, 2, 3, 1).contiguous().view(len(images), -1),
    "channels in groups": lambda images: nn.functional.pixel_shuffle(images[:, :4], 2).flatten(1),
    "a view that is written to": lambda images: written(images).flatten(1),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", AFTER)
def test_views_of_images_are_what_they_were(what: str) -> None:
    with interpreted():
        assert_as_eager(lambda: Net(after=AFTER[what]), watch={Event.BATCH_END})
