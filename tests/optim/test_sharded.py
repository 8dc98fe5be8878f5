"""Optimizers on shards: lion is elementwise and trains as on one process, lamb and muon need whole tensors."""

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


def in_half(**options):  # type: ignore[no-untyped-def]
    data = [(torch.randn(6, 3).bfloat16(), torch.randint(0, 2, (6,))) for _ in range(4)]
    optimizer = pl.optim.master_weights(pl.optim.adamw(lr=0.01))
    loss = torch.nn.functional.cross_entropy
    return pl.fit(network().bfloat16(), data, loss=loss, optimizer=optimizer, max_duration="1ep", **options)


@pytest.mark.slow
def test_float32_copies_are_shards_as_their_parameters() -> None:
    torch.manual_seed(0)
    alone = pl.run(in_half())

    def program(rank):  # type: ignore[no-untyped-def]
        torch.manual_seed(0)
        for event, state in in_half(parallel="shard"):
            if event is pl.Event.BATCH_END:
                master = state.opt_state["master"]
                shards = {name: tuple(tensor.to_local().shape) for name, tensor in master.items()}
                full = {name: tensor.full_tensor() for name, tensor in master.items()}
        return shards, full

    results = pool().run(program)
    for shards, full in results:
        assert any(shards[name] != tuple(tensor.shape) for name, tensor in full.items())
        for name, tensor in alone.opt_state["master"].items():
            torch.testing.assert_close(full[name], tensor, rtol=0, atol=0.01)  # two steps, whose signs may differ
            assert torch.equal(full[name], results[0][1][name])


@pytest.mark.slow
@pytest.mark.parametrize("make", [make for name, make in RULES.items() if name not in ELEMENTWISE])
def test_others_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    def program(rank):  # type: ignore[no-untyped-def]
        pl.run(train(network(), optimizer=make(), parallel="shard"))

    with pytest.raises(RankError, match=r"may need whole parameters, .*parallel='replicate'"):
        pool().run(program)
