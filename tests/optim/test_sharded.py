"""Optimizers on shards: lion is elementwise and trains as on one process, lamb and muon need whole tensors."""

from __future__ import annotations

import pytest
import torch

import pure_loop as pl
from pure_loop.testing.ranks import RankError
from tests.support.sharding import last, network, pool, train

OPTIMIZERS = {
    "lion": pl.optim.lion(lr=0.01, weight_decay=0.1),
    "adamw": pl.optim.adamw(lr=0.01, weight_decay=0.1, independent_decay=True),
    "sgd": pl.optim.sgd(lr=0.01, momentum=0.9, weight_decay=0.1, independent_decay=True),
}


@pytest.mark.slow
def test_elementwise_ones_train_on_shards() -> None:
    alone = {name: last(train(network(), optimizer=optimizer)) for name, optimizer in OPTIMIZERS.items()}

    def program(rank):  # type: ignore[no-untyped-def]
        runs = OPTIMIZERS.items()
        return {name: last(train(network(), optimizer=optimizer, parallel="shard")) for name, optimizer in runs}

    for states in pool().run(program):
        for name, state in states.items():
            for path, value in alone[name].items():
                if isinstance(value, torch.Tensor) and path.startswith(("params", "opt_state")):
                    torch.testing.assert_close(state[path], value, rtol=1e-9, atol=1e-11, msg=f"{name}: {path}")


@pytest.mark.slow
@pytest.mark.parametrize("make", [pl.optim.lamb, pl.optim.muon])
def test_others_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    def program(rank):  # type: ignore[no-untyped-def]
        pl.run(train(network(), optimizer=make(), parallel="shard"))

    with pytest.raises(RankError, match=r"may need whole parameters, .*parallel='replicate'"):
        pool().run(program)
