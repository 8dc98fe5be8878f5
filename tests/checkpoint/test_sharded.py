"""States in parts on disk: saved on n ranks and loaded on m, whatever happens to a rank meanwhile."""

from __future__ import annotations

import os
import signal
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import is_sharded, local_tensor
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container, sharded
from pure_loop.checkpoint.index import INDEX
from pure_loop.frozendict import FrozenDict
from pure_loop.testing.ranks import RankError, simulate
from tests.support import sharding as on_ranks
from tests.support.problem import close, noise
from tests.support.sharding import differ_in_position, last, network, pool, train, whole, with_everything
from tests.support.streams import assert_same, leaves
from tests.support.tiers import examples


def tensors(state):
    return {name: leaf for name, leaf in state.items() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}


def run(kind=None, **options):
    return train(network(), parallel=kind, **options)


def at_batch(stream, path=None, batch=3, **options):
    """The State at a BATCH_CHECKPOINT, where it is saved, and the last one."""
    for event, state in stream:
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == batch:
            if path is not None and (dist.get_rank() == 0 or is_sharded(next(iter(state.params.values())))):
                pl.save(state, path, **options)
            found = whole(state)
    return found, whole(state)


def loaded(path, kind):
    """The State at AFTER_LOAD, whether it is in parts, and the last one."""
    for event, state in run(kind, load_path=path):
        if event is Event.AFTER_LOAD:
            at, in_parts = whole(state), all(is_sharded(tensor) for tensor in state.params.values())
    return at, in_parts, whole(state)


def test_parts_are_loaded_as_replicas_and_on_one_rank_and_the_other_way_round(tmp_path):
    parts, replicas, plain, again = (str(tmp_path / f"{name}") for name in ("a.sharded", "b", "c", "d.sharded"))

    def program(rank):
        saved = {parts: at_batch(run("shard"), parts), replicas: at_batch(run("replicate"), replicas)}
        if rank == 0:
            with open(plain, "wb") as file:
                container.write(file, dict(pl.load(replicas, model=network()).params), {})
        dist.barrier()
        for event, state in train(pl.load(parts, model=network()), parallel="shard"):
            if event is Event.FIT_START:  # a State that was loaded whole is split again, and saved in its own place
                for _ in range(2):
                    pl.save(state, again)
        kinds = {parts: "replicate", replicas: "shard", plain: "shard"}
        return saved, whole(state), {path: loaded(path, kind) for path, kind in kinds.items()}

    for saved, split, found in pool().run(program):
        assert_same(split, saved[parts][1], "split again")
        for path, (at, end) in saved.items():
            start, in_parts, final = found[path]
            assert in_parts is (path != parts)
            for each in (start, whole(pl.load(path, model=network()))):
                assert_same(differ_in_position(each), differ_in_position(at), path)
            for each in (final, last(run(load_path=path))):
                close(tensors(each), tensors(end), 1e-9)
        assert found[plain][1]
        weights = {f"params.{name}": tensor for name, tensor in pl.load(plain, model=network()).params.items()}
        assert_same({name: found[plain][0][name] for name in weights}, weights, "plain weights")
    alone, copy = (pl.load(path, model=network()) for path in (parts, again))
    assert len(os.listdir(again)) == 4
    assert_same(differ_in_position(whole(copy)), differ_in_position(whole(alone)), "saved again")
    weights = pl.load(parts, model=network(), weights_only=True, exclude="0.*", rename=lambda name: name)
    assert (weights.timestamp.batch, weights.opt_state) == (0, None)
    assert torch.equal(weights.params["1.weight"], alone.params["1.weight"])
    with pytest.raises(pl.errors.ArgumentError, match=r"both become '1\.weight'"):
        pl.load(parts, model=network(), rename={"0": "1"})
    wrapped = pl.load(parts, model=nn.Sequential(network()), rename={"": "0."}, exclude="0.1.bias")
    assert torch.equal(wrapped.params["0.1.weight"], alone.params["1.weight"])
    assert not torch.equal(wrapped.params["0.1.bias"], alone.params["1.bias"])
    assert wrapped.notes[0].added == ("0.1.bias",)
    assert_same(pl.load(parts, model=network(), exclude="opt_state"), alone.replace(opt_state=None), "the rest")


def outcome(run):
    """What a rank raised, with notes; "" where it came to its end."""
    try:
        run()
    except BaseException as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def fails_on(rank, skip):
    """container.write of this rank raises, after so many that go well."""
    real, left = container.write, [skip]

    def failing(file, tensors, metadata):
        left[0] -= 1
        if left[0] < 0:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        return real(file, tensors, metadata)

    return patch.object(container, "write", failing if dist.get_rank() == rank else real)


