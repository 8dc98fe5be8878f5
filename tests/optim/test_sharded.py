"""Optimizers on shards: elementwise ones train as on one process, the others need whole tensors."""

from __future__ import annotations

import pytest
import torch

import pure_loop as pl
from pure_loop.testing.ranks import RankError
from tests.support.optimizing import ELEMENTWISE, RULES
from tests.support.sharding import last, network, pool, train

OPTIMIZERS = {name: make(lr=0.01) for name, make in ELEMENTWISE.items()} | {
    "lion": pl.optim.lion(lr=0.01, weight_decay=0.1),
    "adamw": pl.optim.adamw(lr=0.01, weight_decay=0.1, independent_decay=True),
    "sgd": pl.optim.sgd(lr=0.01, momentum=0.9, weight_decay=0.1, independent_decay=True),
}


def in_half(**options):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    data = [(torch.randn(6, 3).bfloat16(), torch.randint(0, 2, (6,))) for _ in range(4)]
    optimizer = pl.optim.master_weights(pl.optim.adamw(lr=0.01))
    loss = torch.nn.functional.cross_entropy
    return pl.fit(network().bfloat16(), data, loss=loss, optimizer=optimizer, max_duration="1ep", **options)


@pytest.mark.slow  # on two processes
def test_elementwise_ones_train_on_shards_and_so_do_float32_copies() -> None:
    alone = {name: last(train(network(), optimizer=optimizer)) for name, optimizer in OPTIMIZERS.items()}
    copies = pl.run(in_half()).opt_state["master"]

    def program(rank):  # type: ignore[no-untyped-def]
        runs = OPTIMIZERS.items()
        ends = {name: last(train(network(), optimizer=optimizer, parallel="shard")) for name, optimizer in runs}
        for event, state in in_half(parallel="shard"):
            if event is pl.Event.BATCH_END:
                master = state.opt_state["master"]
                shards = {name: tuple(tensor.to_local().shape) for name, tensor in master.items()}
                full = {name: tensor.full_tensor() for name, tensor in master.items()}
        return ends, shards, full

    for states, shards, full in pool().run(program):
        for name, state in states.items():
            for path, value in alone[name].items():
                if isinstance(value, torch.Tensor) and path.startswith(("params", "opt_state")):
                    torch.testing.assert_close(state[path], value, rtol=1e-9, atol=1e-11, msg=f"{name}: {path}")
        assert any(shards[name] != tuple(tensor.shape) for name, tensor in full.items())
        for name, tensor in copies.items():
            torch.testing.assert_close(full[name], tensor, rtol=0, atol=0.01)  # two steps, whose signs may differ


@pytest.mark.slow  # on two processes
def test_others_are_refused() -> None:
    for make in [make for name, make in RULES.items() if name not in ELEMENTWISE]:

        def program(rank):  # type: ignore[no-untyped-def]
            pl.run(train(network(), optimizer=make(), parallel="shard"))

        with pytest.raises(RankError, match=r"may need whole parameters, .*parallel='replicate'"):
            pool().run(program)
