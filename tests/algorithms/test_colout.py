"""ColOut, in real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import colout, with_lines
from tests.support.runs import equal, images, stream, train


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def seen(data: Any, algorithm: Any, model: Any = None, **options: Any) -> list[Any]:
    pairs = stream(model or net(), data, [algorithm], max_duration="1ep", **options)
    return [state.microbatch for event, state in pairs if event is Event.BEFORE_FORWARD]


@pytest.mark.parametrize("per_sample", [False, True])
def test_rows_and_columns_stay_in_their_order(per_sample: bool) -> None:
    pixels = torch.arange(48.0).view(1, 1, 6, 8).expand(5, 3, 6, 8)
    for batch, _ in seen([(pixels, torch.zeros(5, dtype=torch.int64))] * 6, colout(0.5, 0.25, per_sample=per_sample)):
        assert batch.shape == (5, 3, 3, 6)
        assert (batch.diff(dim=-1) > 0).all()
        assert (batch.diff(dim=-2) > 0).all()
        # All columns of a row are of one row, and all rows of a column of one column.
        assert (batch // 8 == batch[..., :1] // 8).all()
        assert (batch % 8 == batch[..., :1, :] % 8).all()
        assert torch.equal(batch[0], batch[1]) != per_sample or torch.equal(batch[1], batch[2]) != per_sample


@pytest.mark.parametrize(("share", "kept"), [(0.0, 10), (0.3, 7), (0.15, 8), (0.9, 1)])
def test_how_many_stay(share: float, kept: int) -> None:
    data = [(torch.zeros(2, 3, 10, 10), torch.zeros(2, dtype=torch.int64))]
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    assert seen(data, colout(share, 0), model)[0][0].shape == (2, 3, kept, 10)


@pytest.mark.parametrize("per_sample", [False, True])
def test_maps_lose_the_same(per_sample: bool) -> None:
    maps = torch.arange(64).view(1, 8, 8).expand(4, 8, 8)
    pixels = maps.unsqueeze(1).float().expand(4, 3, 8, 8)
    model = nn.Conv2d(3, 64, 1)
    (inputs, targets) = seen([(pixels, maps)], colout(0.5, 0.5, per_sample=per_sample), model)[0]
    assert torch.equal(inputs[:, 0].long(), targets)
    kept = pl.State.create(net()).replace(batch=(pixels, maps))
    assert colout(0.5, 0.5, targets="never")(kept).batch[1] is maps


def test_lines_by_index() -> None:
    pixels = torch.arange(18).view(2, 3, 3)
    one = with_lines(pixels, torch.tensor([2, 0]), torch.tensor([1]))
    assert one.tolist() == [[[7], [1]], [[16], [10]]]
    each = with_lines(pixels, torch.tensor([[0], [2]]), torch.tensor([[0, 1], [1, 2]]))
    assert each.tolist() == [[[0, 1]], [[16, 17]]]


def test_nothing_is_left_out_with_0() -> None:
    equal(train(net(), images(), [colout(0, 0)]).params, train(net(), images()).params)


def test_what_is_refused() -> None:
    for share in (-0.1, 1.0):
        with pytest.raises(pl.ArgumentError, match="columns"):
            colout(0.1, share)
    with pytest.raises(pl.DataError, match=r"rows=0.95 leaves none of the 12 rows of images"):
        train(net(), images(), [colout(0.95, 0)])
    with pytest.raises(pl.DataError, match=r"shape \(5, 4\), and images are"):
        train(nn.Linear(4, 3), [(torch.ones(5, 4), torch.zeros(5, dtype=torch.int64))], [colout()])