def save_at_one(path, remembered=0):
    for event, state in run("shard", max_duration="1ba"):
        if event is Event.BATCH_CHECKPOINT:
            pl.save(state.remember("mine", torch.tensor(remembered)), path)


def test_what_one_rank_cannot_save_is_an_error_on_all_and_the_last_checkpoint_stays(tmp_path):
    def program(rank):
        with fails_on(0, skip=2):  # rank 0 writes its part, what is in no parts, and then the index
            index = outcome(lambda: save_at_one(tmp_path / "a.sharded"))
        different = outcome(lambda: save_at_one(tmp_path / "b.sharded", remembered=rank))
        paths = outcome(lambda: save_at_one(tmp_path / f"{rank}.sharded"))
        saver = CheckpointSaver(tmp_path / "run", interval="1ba", background=rank == 0)
        with fails_on(1, skip=2):
            part = outcome(lambda: last(run("shard", callbacks=saver)))
        return index, different, paths, part

    says = [
        (("CheckpointWriteError", "raised on rank 0 of 2"), ("DistributedError", "rank 0 raised CheckpointWriteError")),
        (("state.algorithm_state.mine differs between rank 1 and rank 0",),) * 2,
        (("the ranks save different ones: rank 0 saves",),) * 2,
        (("rank 1 raised CheckpointWriteError", "ep0-ba3.sharded"), ("disk is full", "ep0-ba3.sharded")),
    ]
    for rank, texts in enumerate(pool().run(program)):
        for text, fragments in zip(texts, says, strict=True):
            assert all(fragment in text for fragment in fragments[rank]), text
    assert not (tmp_path / "a.sharded" / INDEX).exists()
    assert pl.latest_path(tmp_path / "run") == str(tmp_path / "run" / "ep0-ba2.sharded")


def test_folders_are_kept_removed_and_named_as_files_are(tmp_path):
    folder = tmp_path / "run"
    torn = folder / "ep9-ba99.sharded"
    torn.mkdir(parents=True)
    (torn / f"{'0' * 16}-0-of-2.safetensors").write_bytes(b"half")
    (folder / "mine.sharded").mkdir()

    def program(rank):
        last(run("shard", callbacks=CheckpointSaver(folder, interval="1ba", keep_last=2)))
        named = CheckpointSaver(tmp_path / "{run_name}-{start}-{rank}", filename="{run_name}-{epoch}.safetensors")
        pl.run(run("shard", callbacks=named))
        for _ in range(2):
            again = CheckpointSaver(named.place, filename="{epoch}.safetensors")
            said = outcome(lambda again=again: pl.run(run("shard", callbacks=again)))
        save_at_one(tmp_path / "ba1.sharded")
        dist.barrier()
        if rank == 0:
            (tmp_path / "ba1.sharded").rename(tmp_path / "archive")
            (tmp_path / "ba1.sharded").symlink_to(tmp_path / "archive")
        dist.barrier()
        save_at_one(tmp_path / "ba1.sharded", remembered=1)
        return named.place, said

    (place, first), (other, second) = pool().run(program)
    # Of the last batch that of its epoch's end is enough, and what has no index may be another run's, which saves now.
    kept = {"latest", "mine.sharded", torn.name}
    assert set(os.listdir(folder)) == {"ep1-ba7.sharded", "ep2-ba8.sharded", *kept}
    assert len(list(torn.iterdir())) == 1
    # A run in one process resumes from there, and takes its place.
    last(train(network(), max_duration="3ep", autoresume=folder, callbacks=CheckpointSaver(folder, keep_last=1)))
    assert set(os.listdir(folder)) == {"ep3-ba12.safetensors", *kept}
    # The name and the second are the first rank's, also where no name was passed; a second run there is refused.
    assert place == other
    assert place.endswith("-0")
    name = os.path.basename(place).rsplit("-", 2)[0]
    names = {"latest", "1.sharded", "2.sharded", f"{name}-1.sharded", f"{name}-2.sharded"}
    assert set(os.listdir(place)) == names
    assert "RunExistsError" in first
    assert "1.sharded" in first
    assert "RunExistsError" in second
    # What was moved and linked to is neither removed nor overwritten.
    assert not (tmp_path / "ba1.sharded").is_symlink()
    for path, remembered in ((tmp_path / "archive", 0), (tmp_path / "ba1.sharded", 1)):
        os.rename(path, tmp_path / "x.sharded")
        assert pl.load(tmp_path / "x.sharded", model=network()).algorithm_state["mine"] == remembered
        os.rename(tmp_path / "x.sharded", path)


class Some(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))


# The format lacks two of them: one of a byte, and one of several.
DTYPES = (torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool, torch.float8_e4m3fnuz)


