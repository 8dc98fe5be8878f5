"""Progressive resizing: sizes by the timestamp, in real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import progressive_resizing, resized
from pure_loop.algorithms.progressive_resizing import side_of
from tests.support.runs import stream, train


def net(channels: int = 1) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))


def data(height: int, width: int, batches: int = 20) -> Any:
    pixels = torch.arange(float(height * width)).view(1, 1, height, width).expand(2, 1, height, width)
    return [(pixels, torch.zeros(2, dtype=torch.int64))] * batches


def sizes(height: int, width: int, algorithm: Any) -> list[tuple[int, ...]]:
    pairs = stream(
        net(), data(height, width), [algorithm], max_duration="1ep", evaluators={"val": data(height, width, 1)}
    )
    found = []
    for event, state in pairs:
        if event is Event.BEFORE_FORWARD:
            found.append(tuple(state.microbatch[0].shape[2:]))
        if event is Event.EVAL_BEFORE_FORWARD:
            assert state.microbatch[0].shape[2:] == (height, width)
    return found


def test_the_sizes_of_a_run() -> None:
    """At 0, .5, .6, .65 and .8 of 20 batches: 16, 16, 20, 24 and 32 of 32 pixels."""
    found = sizes(32, 32, progressive_resizing())
    assert [found[number] for number in (0, 10, 12, 13, 16, 19)] == [(s, s) for s in (16, 16, 20, 24, 32, 32)]
    assert len(set(found)) <= 16 / 4 + 1
    assert found == sorted(found)


def test_times_in_the_unit_of_the_duration() -> None:
    by_part = sizes(32, 32, progressive_resizing(delay="0.25dur", finetune="0.25dur"))
    pairs = stream(net(), data(32, 32), [progressive_resizing(delay="5ba", finetune="5ba")], max_duration="20ba")
    by_batch = [tuple(state.microbatch[0].shape[2:]) for event, state in pairs if event is Event.BEFORE_FORWARD]
    assert by_batch == by_part
    assert by_part[4] == (16, 16)
    assert by_part[15] == (32, 32)


def test_each_side_is_a_multiple() -> None:
    for height, width in sizes(30, 50, progressive_resizing(0.4, delay=0, finetune=0, increment=4)):
        assert height % 4 == 0 or height == 30
        assert width % 4 == 0 or width == 50
    assert [side_of(5, 0.1, 8), side_of(30, 0.99, 4), side_of(32, 0.5, 1)] == [5, 28, 16]


def test_a_schedule_of_sizes() -> None:
    found = sizes(32, 32, progressive_resizing(size=pl.schedules.step("10ba", gamma=0.5), increment=1))
    assert found == [(32, 32)] * 10 + [(16, 16)] * 10


def test_images_are_filtered_before_they_become_smaller() -> None:
    stripes = torch.tensor([0.0, 1.0]).repeat(16).expand(1, 1, 32, 32)
    inner = resized(stripes, 16, 16)[..., 2:-2]
    torch.testing.assert_close(inner, torch.full_like(inner, 0.5), atol=0.13, rtol=0)
    assert resized(stripes, 16, 16, "nearest").unique().numel() == 1
    whole = (stripes * 255).to(torch.uint8)
    assert resized(whole, 16, 16, "bicubic").dtype is torch.uint8


def test_a_crop_is_a_part_of_the_image() -> None:
    pairs = stream(net(), data(9, 12), [progressive_resizing(0.5, mode="crop", increment=3)], max_duration="1ep")
    corners = set()
    for event, state in pairs:
        if event is Event.BEFORE_FORWARD:
            pixels = state.microbatch[0][0, 0]
            top, left = divmod(int(pixels[0, 0]), 12)
            assert torch.equal(pixels, data(9, 12)[0][0][0, 0, top : top + len(pixels), left : left + pixels.shape[1]])
            corners.add((top, left))
    assert len(corners) > 5


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_maps_keep_their_classes(mode: Any) -> None:
    maps = torch.tensor([0, 255]).repeat_interleave(8).expand(3, 16, 16)
    batches = [(maps.unsqueeze(1).float(), maps)]
    task = pl.Task(loss=lambda outputs, batch: (outputs.mean() - batch[1].float().mean()) ** 2)
    pairs = stream(
        net(), batches, [progressive_resizing(targets=True, mode=mode)], max_duration="1ba", task=task, loss=None
    )
    for event, state in pairs:
        if event is Event.BEFORE_FORWARD:
            inputs, targets = state.microbatch
            assert targets.shape == (3, 8, 8) == inputs[:, 0].shape
            assert targets.dtype is torch.int64
            assert set(targets.unique().tolist()) <= {0, 255}


def test_what_is_refused() -> None:
    with pytest.raises(pl.ArgumentError, match="would have no time to grow"):
        progressive_resizing(delay="0.5dur", finetune="0.5dur")
    with pytest.raises(pl.ArgumentError, match="initial"):
        progressive_resizing(0)
    with pytest.raises(pl.ArgumentError, match="goes by the clock"):
        progressive_resizing(delay="10s")
    with pytest.raises(pl.ArgumentError, match="'5ba' is no part of max_duration='1ep', which counts otherwise"):
        train(net(), data(8, 8), [progressive_resizing(delay="5ba")], max_duration="1ep")
