"""Small convolutions are matrix products inside graphs: the same numbers, and only where they are quicker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import convolutions, interpreted, trace
from pure_loop.compile.convolutions import MOST_NUMBERS, MOST_NUMBERS_OF_ONE, Products
from tests.sameness import leaves
from tests.tiers import examples

Geometry = dict[str, Any]
SMALL: Geometry = {
    "images": (2, 16, 5, 4), "weight": (3, 16, 3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1),
    "transposed": False, "groups": 1, "dtype": torch.float32,
}  # fmt: skip


def arguments(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """Images and weight with their channels last, a bias, and what torch's operation is given besides."""
    source, dtype = torch.Generator().manual_seed(0), geometry["dtype"]
    images, weight = (
        torch.randn(geometry[name], generator=source, dtype=dtype).to(memory_format=torch.channels_last)
        for name in ("images", "weight")
    )
    outputs = weight.shape[1] * geometry["groups"] if geometry["transposed"] else weight.shape[0]
    bias = torch.randn(outputs, generator=source, dtype=dtype)
    rest = geometry["stride"], geometry["padding"], geometry["dilation"], geometry["transposed"], (0, 0)
    return images, weight, bias, (*rest, geometry["groups"])


def _of_both(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """A number for height and one for width, or one for both."""
    return st.tuples(numbers, numbers) | st.tuples(numbers)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Convolutions that are written as products."""
    channels = draw(st.sampled_from([1, 16, 32]))
    kernel = draw(st.tuples(*[st.integers(1, 3 if channels == 1 else 5)] * 2))
    stride, padding = (draw(_of_both(st.integers(least, most))) for least, most in ((1, 3), (0, 2)))
    size = draw(st.tuples(*[st.integers(1, 7)] * 2))
    assume(all(each + 2 * more >= taps for each, more, taps in zip(size, (padding * 2)[:2], kernel, strict=True)))
    count, out = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 16]))
    return SMALL | {
        "images": (count, channels, *size), "weight": (out, channels, *kernel), "stride": stride, "padding": padding,
    }  # fmt: skip


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "channels first": lambda tensor: tensor.contiguous(),
    "expanded": lambda tensor: tensor[:, :, :1, :1].expand(tensor.shape),  # as the gradient of a sum is
}


@examples(60, 1000)
@given(geometries(), st.booleans(), st.tuples(*[st.booleans()] * 3), st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3))
def test_a_product_gives_what_a_convolution_does(
    geometry: Geometry, has_bias: bool, wanted: tuple[bool, bool, bool], lie: tuple[str, str, str]
) -> None:
    images, weight, bias, rest = arguments(geometry)
    images, weight = LAYOUTS[lie[0]](images), LAYOUTS[lie[1]](weight)
    products = Products()
    given_bias = bias if has_bias else None
    found = products.convolution(images, weight, given_bias, *rest)
    expected = torch.ops.aten.convolution.default(images, weight, given_bias, *rest)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.is_contiguous(memory_format=torch.channels_last)

    gradient = LAYOUTS[lie[2]](torch.randn(found.shape))
    backward = gradient, images, weight, [len(bias)], *rest, wanted
    gradients, theirs = products.backward(*backward), torch.ops.aten.convolution_backward.default(*backward)
    assert gradients is not None
    for one, other, asked in zip(gradients, theirs, wanted, strict=True):
        if not asked:
            assert one is None
            continue
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


LEFT: dict[str, Geometry] = {
    "double precision": {"dtype": torch.float64},
    "half precision": {"dtype": torch.bfloat16},
    "spread out": {"dilation": (2, 1)},
    "turned around": {"transposed": True, "weight": (16, 3, 3, 3)},
    "in groups": {"groups": 2, "weight": (4, 8, 3, 3)},
    "a number of channels that fills no vector": {"images": (2, 3, 5, 4), "weight": (3, 3, 3, 3)},
    "a large kernel": {"images": (2, 16, 7, 7), "weight": (3, 16, 6, 6)},
    "a large kernel of one channel": {"images": (2, 1, 7, 7), "weight": (3, 1, 5, 5)},
    "no images": {"images": (0, 16, 5, 4)},
    "one dimension": {"images": (2, 16, 5), "weight": (3, 16, 3), "stride": (1,), "padding": (1,), "dilation": (1,)},
}


@pytest.mark.parametrize("what", LEFT)
def test_others_stay_convolutions(what: str) -> None:
    geometry = SMALL | LEFT[what]
    source = torch.Generator().manual_seed(0)
    images, weight = (
        torch.randn(geometry[name], generator=source, dtype=geometry["dtype"]) for name in ("images", "weight")
    )
    size = len(geometry["stride"])
    rest = geometry["stride"], geometry["padding"], geometry["dilation"], geometry["transposed"], (0,) * size
    expected = torch.ops.aten.convolution.default(images, weight, None, *rest, geometry["groups"])
    products = Products()
    assert products.convolution(images, weight, None, *rest, geometry["groups"]) is None
    gradient = torch.ones_like(expected)
    assert products.backward(gradient, images, weight, None, *rest, geometry["groups"], (True,) * 3) is None


@pytest.mark.parametrize(("channels", "most"), [(16, MOST_NUMBERS), (1, MOST_NUMBERS_OF_ONE)])
def test_so_many_numbers_are_a_product_and_more_are_not(channels: int, most: int) -> None:
    def found(count: int) -> Tensor | None:
        with FakeTensorMode():
            images, weight = torch.empty(count, channels, 8, 8), torch.empty(2, channels, 2, 2)
            return Products().convolution(images, weight, None, (2, 2), (0, 0), (1, 1), False, (0, 0), 1)

    count, rest = divmod(most, 16 * 4 * channels)
    assert not rest
    assert found(count) is not None
    assert found(count + 1) is None


def test_products_that_are_rounded_are_left_to_convolutions_which_are_not() -> None:
    images, weight, _, rest = arguments(SMALL)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert Products().convolution(images, weight, None, *rest) is None
        with interpreted():
            assert_as_eager(watch={Event.EPOCH_END})
    finally:
        torch.set_float32_matmul_precision(before)
    assert Products().convolution(images, weight, None, *rest) is not None


def test_the_same_images_are_laid_out_once() -> None:
    images, weight, bias, rest = arguments(SMALL)
    products = Products()
    output = products.convolution(images, weight, bias, *rest)
    assert output is not None
    assert len(products._rows) == 1
    products.backward(torch.ones_like(output), images, weight, [3], *rest, (True, True, True))
    assert len(products._rows) == 1
    products.convolution(images.clone(), weight, bias, *rest)
    products.convolution(images, weight, bias, (2, 1), *rest[1:])
    assert len(products._rows) == 3


class Net(nn.Module):
    """Of three convolutions, one has a number of channels that fills no vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 6, 3, stride=2, bias=False), nn.ReLU(), nn.Conv2d(6, 4, 2), nn.Flatten()),
        )

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images)
        return found


