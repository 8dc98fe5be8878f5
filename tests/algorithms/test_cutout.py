"""Cutout, in real training loops, against squares by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import cutout, fill
from pure_loop.algorithms._images import box_mask
from tests.support.runs import convnet, equal, images, stream, train


def test_a_square_at_an_edge() -> None:
    side = torch.tensor(int(0.5 * 4))
    mask = box_mask(4, 4, side, side, torch.tensor(0), torch.tensor(3))
    filled = fill(torch.ones(1, 1, 4, 4), mask)
    assert filled[0, 0, 0].tolist() == [1, 1, 0, 0]
    assert filled.sum() == 14


def cut(data: Any, algorithm: Any) -> list[torch.Tensor]:
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    net(data[0][0].float())
    pairs = stream(net, data, [algorithm], max_duration="1ep")
    return [state.microbatch[0] for event, state in pairs if event is Event.BEFORE_FORWARD]


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize(("length", "side"), [(0.5, 5), (0.3, 3), (0.29, 2), (0.95, 9)])
def test_squares_of_each_image(per_sample: bool, length: float, side: int) -> None:
    data = [(torch.ones(6, 2, 10, 14), torch.zeros(6, dtype=torch.int64))] * 10
    sizes, differ = set(), False
    for batch in cut(data, cutout(length=length, per_sample=per_sample)):
        holes = batch == 0
        assert torch.equal(holes[:, 0], holes[:, 1])
        sizes |= set(holes[:, 0].flatten(1).sum(1).tolist())
        differ |= not torch.equal(holes[0], holes[1])
    assert differ == per_sample
    assert max(sizes) == side**2 if length <= 0.5 else max(sizes) <= side**2
    assert min(sizes) >= (side // 2) ** 2


def test_uniform_sampling_covers_each_pixel_as_often() -> None:
    data = [(torch.ones(5000, 1, 6, 6), torch.zeros(5000, dtype=torch.int64))]
    (batch,) = cut(data, cutout(uniform_sampling=True))
    covered = 1 - batch.mean((0, 1))
    torch.testing.assert_close(covered, torch.full((6, 6), (3 / 8) ** 2), atol=0.03, rtol=0)


def test_holes_and_values() -> None:
    data = [(torch.ones(50, 2, 20, 20), torch.zeros(50, dtype=torch.int64))]
    (batch,) = cut(data, cutout(3, 0.2, value=(5.0, -1.0)))
    holes = batch[:, 0] == 5
    assert torch.equal(holes, batch[:, 1] == -1)
    assert holes.flatten(1).sum(1).max() == 3 * 16
    assert torch.equal(batch[:, 0][~holes], torch.ones(int((~holes).sum())))


def test_a_schedule_of_lengths() -> None:
    data = [(torch.ones(20, 1, 10, 10), torch.zeros(20, dtype=torch.int64))] * 4
    batches = cut(data, cutout(length=pl.schedules.linear(0.0, 0.8, "4ba")))
    most = [int((batch == 0).flatten(1).sum(1).max()) for batch in batches]
    assert most == [0, 4, 16, 36]


def test_evaluation_sees_whole_images() -> None:
    for event, state in stream(convnet(), images(), [cutout()], evaluators={"val": images()}):
        if event is Event.EVAL_BEFORE_FORWARD:
            assert any(torch.equal(state.microbatch[0], pixels) for pixels, _ in images())
    equal(train(convnet(), images(), [cutout(length=0)]).params, train(convnet(), images()).params)


def test_what_is_refused() -> None:
    for settings in ({"length": 1.0}, {"length": -0.1}, {"holes": 0}, {"value": float("nan")}):
        with pytest.raises(pl.ArgumentError, match=next(iter(settings))):
            cutout(**settings)
    with pytest.raises(pl.DataError, match=r"is less than a pixel. Give a length of at least 1/12"):
        train(convnet(), images(), [cutout(length=0.05)])
    with pytest.raises(pl.ArgumentError, match=r"value has 2 numbers, and images .* have 3 channels"):
        train(convnet(), images(), [cutout(value=(0.0, 1.0))])
