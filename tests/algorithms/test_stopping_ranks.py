"""Early stopping, threshold stopping and reduction on a plateau on two real ranks, whose samples differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import early_stopping, reduce_on_plateau, threshold_stopping
from pure_loop.state import POSITIONS
from tests.support.sharding import pool, whole
from tests.support.streams import assert_same

pytestmark = pytest.mark.slow

EPOCHS, BATCHES = 9, 2

# Each ends, or reduces the rate, in the middle of the run.
ALGORITHMS: dict[str, Any] = {
    "early stopping, evaluations": lambda: early_stopping("val/loss", patience=1, min_delta=0.01),
    "early stopping, training": lambda: early_stopping("train/loss", patience="2ba", interval="1ba", min_delta=0.01),
    "threshold, evaluations": lambda: threshold_stopping("val/loss", 0.17),
    "threshold, training": lambda: threshold_stopping("train/loss", 0.2, at="batch"),
    "plateau, evaluations": lambda: reduce_on_plateau("val/loss", patience=1, threshold=0.5),
    "plateau, training": lambda: reduce_on_plateau("train/loss", patience=1, threshold=0.5),
}


def data() -> list[Any]:
    """Batches of which each rank takes its half."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 3, generator=generator).double() for _ in range(BATCHES)]
    return [(x, x.sum(1, keepdim=True).tanh()) for x in batches]


def stream(name: str, start: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9),
        "max_duration": f"{EPOCHS}ep",
        "evaluators": {"val": data()},
        "algorithms": [ALGORITHMS[name]()],
        **options,
    }
    return pl.fit(nn.Linear(3, 1).double() if start is None else start, data(), **settings)


def outcome(state: pl.State) -> tuple[int, bool, float | None]:
    return state.timestamp.batch, state.stop, None if state.lr_scale is None else float(state.lr_scale)


def of_ranks(parallel: Any) -> Any:
    def program(rank: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for name in ALGORITHMS:
            kept, losses = None, set()
            for event, state in stream(name, parallel=parallel, donate=False):
                if event is Event.AFTER_BACKWARD:
                    losses.add(float(state.loss))
                if event is Event.BATCH_END and state.timestamp.batch == 2:
                    kept = state
            end = whole(state)
            assert_same(whole(pl.run(stream(name, start=kept, parallel=parallel))), end, name)
            results[name] = outcome(state), losses
        return results

    return program


@pytest.fixture(scope="module", params=["replicate", "shard"])
def ran(request: pytest.FixtureRequest) -> Any:
    return pool().run(of_ranks(request.param))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_come_to_what_one_comes_to(name: str, ran: Any) -> None:
    (first, losses), (second, others) = (rank[name] for rank in ran)
    assert first == second == outcome(pl.run(stream(name)))
    assert losses.isdisjoint(others), "the samples, and losses of backward passes, differ"
    batch, stop, scale = first
    if "plateau" in name:
        assert not stop
        assert scale is not None
        assert scale < 1
    else:
        assert stop
        assert 2 < batch < EPOCHS * BATCHES


@pytest.mark.parametrize("name", ["early stopping, evaluations", "threshold, training", "plateau, training"])
def test_resumed_from_every_boundary(name: str) -> None:
    options: dict[str, Any] = {"parallel": "replicate", "max_duration": "4ep"}

    def program(rank: int) -> int:
        kept = [state for event, state in stream(name, donate=False, **options) if event in POSITIONS]
        end = whole(pl.run(stream(name, **options)))
        for state in kept:
            assert_same(whole(pl.run(stream(name, start=state, **options))), end, repr(state))
        return len(kept)

    first, second = pool().run(program)
    assert first == second > 5
