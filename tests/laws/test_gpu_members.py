"""Members on a CUDA device: each is what it is alone there.

Skipped where there is none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from tests.support.problem import cross_entropy, noisy, points

pytestmark = pytest.mark.gpu

RATES = [0.1, 0.01, 0.001]
SEEDS = (3, 4, 5)


def fit(model: Any, lr: Any, **settings: Any) -> Any:
    clipping = pl.algorithms.gradient_clipping("norm", 0.5)
    # Not Adam, which makes a step out of the rounding of a gradient that is 0, that of a bias before batch norm.
    options = {
        "optimizer": pl.optim.sgd(lr=lr, momentum=0.9),
        "algorithms": [clipping, pl.algorithms.ema(half_life="3ba")],
    }
    return pl.fit(model, points(4, size=8), loss=cross_entropy, max_duration="2ep", device="cuda", **options | settings)


@pytest.mark.parametrize("fallback", [None, "loop"])
def test_each_member_is_what_it_is_alone(fallback: Any) -> None:
    """With dropout masks, rates and averages of its own; from the boundary of the first epoch it resumes bitwise."""
    watch = {Event.BATCH_END, Event.EPOCH_CHECKPOINT, Event.FIT_END}
    pairs = list(fit(pl.ensemble(noisy, seeds=SEEDS, fallback=fallback), pl.each(RATES), watch=watch))
    end = pairs[-1][1]
    assert all(tensor.is_cuda for tensor in end.params.values())
    for number, (seed, rate) in enumerate(zip(SEEDS, RATES, strict=True)):
        torch.manual_seed(seed)
        solo = pl.run(fit(noisy(), rate, seed=seed))
        for name, tensor in solo.params.items():
            torch.testing.assert_close(end.member(number).params[name], tensor, rtol=1e-4, atol=1e-6)
    kept = next(state for event, state in pairs if event is Event.EPOCH_CHECKPOINT)
    again = pl.run(fit(kept, pl.each(RATES), watch=watch))
    for name, tensor in end.params.items():
        assert torch.equal(again.params[name], tensor)


def test_a_graph_of_members_runs_without_events_inside_batches() -> None:
    with interpreted():
        state = pl.run(fit(pl.ensemble(noisy, seeds=SEEDS), pl.each(RATES), compile=True, watch=frozenset()))
    other = pl.run(fit(pl.ensemble(noisy, seeds=SEEDS), pl.each(RATES)))
    for name, tensor in other.params.items():
        torch.testing.assert_close(state.params[name], tensor, rtol=1e-4, atol=1e-6)
