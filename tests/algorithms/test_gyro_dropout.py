"""Gyro dropout: masks that are computed, periods, and real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import apply_gyro_dropout, gyro_dropout, masks
from tests.support.runs import close, equal, points, stream, train


def net(p: float = 0.5) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 16), nn.Dropout(p), nn.Linear(16, 16), nn.Dropout(p), nn.Linear(16, 3)
        ).double()


def data(batches: int = 8, size: int = 8) -> Any:
    return [(x.double(), y) for x, y in points(batches, size)]


def test_masks_are_fair_coins() -> None:
    kept = masks(7, torch.arange(256), 512, 0.5).double()
    assert abs(kept.mean() - 0.5) < 0.006  # four standard deviations
    assert abs(kept.mean(1).std() - 0.0221) < 0.004
    assert abs(kept.mean(0).std() - 0.03125) < 0.005
    torch.testing.assert_close(kept.T.corrcoef().triu(1).abs().max(), torch.tensor(0.0).double(), atol=0.4, rtol=0)
    assert abs(masks(7, torch.arange(256), 512, 0.2).double().mean() - 0.8) < 0.006
    assert not torch.equal(masks(8, torch.arange(2), 64, 0.5), masks(7, torch.arange(2), 64, 0.5))
    assert masks(7, torch.arange(2), 64, 0.0).all()


def test_samples_take_the_subnetworks_in_turn() -> None:
    layer = apply_gyro_dropout(nn.Sequential(nn.Dropout(0.5)), concurrent=3)
    y = layer(torch.ones(8, 2, 5, 5))
    assert torch.equal(y[:3], y[3:6])
    assert torch.equal(y[:2], y[6:])
    assert not torch.equal(y[0], y[1])
    assert set(y.unique().tolist()) == {0.0, 2.0}
    x = torch.randn(2, 3)
    assert layer.eval()(x) is x


def subnetworks(algorithm: Any, **options: Any) -> list[tuple[int, ...]]:
    pairs = stream(net(), data(), [algorithm], **options)
    return [
        tuple(s.buffers["1.gyro_dropout_subnetworks"].tolist()) for event, s in pairs if event is Event.BEFORE_FORWARD
    ]


@pytest.mark.parametrize(
    ("settings", "options", "length"),
    [
        ({"subnetworks": 8, "concurrent": 2}, {"max_duration": "2ep"}, 4),
        ({"subnetworks": 6, "concurrent": 1}, {"max_duration": "16ba"}, 2),
        ({"subnetworks": 8, "concurrent": 2}, {"max_duration": "128sp"}, 4),
        ({"period": "3ba"}, {"max_duration": "2ep"}, 3),
        ({"period": "0.5dur"}, {"max_duration": "2ep"}, 8),
        ({"subnetworks": 256, "concurrent": 1}, {"max_duration": "2ep"}, 1),
    ],
)
def test_periods(settings: Any, options: Any, length: int) -> None:
    """Of 1000 batches, 16 of 256 subnetworks are trained for 62."""
    found = subnetworks(gyro_dropout(**settings), **options)
    assert len(found) == 16
    for start in range(0, 16, length):
        assert len(set(found[start : start + length])) == 1
    assert len(set(found)) > 1
    assert all(len(set(chosen)) == len(chosen) for chosen in found)


@pytest.mark.parametrize("concurrent", [2, 4])
def test_microbatches_of_whole_turns_do_not_change_the_gradient(concurrent: int) -> None:
    algorithm = gyro_dropout(subnetworks=8, concurrent=concurrent)
    whole = train(net(), data(), [algorithm])
    close(train(net(), data(), [algorithm], microbatch_size=4).params, whole.params)
    with pytest.raises(AssertionError):
        close(train(net(), data(), [algorithm], microbatch_size=3).params, whole.params)


def test_it_resumes_within_a_period() -> None:
    algorithm = gyro_dropout(subnetworks=8, concurrent=2)
    whole = train(net(), data(), [algorithm])
    for event, state in stream(net(), data(), [algorithm], donate=False):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 6:
            kept = state
    equal(pl.run(stream(kept, data(), [algorithm])).params, whole.params)


def test_the_share_of_each_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Dropout(0.6))
    assert [layer.p for layer in apply_gyro_dropout(model)[1:]] == [0.3, 0.6]
    assert [layer.p for layer in apply_gyro_dropout(model, 0.2)[1:]] == [0.2, 0.2]


def test_what_is_refused() -> None:
    with pytest.raises(pl.ArgumentError, match="no more can be trained together"):
        gyro_dropout(subnetworks=4, concurrent=5)
    with pytest.raises(pl.ModelError, match=r"nothing to change in Sequential: its layers are Linear.*nn.Dropout"):
        apply_gyro_dropout(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(pl.ModelError, match="already"):
        apply_gyro_dropout(apply_gyro_dropout(net()))


def test_nothing_is_kept_of_dropout_of_1_and_batches_may_be_empty() -> None:
    assert not apply_gyro_dropout(nn.Sequential(nn.Dropout(1.0)))(torch.ones(2, 3)).any()
    assert apply_gyro_dropout(nn.Sequential(nn.Dropout()))(torch.ones(0, 3)).shape == (0, 3)


def test_two_of_them_have_subnetworks_of_their_own() -> None:
    one = gyro_dropout(concurrent=2, subnetworks=8, only=lambda name, layer: name == "1", name="one")
    two = gyro_dropout(concurrent=4, subnetworks=8, only=lambda name, layer: name == "3", name="two")
    buffers = train(net(), data(), [one, two]).buffers
    assert {name: len(tensor) for name, tensor in buffers.items()} == {"1.one_subnetworks": 2, "3.two_subnetworks": 4}


def test_a_duration_of_unknown_length() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter(data(2))

    with pytest.raises(pl.ArgumentError, match=r"as the length of the dataloader is not: write the period in batches"):
        train(net(), Endless(), [gyro_dropout()], max_duration="1ep")
    train(net(), Endless(), [gyro_dropout(period="1ba")], max_duration="1ep")
