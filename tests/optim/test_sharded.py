"""Optimizers on shards: elementwise ones train as on one process, the others need whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop.testing.ranks import RankError
from tests.support import problem
from tests.support.optimizing import ELEMENTWISE, RULES
from tests.support.sharding import last, network, pool, train

OPTIMIZERS = {name: make(lr=0.01) for name, make in ELEMENTWISE.items()} | {
    "lion": pl.optim.lion(lr=0.01, weight_decay=0.1),
    "adamw": pl.optim.adamw(lr=0.01, weight_decay=0.1, independent_decay=True),
    "sgd": pl.optim.sgd(lr=0.01, momentum=0.9, weight_decay=0.1, independent_decay=True),
}


def in_half(**options: Any) -> Any:
    data = [(x.bfloat16(), y) for x, y in problem.points(4, 6)]
    optimizer = pl.optim.master_weights(pl.optim.adamw(lr=0.01))
    return pl.run(problem.fit(problem.mlp().bfloat16(), data, optimizer=optimizer, strict=False, **options))


@pytest.mark.slow  # on two processes
def test_elementwise_ones_train_on_shards_and_so_do_float32_copies_and_others_are_refused() -> None:
    alone = {name: last(train(network(), optimizer=optimizer)) for name, optimizer in OPTIMIZERS.items()}
    copies = in_half().opt_state["master"]

    def program(rank: int) -> Any:
        runs = OPTIMIZERS.items()
        ends = {name: last(train(network(), optimizer=optimizer, parallel="shard")) for name, optimizer in runs}
        master = in_half(parallel="shard").opt_state["master"]
        return ends, {name: (tensor.to_local().shape, tensor.full_tensor()) for name, tensor in master.items()}

    for states, shards in pool().run(program):
        for name, state in states.items():
            for path, value in alone[name].items():
                if isinstance(value, torch.Tensor) and path.startswith(("params", "opt_state")):
                    torch.testing.assert_close(state[path], value, rtol=1e-9, atol=1e-11, msg=f"{name}: {path}")
        assert any(shape != full.shape for shape, full in shards.values())
        for name, tensor in copies.items():
            torch.testing.assert_close(shards[name][1], tensor, rtol=0, atol=0.04)  # steps, whose signs may differ
    for make in [make for name, make in RULES.items() if name not in ELEMENTWISE]:
        refused = lambda rank: pl.run(train(network(), optimizer=make(), parallel="shard"))  # noqa: E731
        with pytest.raises(RankError, match=r"may need whole parameters, .*parallel='replicate'"):
            pool().run(refused)
