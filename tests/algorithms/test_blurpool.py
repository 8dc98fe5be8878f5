"""BlurPool, in real training loops, against filters and modules built by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import apply_blurpool, blurpool, ema
from pure_loop.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, blur
from pure_loop.errors import ModelError
from tests.support.runs import convnet, equal, images, mlp, noise, points, stream, train


def blurred_by_hand(x: Tensor, stride: int) -> Tensor:
    line = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype) / 4
    kernel = torch.outer(line, line).expand(x.shape[1], 1, 3, 3)
    return functional.conv2d(
        functional.pad(x, (1, 1, 1, 1), mode="replicate"), kernel, stride=stride, groups=x.shape[1]
    )


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (6, 7)])
def test_blur_is_the_binomial_filter(stride, size):
    x = torch.randn(2, 3, *size, generator=noise(), dtype=torch.float64)
    torch.testing.assert_close(blur(x, (stride, stride), (2, 2)), blurred_by_hand(x, stride))


def test_blur_filters_along_the_dimension_that_is_strided():
    x = torch.randn(1, 1, 6, 6, generator=noise())
    rows = torch.cat([x[..., :1, :], x, x[..., -1:, :]], -2)
    wanted = ((rows[..., :-2, :] + 2 * rows[..., 1:-1, :] + rows[..., 2:, :]) / 4)[..., ::2, :]
    torch.testing.assert_close(blur(x, (2, 1)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_constant_images_stay_constant(dtype):
    x = torch.full((1, 2, 7, 5), 0.3, dtype=dtype)
    pooled = apply_blurpool(nn.Sequential(nn.MaxPool2d(3, 2, 1)))(x)
    assert torch.equal(pooled, torch.full((1, 2, 4, 3), 0.3, dtype=dtype))


CONVS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (3, 5), "stride": (2, 1), "padding": (0, 2)},
    {"kernel_size": 3, "stride": 3, "dilation": 2, "groups": 4, "padding": 2, "padding_mode": "reflect"},
]


@pytest.mark.parametrize("size", [9, 10, 11])
@pytest.mark.parametrize("options", CONVS)
def test_convolutions_are_those_of_hand_built_filters(options, size):
    conv = nn.Conv2d(16, 8, **options)
    x = torch.randn(2, 16, size, size, generator=noise())
    first, after = apply_blurpool(conv), apply_blurpool(conv, blur_first=False)
    stride = conv.stride
    torch.testing.assert_close(first(x), conv(blur(x, (1, 1), stride)))
    dense = nn.Conv2d(16, 8, **{**options, "stride": 1})
    dense.load_state_dict(conv.state_dict())
    torch.testing.assert_close(after(x), blur(dense(x), stride))
    assert first(x).shape == after(x).shape == conv(x).shape
    assert type(first) is type(after) is BlurConv2d
    assert type(conv) is nn.Conv2d
    if stride == (2, 2):
        torch.testing.assert_close(first(x), conv(blurred_by_hand(x, 1)))
        torch.testing.assert_close(after(x), blurred_by_hand(dense(x), 2))


@pytest.mark.parametrize("size", [7, 8, 9])
@pytest.mark.parametrize("options", [(2,), (3, 2, 1), (2, (2, 1)), (3, 3, 1, 2)])
def test_max_pools_are_dense_maxima_filtered(options, size):
    pool = nn.MaxPool2d(*options)
    x = torch.randn(2, 3, size, size, generator=noise())
    new = apply_blurpool(pool)
    stride = pool.stride if isinstance(pool.stride, tuple) else (pool.stride, pool.stride)
    dense = functional.max_pool2d(x, pool.kernel_size, 1, pool.padding, pool.dilation)
    torch.testing.assert_close(new(x), blur(dense, stride))
    assert new(x).shape == pool(x).shape
    assert new(x[0]).shape == pool(x[0]).shape


def test_blurpool_makes_a_shifted_image_matter_less():
    x = torch.randn(1, 1, 64, 64, generator=noise())
    pool = nn.MaxPool2d(2)

    def change(layer):
        return (layer(x) - layer(x.roll(1, -1)))[..., 1:-1].abs().mean()

    assert change(apply_blurpool(pool)) < 0.7 * change(pool)


def test_surgery_leaves_the_module_as_it_was_and_keeps_names_values_and_sharing():
    shared = nn.MaxPool2d(2)
    model = nn.ModuleDict({"a": shared, "b": nn.Conv2d(16, 4, 3, stride=2), "c": shared, "few": nn.Conv2d(3, 4, 3, 2)})
    model["b"].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state_of_random = torch.get_rng_state()
    new = apply_blurpool(model)
    assert torch.equal(torch.get_rng_state(), state_of_random)
    equal(dict(new.state_dict()), before)
    assert [type(module) for module in model.values()] == [nn.MaxPool2d, nn.Conv2d, nn.MaxPool2d, nn.Conv2d]
    assert [type(module) for module in new.values()] == [BlurMaxPool2d, BlurConv2d, BlurMaxPool2d, nn.Conv2d]
    assert new["a"] is new["c"]
    assert not new["b"].weight.requires_grad
    assert new["b"].weight is not model["b"].weight
    assert "filtered=(2, 2)" in repr(new)
    assert type(apply_blurpool(model, min_channels=3)["few"]) is BlurConv2d
    assert type(apply_blurpool(model, replace_convs=False)["b"]) is nn.Conv2d
    assert type(apply_blurpool(model, replace_maxpools=False)["a"]) is nn.MaxPool2d


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (nn.Linear(1, 1), {}, "no layer that subsamples"),
        (nn.Sequential(nn.Conv2d(16, 4, 3), nn.MaxPool2d(3, 1)), {}, "no layer that subsamples"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, 2)), {}, "0 has 3 input channels"),
        (nn.Sequential(nn.Conv2d(16, 4, 3, 2)), {"replace_convs": False}, "0: replace_convs is False"),
        (nn.Sequential(nn.MaxPool2d(2)), {"replace_maxpools": False}, "0: replace_maxpools is False"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), {}, "ceil_mode or return_indices"),
        (apply_blurpool(nn.Sequential(nn.MaxPool2d(2))), {}, "0 is a BlurMaxPool2d already"),
        (type("Own", (nn.MaxPool2d,), {})(2), {}, "a subclass"),
    ],
)
def test_a_model_in_which_nothing_can_be_replaced_is_refused(module, options, words):
    with pytest.raises(ModelError, match=words):
        apply_blurpool(module, **options)


def test_blurpool_in_training_is_training_of_the_changed_module():
    model = convnet()
    equal(train(model, images(), [blurpool()]).params, train(apply_blurpool(model), images()).params)
    assert type(model[3]) is nn.MaxPool2d
    with pytest.raises(ModelError, match="nothing to replace"):
        train(mlp(), points(), [blurpool()])


def test_an_average_after_surgery_starts_from_the_new_parameters():
    @pl.algorithm(Event.INIT)
    def widen(state):
        module = state.module()
        module[4], module[7] = nn.Conv2d(16, 12, 3, 2, 1, device="meta"), nn.Linear(108, 3, device="meta")
        for parameter in (*module[4].parameters(), *module[7].parameters()):
            assert parameter.is_meta
        module[4].to_empty(device="cpu")
        module[7].to_empty(device="cpu")
        with torch.no_grad():
            for parameter in (*module[4].parameters(), *module[7].parameters()):
                parameter.fill_(0.01)
        return state.with_module(module)

    found = {}
    for event, state in stream(convnet(), images(), [widen, blurpool(), ema(half_life="2ba")], evaluators=images(1)):
        found.setdefault(event, state)
    memory = found[Event.AFTER_LOAD].algorithm_state["ema"]["params"]
    equal(memory, found[Event.AFTER_LOAD].params)
    assert memory["4.weight"].shape == (12, 16, 3, 3)
    assert isinstance(state.module()[4], BlurConv2d)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dimensions", [1, 3])
def test_sequences_and_volumes(dimensions: int, first: bool) -> None:
    """A pattern that is constant along all dimensions but one is filtered as a row of an image is."""
    convs, pools = {1: nn.Conv1d, 3: nn.Conv3d}[dimensions], {1: nn.MaxPool1d, 3: nn.MaxPool3d}[dimensions]
    inputs = torch.randn(2, 3, *[1] * (dimensions - 1), 9)
    kernel, stride = (*[1] * (dimensions - 1), 3), (*[1] * (dimensions - 1), 2)
    conv, pool = convs(3, 16, kernel, stride=stride), pools(kernel, stride=stride)
    image = nn.Conv2d(3, 16, (1, 3), stride=(1, 2))
    with torch.no_grad():
        image.weight.copy_(conv.weight.reshape(image.weight.shape))
        image.bias.copy_(conv.bias)
    options = {"blur_first": first, "min_channels": 1}
    layers, wanted = (
        apply_blurpool(net, **options)
        for net in (nn.Sequential(conv, pool), nn.Sequential(image, nn.MaxPool2d((1, 3), (1, 2))))
    )
    assert [type(layer).__name__ for layer in layers] == [f"BlurConv{dimensions}d", f"BlurMaxPool{dimensions}d"]
    values = layers(inputs)
    torch.testing.assert_close(values.reshape(2, 16, 1, -1), wanted(inputs.reshape(2, 3, 1, 9)))
    assert values.shape == nn.Sequential(conv, pool)(inputs).shape


def test_constant_volumes_stay_constant() -> None:
    pool = apply_blurpool(nn.Sequential(nn.MaxPool3d(2)))
    assert torch.equal(pool(torch.full((1, 2, 4, 6, 8), 3.0)), torch.full((1, 2, 2, 3, 4), 3.0))
