"""Every algorithm of the library on two real ranks, with what it needs: both train one model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.ranges import settings_of
from pure_loop.testing._compositions import ALGORITHMS, built
from pure_loop.testing.problems import as_problem
from tests.support.samples import simplest
from tests.support.served import required, served
from tests.support.worlds import pool


def on_a_rank(rank: int, name: str, kind: Any) -> dict[str, torch.Tensor]:
    factory = ALGORITHMS[name]
    needed = {key: st.just(value) for key, value in required(factory).items() if key not in settings_of(factory)}
    algorithm = simplest(built(factory, **needed))
    problem = as_problem(served(factory) or "mlp")
    stream = pl.fit(
        *(problem.model(0), problem.batches((8, 8, 8), 1)),
        loss=problem.loss,
        optimizer=pl.optim.sgd(lr=0.01, momentum=0.9),
        max_duration="2ep",
        microbatch_size=2,
        algorithms=[algorithm],
        evaluators={"val": problem.batches((4,), 2)},
        parallel=kind,
        seed=0,
    )
    return {key: tensor.detach().clone() for key, tensor in pl.run(stream).module().state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "shard"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_train_one_model(name: str, kind: str) -> None:
    one, two = pool().run(partial(on_a_rank, name=name, kind=kind))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key
        assert tensor.isfinite().all(), key