@st.composite
def states(draw):
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
    generator = noise(draw(st.integers(0, 99)))

    def tensor(shape, dtype):
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        return bits[..., 0] > 127 if dtype is torch.bool else bits.view(dtype)[..., 0]

    def mapping(*dtypes):
        return FrozenDict((f"p{n}", tensor(shape, draw(st.sampled_from(dtypes)))) for n, shape in enumerate(shapes))

    plain = FrozenDict(count=torch.tensor(3), table=mapping(*DTYPES), empty=torch.ones(0, 2))
    state = pl.State.create(Some(shapes)).replace(opt_state=FrozenDict(memory=mapping(*DTYPES)))
    return state.replace(params=mapping(torch.float32), metrics={"plain": plain})


@given(states(), st.integers(1, 4), st.integers(1, 4), st.booleans())
@examples(6, 500)
def test_any_state_of_n_ranks_is_the_same_on_m(tmp_path_factory, state, n, m, replicated):
    path = str(tmp_path_factory.mktemp("folder") / "a.sharded")

    def mesh(*shape):
        if len(shape) == 1:
            return DeviceMesh.from_group(dist.group.WORLD, "cpu")
        # Its groups are never used.
        ranks = torch.arange(shape[0] * shape[1]).reshape(shape)
        return DeviceMesh("cpu", ranks, _init_backend=False, _rank=dist.get_rank())

    def save(rank):
        sharded.write(on_ranks.Here(table), on_ranks.in_parts(state, mesh(2, n) if replicated else mesh(n)), path)

    def load(rank):
        template = on_ranks.in_parts(pl.State.create(state.model.module(state.params, {})), mesh(m))
        with patch.object(sharded, "_fill_from", wraps=sharded._fill_from) as reading:
            found = sharded.ShardedCheckpoint.read(path).into(template)
        if n == m and not replicated:
            read = {call.args[0].name.partition("-")[2] for call in reading.call_args_list}
            assert read <= {f"{rank}-of-{n}.safetensors", "whole.safetensors"}
        given_here, expected = leaves(found), leaves(on_ranks.in_parts(state, mesh(m)))
        assert all(map(is_sharded, found.params.values()))
        assert given_here.keys() == expected.keys()
        for name, leaf in expected.items():
            assert is_sharded(given_here[name]) is is_sharded(leaf), name
            same_bits(local_tensor(given_here[name]), local_tensor(leaf), name)

    def same_bits(a, b, name):
        if isinstance(b, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            assert container.raw(a.contiguous()).equal(container.raw(b.contiguous())), name

    table = {}
    simulate(save, 2 * n if replicated else n)
    simulate(load, m)
    alone = leaves(pl.load(path, model=state.model.module(state.params, {})))
    for name, leaf in leaves(state).items():
        same_bits(alone[name], leaf, name)


def goes_on(folder):
    def program(rank):
        return last(with_everything(parallel="shard", autoresume=folder)), last(with_everything(parallel="shard"))

    for found, wanted in pool().run(program):
        assert_same(found, wanted, "resumed")


@pytest.mark.slow  # real ranks, which are signalled, and resume from each of many saves
def test_ranks_stop_at_one_boundary_and_resume_bitwise_from_every_save(tmp_path):
    chosen = [f"ep{(batch - 1) // 4}-ba{batch}.sharded" for batch in (3, 6)]

    def program(rank):
        found = {}
        every = CheckpointSaver(tmp_path / "every", interval="1ba")
        found["saved"] = at_batch(with_everything(parallel="shard", callbacks=every))
        for name in chosen:
            found[name] = last(with_everything(parallel="shard", load_path=tmp_path / "every" / name))
        for who in ((1,), (0, 1)):

            def kills(event, state, who=who):
                if rank in who and event is Event.BATCH_START and state.timestamp.batch == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

            kills.all_ranks = True
            saver = CheckpointSaver(tmp_path / f"signal{len(who)}", interval="10ep")
            stream = with_everything(parallel="shard", callbacks=[kills, saver])
            found[who] = outcome(lambda stream=stream: pl.run(stream))
        return found

    for found in pool().run(program):
        at, end = found["saved"]
        for name in chosen:
            assert_same(found[name], end, name)
        assert found[1,] == found[0, 1] == f"SystemExit: {128 + signal.SIGTERM}"
    alone = whole(pl.load(tmp_path / "every" / chosen[0], model=network(dropout=0.2)))
    assert_same(differ_in_position(alone), differ_in_position(at), "loaded on one rank")
    assert os.path.realpath(tmp_path / "every" / "latest") == pl.latest_path(tmp_path / "every")
    for number in (1, 2):  # the boundary after the one at which the others were told
        folder = tmp_path / f"signal{number}"
        assert [name for name in os.listdir(folder) if name.endswith(".sharded")] == ["ep0-ba4.sharded"]
    goes_on(folder)


@pytest.mark.slow  # real ranks, each kind with savers of the best, of weights, and with a limit of time
@pytest.mark.parametrize("kind", ["shard", "replicate"])
def test_savers_do_on_ranks_what_they_do_on_one(tmp_path, kind):
    def frozen(more=0):
        model = network()
        next(iter(model.parameters())).requires_grad_(False)
        next(iter(model.parameters())).data[0] += more
        return model

    one = tmp_path / "x.safetensors"
    pl.save(pl.run(train(frozen(), max_duration="3ba")), one, trained_only=True)
    end = last(train(frozen()))

    def program(rank):
        options = {"metric": "val/loss", "keep_best": 1, "keep_last": 1, "filename": "{batch}.safetensors"}
        best = CheckpointSaver(tmp_path / "best", interval="1ba", **options)
        weights = CheckpointSaver(tmp_path / "w", interval="2ba", weights_only=True, keep_last=1)
        evaluation = {"eval_interval": "1ba", "evaluators": {"val": on_ranks.batches()[:1]}}
        stream = run(kind, callbacks=[best, weights], **evaluation)
        scores = {s.timestamp.batch: float(s.metrics["val"]["loss"]) for e, s in stream if e is Event.EVAL_AFTER_ALL}
        dist.barrier()
        found = {"best": (pl.best_path(tmp_path / "best"), min(scores, key=scores.__getitem__))}
        saves = partial(at_batch, train(frozen(), parallel=kind), tmp_path / "refused", trained_only=True)
        found["refused"] = outcome(saves)
        found["at"], _ = at_batch(train(frozen(), parallel=kind), tmp_path / "at.safetensors", weights_only=True)
        found["resumed"] = last(train(frozen(), parallel=kind, load_path=one))
        found["other base"] = outcome(lambda: train(frozen(1), parallel=kind, load_path=one))
        clock, seen = [0.0], [0]

        def pass_time(event, state):  # the clocks of ranks differ
            clock[0] += (10.0 + rank) * (event is Event.BATCH_START)
            seen[0] = state.timestamp.batch

        pass_time.all_ranks = True
        saver = CheckpointSaver(tmp_path / "limit", interval=0, stop_before="50s")
        settings = {"clock": lambda: clock[0], "callbacks": pass_time, "autoresume": saver}
        found["limit"] = outcome(lambda: pl.run(run(kind, **settings))), seen[0]
        assert pl.latest_path(tmp_path / "limit") is not None  # on each rank, as soon as it ends
        found["rest"] = last(run(kind, autoresume=tmp_path / "limit"))
        found["whole"] = last(run(kind))
        return found

    ranks = pool().run(program)
    for found in ranks:
        path, batch = found["best"]
        assert path == str(tmp_path / "best" / f"{batch}.{'sharded' if kind == 'shard' else 'safetensors'}")
        assert os.readlink(tmp_path / "best" / "best") == os.path.basename(path)
        assert ("a sharded State is saved whole" in found["refused"]) is (kind == "shard")
        close(tensors(found["resumed"]), tensors(end), 1e-9)
        assert "same base" in found["other base"]
        assert found["limit"] == ranks[0]["limit"]
        assert found["limit"][0] == "SystemExit: 75"
        assert found["limit"][1] < 8
        assert_same(found["rest"], found["whole"], "resumed")
    for path, state in ((tmp_path / "w" / "latest", "whole"), (tmp_path / "at.safetensors", "at")):
        for name, tensor in pl.load(path, model=network(), weights_only=True).params.items():
            assert torch.equal(tensor, ranks[0][state][f"params.{name}"]), path


def dies_at(moment):
    """Kills this process at one of the moments of its saving: before a piece is written, flushed, or renamed."""
    left = [moment]

    def counted(real):
        def function(*arguments):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return function

    for owner, name in ((container, "_put"), (os, "fsync"), (os, "replace")):
        setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.slow  # real ranks, one of which is killed
def test_after_a_kill_in_the_middle_of_a_save_the_last_complete_one_resumes(tmp_path):
    def killed(rank):
        saver = CheckpointSaver(tmp_path, interval="1ba")
        if rank == 1:
            dies_at(50)  # in the second save, between pieces of its part
        last(with_everything(parallel="shard", autoresume=tmp_path, callbacks=saver))

    with pytest.raises(RankError, match="SIGKILL"):
        pool().run(killed)
    assert pl.latest_path(tmp_path) == str(tmp_path / "ep0-ba1.sharded")
    assert (tmp_path / "ep0-ba2.sharded").exists()
    goes_on(tmp_path)
