"""States in parts on disk: saved on n ranks, and loaded on m."""

from __future__ import annotations

import os

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import is_sharded
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container
from tests.conftest import THOROUGH
from tests.support.sharding import differ_in_position, last, network, pool, train, whole, with_everything
from tests.support.streams import assert_same


def boundaries(stream):
    """The State at every BATCH_CHECKPOINT by its batch, and the last one."""
    found = {}
    for event, state in stream:
        if event is Event.BATCH_CHECKPOINT:
            found[state.timestamp.batch] = whole(state)
    return found, whole(state)


def saved_alone(path, batches_done=3):
    for event, state in train(network()):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == batches_done:
            pl.save(state, path)
    return whole(state)


def saved_in_parts(path, batches_done=3, kind="shard"):
    def program(rank):
        for event, state in train(network(), parallel=kind):
            if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == batches_done:
                if kind == "shard" or rank == 0:
                    pl.save(state, path)
                at = whole(state)
        return at, whole(state)

    return pool().run(program)[0]


def loaded(path, ranks, kind):
    """The State at AFTER_LOAD, on every rank, whether it is in parts, and the last one."""

    def program(rank):
        for event, state in train(network(), load_path=path, parallel=kind):
            if event is Event.AFTER_LOAD:
                at = whole(state), [is_sharded(tensor) for tensor in state.params.values()]
        return *at, whole(state)

    return pool(ranks).run(program)


def assert_close(given, wanted, where):
    assert given.keys() == wanted.keys()
    for path, leaf in wanted.items():
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            assert torch.allclose(given[path], leaf, rtol=1e-9, atol=1e-12), f"{where}: {path}"


@pytest.mark.slow  # real ranks resume from each of many saves
def test_the_same_world_resumes_bitwise_from_every_save_in_the_background(tmp_path):
    folder = str(tmp_path)

    def uninterrupted(rank):
        return boundaries(with_everything(parallel="shard", callbacks=CheckpointSaver(folder, interval="1ba")))

    saved, end = pool().run(uninterrupted)[0]
    names = sorted(name for name in os.listdir(folder) if name.endswith(".sharded"))
    assert names == [*(f"ep{(batch - 1) // 4}-ba{batch}.sharded" for batch in range(1, 9)), "ep2-ba8.sharded"]
    assert pl.latest(folder) == os.path.join(folder, "ep2-ba8.sharded")
    assert os.path.realpath(os.path.join(folder, "latest")) == os.path.join(folder, "ep2-ba8.sharded")
    chosen = range(1, 9) if THOROUGH else (3, 6)

    def going_on(rank):
        found = {}
        for batch in chosen:
            path = os.path.join(folder, f"ep{(batch - 1) // 4}-ba{batch}.sharded")
            found[batch] = last(with_everything(parallel="shard", load_path=path))
        return found

    for rank, found in enumerate(pool().run(going_on)):
        for batch in chosen:
            assert_same(found[batch], end, f"rank {rank}, from batch {batch}")
    for batch, state in saved.items():
        path = os.path.join(folder, f"ep{(batch - 1) // 4}-ba{batch}.sharded")
        alone = whole(pl.load(path, model=network(dropout=0.2)))
        assert_same(differ_in_position(alone), differ_in_position(state), f"loaded on one rank, batch {batch}")


def test_two_ranks_to_one_to_three_and_to_replicas(tmp_path):
    path = str(tmp_path / "a.sharded")
    at, end = saved_in_parts(path)
    alone = pl.load(path, model=network())
    assert not any(map(is_sharded, alone.params.values()))
    assert_same(differ_in_position(whole(alone)), differ_in_position(at), "loaded on one rank")
    assert_close(last(train(network(), load_path=path)), end, "one rank went on")
    for ranks, kind, parts in ((2, "replicate", False), (3, "shard", True)):
        for found, in_parts, final in loaded(path, ranks, kind):
            assert all(each is parts for each in in_parts)
            assert_same(differ_in_position(found), differ_in_position(at), f"{kind} on {ranks}")
            assert_close(final, end, f"{kind} on {ranks} went on")


def test_one_rank_and_replicas_to_parts(tmp_path):
    alone, replicas = str(tmp_path / "one.safetensors"), str(tmp_path / "replicas.safetensors")
    ends = {alone: saved_alone(alone), replicas: saved_in_parts(replicas, kind="replicate")[1]}
    for path, end in ends.items():
        at = whole(pl.load(path, model=network()))
        for found, in_parts, final in loaded(path, 2, "shard"):
            assert all(in_parts)
            assert_same(differ_in_position(found), differ_in_position(at), path)
            assert_close(final, end, path)


def test_weights_alone_of_a_folder_and_plain_weights_into_parts(tmp_path):
    path, plain = str(tmp_path / "a.sharded"), str(tmp_path / "plain.safetensors")
    saved_in_parts(path)
    weights = pl.load(path, model=network(), weights_only=True)
    assert weights.timestamp.batch == 0
    assert_same(dict(weights.params), dict(pl.load(path, model=network()).params), "weights alone")
    with open(plain, "wb") as file:
        container.write(file, dict(weights.params), {})
    for found, in_parts, _ in loaded(plain, 2, "shard"):
        assert all(in_parts)
        for name, tensor in weights.params.items():
            assert torch.equal(found[f"params.{name}"], tensor)


def test_a_state_loaded_whole_is_split_again_and_saved_in_its_own_place(tmp_path):
    path = str(tmp_path / "a.sharded")
    at, end = saved_in_parts(path)

    def program(rank):
        state = pl.load(path, model=network())
        stream = train(state, parallel="shard")
        for event, state in stream:
            if event is Event.FIT_START:
                pl.save(state, path)
        return whole(state)

    for found in pool().run(program):
        assert_same(found, end, "split again")
    assert len(os.listdir(path)) == 4
    assert_same(differ_in_position(whole(pl.load(path, model=network()))), differ_in_position(at), "saved again")
