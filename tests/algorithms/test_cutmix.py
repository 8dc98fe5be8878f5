"""CutMix and the boxes that it cuts, in real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import cutmix, paste
from pure_loop.algorithms._images import box_mask, centres
from tests.support.runs import close, convnet, equal, images, stream, train

STATE = pl.State.create(nn.Linear(1, 1))


@pytest.mark.parametrize(("centre", "kept"), [((1, 1), 0.75), ((0, 0), 0.9375), ((3, 3), 0.75)])
def test_a_box_of_a_quarter(centre: tuple[int, int], kept: float) -> None:
    two = torch.tensor(2)
    mask = box_mask(4, 4, two, two, *map(torch.tensor, centre))
    assert 1 - mask.float().mean() == kept


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
def test_a_box_has_all_its_rows(size: int) -> None:
    """Odd ones as well."""
    side = torch.tensor(size)
    assert box_mask(20, 20, side, side, torch.tensor(10), torch.tensor(10)).sum() == size**2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_places_of_boxes(size: int) -> None:
    side = torch.tensor(size)
    drawn = centres(("box",), STATE, (40_000,), 6, side, False)
    assert drawn.unique().tolist() == list(range(6))
    drawn = centres(("box",), STATE, (40_000,), 6, side, True)
    rows = box_mask(6, 1, side.expand(40_000), torch.ones(40_000).long(), drawn, torch.zeros(40_000).long())[..., 0]
    covered = rows.double().mean(0)
    # Of the 6 + size - 1 places at which a box covers a pixel each pixel is in as many as the box has rows.
    torch.testing.assert_close(covered, torch.full((6,), size / (6 + size - 1)).double(), atol=0.015, rtol=0)
    assert rows.any(1).all()


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_targets_have_the_shares_of_the_areas(per_sample: bool, uniform: bool) -> None:
    classes = torch.arange(4)
    pixels = functional.one_hot(classes).float().view(4, 4, 1, 1).expand(4, 4, 7, 9).clone()
    net = nn.Sequential(nn.Flatten(), nn.Linear(4 * 63, 4))
    algorithm = cutmix(per_sample=per_sample, uniform_sampling=uniform)
    shares = set()
    for event, state in stream(net, [(pixels, classes)] * 30, [algorithm], max_duration="1ep"):
        if event is Event.BEFORE_LOSS:
            inputs, targets = state.microbatch
            torch.testing.assert_close(inputs.mean((2, 3)), targets)
            shares |= {round(share, 5) for share in targets[classes, classes].tolist()}
    assert len(shares) > (15 if per_sample else 10)
    assert min(shares) < 0.5


def test_maps_of_classes_are_cut_with_the_images() -> None:
    maps = torch.arange(3).view(3, 1, 1).expand(3, 6, 6).clone()
    pixels = maps.unsqueeze(1).float().clone()
    pairs = list(stream(nn.Conv2d(1, 3, 1), [(pixels, maps)] * 5, [cutmix()], max_duration="1ep"))
    for event, state in pairs:
        if event is Event.BEFORE_LOSS:
            inputs, targets = state.microbatch
            assert torch.equal(inputs[:, 0].long(), targets)
    with pytest.raises(pl.DataError, match=r"their last two dimensions have to be 6 and 6"):
        train(nn.Conv2d(1, 3, 1), [(pixels, maps[:, :3])], [cutmix()])


def test_pixels_of_partners() -> None:
    pixels = torch.arange(2).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    mask = torch.tensor([[[True, False], [False, False]], [[False, False], [False, True]]])
    assert paste(pixels, torch.tensor([1, 0]), mask).flatten(1).tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]


def test_microbatches_and_both_ways() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(432, 3)).double()
    data = [(x.double(), y) for x, y in images()]

    def trained(**options: Any) -> pl.State:
        return train(net, data, [cutmix(interpolate=options.pop("interpolate", "targets"))], **options)

    for options in ({"microbatch_size": 1}, {"microbatch_size": 3}, {"interpolate": "loss"}):
        close(trained(**options).params, trained().params)


def test_nothing_is_cut_with_alpha_0() -> None:
    equal(train(convnet(), images(), [cutmix(0)]).params, train(convnet(), images()).params)


def test_what_is_refused() -> None:
    with pytest.raises(pl.ArgumentError, match="alpha"):
        cutmix(-1)
    with pytest.raises(pl.DataError, match=r"shape \(4, 4\), and images are \(n, channels, height, width\)"):
        train(nn.Linear(4, 2), [(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))], [cutmix()])
