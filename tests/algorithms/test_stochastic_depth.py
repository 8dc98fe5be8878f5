"""Stochastic depth, against its formula, with rates of schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import apply_stochastic_depth, stochastic_depth
from pure_loop.algorithms.stochastic_depth import rates
from tests.support.runs import points, stream, train


class Block(nn.Module):
    """x to x + 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([[0.5, -0.5]]).expand_as(x)


def net(count: int = 4) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(count)), nn.Linear(4, 3))


def rates_of(pairs: Any, event: Event = Event.BEFORE_FORWARD) -> list[list[float]]:
    return [
        [round(float(value), 6) for name, value in state.buffers.items() if name.endswith("_rate")]
        for at, state in pairs
        if at is event
    ]


def test_the_rates_of_four_blocks() -> None:
    assert rates(4, 0.2) == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert rates(4, 0.2, "uniform") == [0.2] * 4
    kept = torch.tensor([1 - rate for rate in rates(4, 0.2)])
    torch.testing.assert_close(kept.sum(), torch.tensor(3.5))
    torch.testing.assert_close(kept.prod(), torch.tensor(0.5814))


def test_a_block_that_is_kept_and_one_that_is_left_out() -> None:
    block = apply_stochastic_depth(nn.Sequential(Constant()), Constant, 0.2).train()
    x = torch.tensor([[1.0, 2.0]]).expand(200, 2)
    y = block(x)
    kept, left_out = torch.tensor([0.375, -1.125]), torch.tensor([1.0, 2.0])
    # x + 1 / 0.8 (f - x)
    is_kept = (y - kept).abs().amax(1) < 1e-6
    is_left_out = (y - left_out).abs().amax(1) < 1e-6
    assert torch.all(is_kept ^ is_left_out)
    assert 20 < is_left_out.sum() < 60
    assert torch.equal(block.eval()(x), Constant()(x))


def test_one_draw_for_the_batch_or_for_each_sample() -> None:
    torch.manual_seed(0)
    x = torch.zeros(50, 4)
    for mode, most in (("batch", 1), ("sample", 2)):
        block = apply_stochastic_depth(nn.Sequential(Block()), Block, 0.5, mode=mode)
        assert max(len(block(x).unique()) for _ in range(10)) == most


def test_without_scale_evaluation_is_the_mean() -> None:
    block = apply_stochastic_depth(nn.Sequential(Block()), Block, 0.25, scale=False)
    x = torch.zeros(20_000, 1)
    assert set(block(x).unique().tolist()) == {0.0, 1.0}
    assert torch.equal(block.eval()(x[:2]), torch.full((2, 1), 0.75))
    assert abs(block.train()(x).mean() - 0.75) < 0.015


def test_a_schedule_and_a_warmup_reach_the_rate() -> None:
    by_schedule = stochastic_depth(Block, pl.schedules.linear(0.0, 0.4, "4ba"))
    by_warmup = stochastic_depth(Block, 0.4, warmup="4ba")
    for algorithm in (by_schedule, by_warmup):
        seen = rates_of(stream(net(2), points(6), [algorithm], max_duration="1ep"))
        assert [last for _, last in seen] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])
        assert [first for first, _ in seen] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2, 0.2])


def test_another_rate_when_training_resumes() -> None:
    state = train(net(2), points(), [stochastic_depth(Block, 0.2)], max_duration="1ep")
    resumed = stream(state, points(), [stochastic_depth(Block, 0.4)], max_duration="2ep")
    assert rates_of(resumed, Event.BATCH_END)[0] == pytest.approx([0.2, 0.4])


def test_two_of_them_have_rates_of_their_own() -> None:
    one = stochastic_depth(lambda name, layer: name in ("0", "1"), 0.2, name="one")
    two = stochastic_depth(lambda name, layer: name in ("2", "3"), 0.4, name="two")
    assert rates_of(stream(net(4), points(), [one, two]))[-1] == pytest.approx([0.1, 0.2, 0.2, 0.4])


def test_what_is_refused() -> None:
    with pytest.raises(pl.ModelError, match=r"block '4', Linear, has an input of shape \(5, 4\) and an output of"):
        train(net(), points(), [stochastic_depth(nn.Linear)])
    for wrong in (3, "Block", (Block, 3), ()):
        with pytest.raises(pl.ArgumentTypeError, match="is no class of modules"):
            stochastic_depth(wrong)
    for rate in (1.0, -0.1):
        with pytest.raises(pl.ArgumentError, match="rate"):
            stochastic_depth(Block, rate)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.4, pl.schedules.linear(0.0, 0.4, "4ba")])
def test_compiled(rate: Any) -> None:
    algorithms = [stochastic_depth(Block, rate)]
    model = net()
    eager, compiled = (train(model, points(), algorithms, compile=value) for value in (False, True))
    for name, tensor in eager.params.items():
        torch.testing.assert_close(compiled.params[name], tensor)