DATA = [
    (torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 4 + i) for i in range(3)
]


def states(**options: Any) -> list[pl.State]:
    stream = pl.fit(
        Net(), DATA, loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1, momentum=0.9), max_duration="2ep", **options
    )
    return [state for _, state in stream]


def assert_as_eager(**options: Any) -> None:
    found, expected = leaves(states(compile=True, **options)[-1]), leaves(states(**options)[-1])
    assert sum(isinstance(value, Tensor) and value.ndim == 4 for value in expected.values()) >= 6
    for path, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[path], value, rtol=1e-4, atol=1e-5, check_stride=True, msg=path)


WATCHES = [{Event.EPOCH_END}, {Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BATCH_END}]


@pytest.mark.slow
@pytest.mark.parametrize("watch", WATCHES, ids=["step", "pieces"])
def test_a_network_through_the_compiler(watch: set[Event]) -> None:
    assert_as_eager(watch=watch)


@pytest.mark.parametrize("watch", WATCHES, ids=["step", "pieces"])
def test_a_step_has_their_products_in_the_place_of_small_convolutions(
    watch: set[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    functional, found = trace._functional, Counter[str]()

    def noted(raw: Any, instead: Any) -> Any:
        graph = functional(raw, instead)
        found.update(str(node.target) for node in graph.graph.nodes)
        return graph

    monkeypatch.setattr(trace, "_functional", noted)
    with interpreted():
        assert_as_eager(watch=watch)
        assert found["aten.convolution.default"] == found["aten.convolution_backward.default"] == 1
        assert found["aten.unfold.default"] == 2 * 2  # of both, the backward uses what the forward has
        # A product and two backwards of the second, and none of the images of the first.
        assert found["aten.mm.default"] == 3 + 2

        found.clear()
        monkeypatch.setattr(convolutions, "MOST_NUMBERS", 0)
        monkeypatch.setattr(convolutions, "MOST_NUMBERS_OF_ONE", 0)
        assert_as_eager(watch=watch)
        assert found["aten.convolution.default"] == 3
        assert not found["aten.mm.default"]


@pytest.mark.parametrize("broken", ["_put_back", "_as_rows"])
def test_a_wrong_product_would_be_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(convolutions, broken)
    monkeypatch.setattr(convolutions, broken, lambda *given: right(*given).flip(-1))
    with interpreted(), pytest.raises(AssertionError):
        assert_as_eager(watch={Event.EPOCH_END})
