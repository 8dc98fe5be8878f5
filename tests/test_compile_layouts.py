"""Images lie with their channels last inside graphs, nothing changes with that, and outside they lie as they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted, layouts, trace
from tests.sameness import leaves

DATA = [
    (torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3 + i % 2) for i in range(3)
]
EVERY_WATCH = [{Event.BATCH_END}, {Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BATCH_END}]


class Net(nn.Module):
    """Two convolutions, with something in between, and after them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = relu, after: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.two = nn.Conv2d(4, 5, 3)
        self.between, self.after = between, after

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.two(self.between(self.norm(self.one(images))))
        return found, (found.flatten(1) if self.after is None else self.after(found))


def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return cross_entropy(outputs[1], targets)


def states(net: nn.Module, **options: Any) -> list[pl.State]:
    stream = pl.fit(net, DATA, loss=loss, optimizer=pl.optim.sgd(lr=0.1, momentum=0.9), max_duration="2ep", **options)
    return [state for _, state in stream]


def assert_as_eager(make: Callable[[], nn.Module], **options: Any) -> None:
    """In numbers, and in how they lie in memory."""
    given, wanted = states(make(), compile=True, **options), states(make(), **options)
    assert len(given) == len(wanted)
    for one, other in zip(given, wanted, strict=True):
        found, expected = leaves(one), leaves(other)
        assert any(isinstance(value, Tensor) and value.ndim == 4 for value in expected.values())
        for path, value in expected.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(found[path], value, rtol=1e-4, atol=1e-5, check_stride=True, msg=path)


def convolutions(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each image and weight that a convolution of the graph reads, whether its channels lie last."""
    lower, found = trace.lower, []

    def noted(graph: Any, examples: Any) -> Any:
        for node in graph.graph.nodes:
            if "convolution" in str(node.target):
                read = [each.meta["val"] for each in node.args[:3] if hasattr(each, "meta")]
                found.extend(
                    value.is_contiguous(memory_format=torch.channels_last) for value in read if value.ndim == 4
                )
        return lower(graph, examples)

    with monkeypatch.context() as patched, interpreted():
        patched.setattr(trace, "lower", noted)
        states(net, compile=True, watch={Event.EPOCH_END})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "watch", [EVERY_WATCH[0], pytest.param(EVERY_WATCH[1], marks=pytest.mark.thorough)], ids=["step", "pieces"]
)
def test_a_convolutional_network_through_the_compiler(watch: set[Event]) -> None:
    assert_as_eager(Net, watch=watch)


def test_every_convolution_reads_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    found = convolutions(Net(), monkeypatch)
    assert len(found) == 2 * 2 + 2 * 3
    assert all(found)


def test_images_of_one_channel_say_that_it_lies_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their strides may say either, and what a convolution gives lies as its images say."""
    net = Net()
    net.one = nn.Conv2d(1, 4, (2, 5), padding=(0, 1), bias=False)  # too large a kernel for a product
    with monkeypatch.context() as patched:
        patched.setattr("tests.test_compile_layouts.DATA", [(x[:, :1].contiguous(), y) for x, y in DATA])
        lower, strides = trace.lower, []

        def noted(graph: Any, examples: Any) -> Any:
            convolutions = [node for node in graph.graph.nodes if "convolution" in str(node.target)]
            for node in convolutions:
                images = node.args[node.target is torch.ops.aten.convolution_backward.default].meta["val"]
                strides.append(images.stride(1))
                strides.extend(value.stride(1) for value in [node.meta["val"]] if isinstance(value, Tensor))
            return lower(graph, examples)

        patched.setattr(trace, "lower", noted)
        with interpreted():
            assert_as_eager(lambda: net, watch={Event.EPOCH_END})
    assert strides == [1] * 6  # of two convolutions what they read and give, and what their backwards read


class OneChannel(Net):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, (2, 5), padding=(0, 1), bias=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(images[:, :1].contiguous())


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_images_of_one_channel_through_the_compiler(microbatch_size: int | None) -> None:
    """Those of a microbatch are a part of those of the batch."""
    data = [(x[:, :1].contiguous(), y) for x, y in DATA]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.test_compile_layouts.DATA", data)
        assert_as_eager(OneChannel, watch={Event.BATCH_END}, microbatch_size=microbatch_size)


def test_double_precision_stays_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch's fast convolutions don't take."""
    with monkeypatch.context() as patched:
        patched.setattr("tests.test_compile_layouts.DATA", [(x.double(), y) for x, y in DATA])
        assert not any(convolutions(Net().double(), monkeypatch))


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


BY_LAYOUT = {"strides": strided, "an operation of one's own": lambda images: first_of_memory(images)}


@pytest.mark.parametrize("what", BY_LAYOUT)
def test_who_reads_memory_by_its_layout_has_it_as_it_was(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreted():
        assert_as_eager(lambda: Net(BY_LAYOUT[what]), watch={Event.BATCH_END})
        monkeypatch.setattr(layouts, "_minds", lambda target: False)
        with pytest.raises(AssertionError):
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
