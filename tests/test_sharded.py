"""States in parts on disk: saved on n ranks and loaded on m, what can be wrong with a folder, and ranks that fail."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
from unittest.mock import patch

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import pure_loop as pl
from pure_loop import Event
from pure_loop._parts import is_part, part_of, whole_of
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container, resharding
from pure_loop.checkpoint.document import METADATA_KEY
from pure_loop.checkpoint.index import INDEX, INDEX_KEY
from pure_loop.checkpoint.sharded import ShardedCheckpoint, write
from pure_loop.frozendict import FrozenDict
from pure_loop.testing.ranks import RankError, shared_pool, simulate
from tests.conftest import THOROUGH
from tests.sameness import assert_same, leaves

torch.set_num_threads(1)


def pool(ranks=2):
    # torch's DistributedDataParallel crashes where gloo's collectives are checked, and one pool is enough.
    return shared_pool(ranks, checked=False)


def network(dropout=0.0, width=5):
    torch.manual_seed(0)
    layers = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(dropout), nn.Linear(width, 2)
    return nn.Sequential(*(layers if dropout else layers[::3])).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 3, generator=generator).double(), torch.randint(0, 2, (6,), generator=generator))
        for _ in range(4)
    ]


def train(given, **options):
    options = {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "max_duration": "2ep", **options}
    return pl.fit(given, batches(), loss=nn.functional.cross_entropy, **options)


def with_everything(**options):
    """Dropout, BatchNorm, AdamW, EMA, SAM and a loss scale: what the next step reads, in parts and not."""
    algorithms = [pl.algorithms.ema(half_life="3ba"), pl.algorithms.sam(rho=0.1)]
    model = options.pop("model", None) or network(dropout=0.2)
    return train(model, optimizer=pl.optim.adamw(lr=0.05, amsgrad=True), algorithms=algorithms, **options)


def whole(state):
    """Every leaf that is on disk; all ranks have to ask."""
    state = state.replace(event=None, batch=None, microbatch=None, outputs=None, loss=None, grads=None)
    return {
        path: whole_of(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves(state).items()
    }


def last(stream):
    return whole(pl.run(stream))


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
                at = whole(state), [is_part(tensor) for tensor in state.params.values()]
        return *at, whole(state)

    return pool(ranks).run(program)


def assert_close(given, wanted, where):
    assert given.keys() == wanted.keys()
    for path, leaf in wanted.items():
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            assert torch.allclose(given[path], leaf, rtol=1e-9, atol=1e-12), f"{where}: {path}"


def differ_in_position(state):
    """Where it was saved is the only thing that a State of the loader says besides."""
    return {path: leaf for path, leaf in state.items() if path not in ("event", "position")}


# Worlds.


def test_the_same_world_goes_on_bitwise_from_every_save_in_the_background(tmp_path):
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
    assert not any(map(is_part, alone.params.values()))
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


# Planning and resharding, in this process: any shapes, dtypes, and numbers of ranks.


class _Here:
    """A meeting of simulated ranks, which run again from their start at each barrier."""

    def __init__(self, table):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._table, self._round = table, 0

    def round(self, path, make, decide):
        self._round += 1
        made = self._table.setdefault((self._round, "made"), {})
        if self.rank not in made:
            made[self.rank] = pickle.dumps(make())
        else:
            make()
        dist.barrier()
        given = self._table.setdefault((self._round, "given"), {})
        if self.rank == 0 and not given:
            given |= enumerate(decide([pickle.loads(made[rank]) for rank in range(self.ranks)]))
        dist.barrier()
        return given[self.rank]


class _Some(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))


DTYPES = (torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool, torch.float8_e4m3fn)


def in_parts(state, mesh):
    """Parameters, and what is remembered of them, by their first dimension."""

    def split(tensor):
        if tensor.ndim == 0:
            return tensor
        placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
        size, place = mesh.size(mesh.ndim - 1), mesh.get_coordinate()[-1]
        chunks = tensor.chunk(size, 0)
        part = chunks[place] if place < len(chunks) else tensor[:0]
        stride = torch.empty(tensor.shape, device="meta").stride()
        return DTensor.from_local(part.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=stride)

    fields = {
        field: optree.tree_map(split, getattr(state, field), namespace="pure_loop") for field in ("params", "opt_state")
    }
    return state.replace(**fields)


@st.composite
def states(draw):
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def numbers(shape, dtype):
        return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)

    def tensor(shape, dtype):
        if dtype is torch.bool:
            return numbers(shape, dtype)[..., 0] > 127
        return numbers(shape, dtype).view(dtype)[..., 0]

    module = _Some(shapes)
    params = FrozenDict((name, tensor(each.shape, each.dtype)) for name, each in module.named_parameters())
    memory = FrozenDict(
        (name, tensor(each.shape, draw(st.sampled_from(DTYPES)))) for name, each in module.named_parameters()
    )
    plain = FrozenDict(
        count=torch.tensor(3), table=tensor((2, 3), draw(st.sampled_from(DTYPES))), empty=torch.ones(0, 2)
    )
    return pl.State.create(module).replace(params=params, opt_state=FrozenDict(memory=memory), metrics={"plain": plain})


@given(states(), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=500 if THOROUGH else 12)
def test_any_state_of_n_ranks_is_the_same_on_m(tmp_path_factory, state, n, m, replicated):
    path = str(tmp_path_factory.mktemp("folder") / "a.sharded")
    shape = (2, n) if replicated else (n,)

    def mesh(shape):
        if len(shape) == 1:
            return DeviceMesh.from_group(dist.group.WORLD, "cpu")
        # Its groups are never used.
        ranks = torch.arange(shape[0] * shape[1]).reshape(shape)
        return DeviceMesh("cpu", ranks, _init_backend=False, _rank=dist.get_rank())

    def save(rank):
        write(_Here(table), in_parts(state, mesh(shape)), path)

    def load(rank):
        template = in_parts(pl.State.create(state.model.module(state.params, {})), mesh((m,)))
        with patch.object(resharding, "_fill_from", wraps=resharding._fill_from) as reading:
            found = ShardedCheckpoint.read(path).into(template)
        if n == m and not replicated:
            read = {call.args[0].name.partition("-")[2] for call in reading.call_args_list}
            assert read <= {f"{rank}-of-{n}.safetensors", "whole.safetensors"}
        wanted = in_parts(state, mesh((m,)))
        assert all(map(is_part, found.params.values()))
        given, expected = leaves(found), leaves(wanted)
        assert given.keys() == expected.keys()
        for name, leaf in expected.items():
            assert is_part(given[name]) is is_part(leaf), name
            a, b = part_of(given[name]), part_of(leaf)
            if isinstance(b, torch.Tensor):
                assert a.dtype is b.dtype
                assert a.shape == b.shape, name
                assert container.raw(a).equal(container.raw(b)), name

    table = {}
    simulate(save, shape[0] * n if replicated else n)
    simulate(load, m)
    alone = pl.load(path, model=state.model.module(state.params, {}))
    for name, leaf in leaves(state).items():
        if isinstance(leaf, torch.Tensor):
            assert container.raw(leaves(alone)[name].contiguous()).equal(container.raw(leaf.contiguous())), name


# Folders that are not whole, and those of strangers.


def small(path, ranks=2, weight=1.0, batch=0):
    """A checkpoint of a small State, in parts of so many ranks that are not there."""
    torch.manual_seed(0)
    module = network()
    state = pl.State.create(module, seed=3)
    params = FrozenDict((name, weight * tensor) for name, tensor in state.params.items())
    state = state.replace(params=params, opt_state=FrozenDict(memory=FrozenDict(params), count=torch.tensor(2)))
    for _ in range(batch):
        state = state.count_batch(samples=4)
    table = {}

    def program(rank):
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        write(_Here(table), in_parts(state, mesh), path)

    simulate(program, ranks)
    return state


def parts(path):
    return sorted(name for name in os.listdir(path) if name != INDEX)


def rewrite(path, change, document=None):
    """Write the index anew, with a digest that is right, as a stranger would."""
    file = os.path.join(path, INDEX)
    with open(file, "rb") as opened:
        header, _ = container.read(opened, os.path.getsize(file), file)
    metadata = dict(header.metadata)
    index = json.loads(metadata[INDEX_KEY])
    change(index)
    metadata[INDEX_KEY] = json.dumps(index)
    if document is not None:
        text = json.loads(metadata[METADATA_KEY])
        document(text)
        metadata[METADATA_KEY] = json.dumps(text)
    with open(file, "wb") as opened:
        container.write(opened, {}, metadata)


def cut(name, fraction):
    def damage(path):
        file = os.path.join(path, name or parts(path)[0])
        os.truncate(file, int(os.path.getsize(file) * fraction))

    return damage


def flip(name, fraction):
    def damage(path):
        file = os.path.join(path, name or parts(path)[0])
        with open(file, "r+b") as opened:
            opened.seek(min(int(os.path.getsize(file) * fraction), os.path.getsize(file) - 1))
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))

    return damage


def of_another_save(path):
    other = path + "-other"
    small(other, weight=2.0)
    shutil.copy(os.path.join(other, parts(other)[0]), os.path.join(path, parts(path)[0]))


def as_a_link(path):
    part = os.path.join(path, parts(path)[0])
    shutil.move(part, path + "-elsewhere")
    os.symlink(path + "-elsewhere", part)


def as_a_folder(path):
    part = os.path.join(path, parts(path)[0])
    os.unlink(part)
    os.mkdir(part)


DAMAGES = {
    "without its index": lambda path: os.unlink(os.path.join(path, INDEX)),
    "without a part": lambda path: os.unlink(os.path.join(path, parts(path)[1])),
    "with a part of another save": of_another_save,
    "with a link to outside": as_a_link,
    "with a folder as a part": as_a_folder,
    **{f"part cut at {n}/8": cut(None, n / 8) for n in range(8)},
    **{f"index cut at {n}/8": cut(INDEX, n / 8) for n in range(8)},
    **{f"part flipped at {n}/8": flip(None, n / 8) for n in range(9)},
    **{f"index flipped at {n}/8": flip(INDEX, n / 8) for n in range(9)},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("original"))
    small(os.path.join(folder, "older.sharded"), batch=1)
    small(os.path.join(folder, "newer.sharded"), batch=2)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return str(tmp_path / "run")


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_and_latest_passes_over_it(name, folder):
    newer, older = (os.path.join(folder, each) for each in ("newer.sharded", "older.sharded"))
    assert pl.latest(folder) == newer
    DAMAGES[name](newer)
    with pytest.raises(pl.CheckpointError, match="newer"):
        pl.load(newer, model=network())
    with patch.object(logging.getLogger("pure_loop.checkpoint"), "warning") as warning:
        assert pl.latest(folder) == older
    message, path, _ = warning.call_args.args
    assert message.startswith("%s is passed over")
    assert path == newer
    assert pl.load(older, model=network()).timestamp.batch == 1


def _of(change):
    return lambda path: rewrite(path, change)


def _first(index):
    return next(each for each in index["tensors"].values() if each[3] and len(each[3]) > 1)


def _name(name):
    def change(index):
        index["files"][0][0] = name

    return change


def _bigger(index):
    tensor = _first(index)
    tensor[1] = [1 << 40, *tensor[1][1:]]
    tensor[3] = [[0, [0] * len(tensor[1]), tensor[1]]]


def _hole(index):
    _first(index)[3].pop()


def _twice(index):
    tensor = _first(index)
    tensor[3][1][1:] = tensor[3][0][1:]


def _outside(index):
    _first(index)[3][0][1][0] += 1 << 20


def _another_file(index):
    _first(index)[3][0][0] = 7


def _another_dtype(index):
    index["tensors"]["opt_state.memory.0.bias"][0] = "I64"


def _nested(index):
    index["files"] = [[[[]]]]


STRANGE = {
    **{
        f"a file named {name}": (_of(_name(name)), "names the file")
        for name in (
            *("../older.sharded/x.safetensors", "/etc/passwd", "..", "", ".", "a/b.safetensors", "x\0y"),
            *("file:///etc/passwd", "C:\\x.safetensors", 7, None, "0123456789abcdef-0-of-2.safetensors/../../x"),
        )
    },
    "a file twice": (_of(lambda index: index["files"].append(index["files"][0])), "twice"),
    "more than the files hold": (_of(_bigger), "bytes of tensors in"),
    "a hole": (_of(_hole), "not all of it, once"),
    "an overlap": (_of(_twice), "not all of it, once"),
    "a chunk outside": (_of(_outside), "outside of its shape"),
    "a chunk in a file that isn't there": (_of(_another_file), "in file 7"),
    "another structure": (_of(_nested), "can't be read"),
    "no tensors": (_of(lambda index: index.pop("tensors")), "its index is none"),
    "a tensor that is missing": (
        _of(lambda index: index["tensors"].pop("opt_state.memory.0.weight")),
        "opt_state.memory",
    ),
    "a tensor of nobody": (
        _of(lambda index: index["tensors"].update(nobody=["F32", [0], False, []])),
        "are nobody's: .'nobody'",
    ),
    "another dtype": (
        _of(lambda index: index["tensors"]["opt_state.memory.0.bias"].__setitem__(0, "I64")),
        "lacks 'opt",
    ),
    "an unknown dtype": (_of(lambda index: _first(index).__setitem__(0, "F1")), "dtype 'F1'"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_index_of_a_stranger_is_refused(name, folder):
    path = os.path.join(folder, "newer.sharded")
    change, says = STRANGE[name]
    change(path)
    with pytest.raises(pl.CheckpointError, match=says):
        pl.load(path, model=network())


NASTY = st.one_of(
    st.sampled_from([None, True, "", "F64", "I64", "BOOL", [], {}, [[]], -1, 0, 1, 7, 1 << 31, (1 << 63) - 1, 1 << 70]),
    st.floats(),
    st.text(max_size=5),
)


@given(st.data())
@settings(max_examples=5000 if THOROUGH else 60)
def test_any_change_to_an_index_is_refused_or_none(original, tmp_path_factory, data):
    path = str(tmp_path_factory.mktemp("run") / "a.sharded")
    shutil.copytree(os.path.join(original, "newer.sharded"), path)

    def change(index):
        owner, key = None, None
        value = index
        while isinstance(value, list | dict) and value and (owner is None or data.draw(st.integers(0, 9))):
            keys = list(value) if isinstance(value, dict) else range(len(value))
            owner, key = value, data.draw(st.sampled_from(keys))
            value = owner[key]
        if data.draw(st.booleans()):
            owner[key] = data.draw(NASTY)
        else:
            del owner[key]

    rewrite(path, change)
    try:
        found = pl.load(path, model=network())
    except (pl.CheckpointError, pl.ResumeError):
        return
    finally:
        shutil.rmtree(path)
    wanted = pl.load(os.path.join(original, "newer.sharded"), model=network())
    assert_same(found, wanted, "after a change that was taken")


def test_what_is_no_folder_of_ours(folder, tmp_path):
    newer = os.path.join(folder, "newer.sharded")
    for name in (INDEX, parts(newer)[0]):
        with pytest.raises(pl.CheckpointError, match="give the folder that it lies in"):
            pl.load(os.path.join(newer, name), model=network())
    assert pl.latest(newer) is None
    with pytest.raises(pl.ResumeError, match=r"params\['0.weight'\] is \(5, 3\) float64 in the file and \(4, 3\)"):
        pl.load(newer, model=network(width=4))
    with pytest.raises(pl.ResumeError, match="another optimizer"):
        train(network(), load_path=newer)
    with pytest.raises(pl.CheckpointError, match="is a folder"):
        pl.load(folder, model=network())


def test_nothing_of_a_folder_is_unpickled(folder):
    path = os.path.join(folder, "newer.sharded")
    # What torch's own storage would read.
    with open(os.path.join(path, ".metadata"), "wb") as file:
        file.write(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with (
        patch("pickle.loads", side_effect=AssertionError),
        patch("pickle.load", side_effect=AssertionError),
        patch("torch.load", side_effect=AssertionError),
    ):
        assert pl.load(path, model=network()).timestamp.batch == 2


def test_a_remote_folder():
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    state = small("memory://run/a.sharded", batch=1)
    assert pl.latest("memory://run").endswith("run/a.sharded")
    found = pl.load("memory://run/a.sharded", model=network())
    assert torch.equal(found.params["0.weight"], state.params["0.weight"])
    memory.rm("/run", recursive=True)


# Faults of ranks. What each of them raises, as text.


def outcome(run):
    """What a rank raised, with notes; "" where it came to its end."""
    try:
        run()
    except BaseException as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def fails_on(rank, error, skip):
    """container.write of this rank raises, after so many that go well."""
    real, left = container.write, [skip]

    def failing(file, tensors, metadata):
        left[0] -= 1
        if left[0] < 0:
            file.write(b"half")
            raise error
        return real(file, tensors, metadata)

    return patch.object(container, "write", failing if dist.get_rank() == rank else real)


@pytest.mark.parametrize("background", [True, False])
def test_a_rank_that_cannot_write_ends_the_run_and_the_last_checkpoint_stays(tmp_path, background):
    folder = str(tmp_path)

    def program(rank):
        saver = CheckpointSaver(folder, interval="1ba", background=background)
        with fails_on(1, OSError(28, "No space left on device"), skip=2):
            return outcome(lambda: last(train(network(), parallel="shard", callbacks=saver)))

    first, second = pool().run(program)
    assert "DistributedError" in first
    assert "rank 1 raised CheckpointWriteError" in first
    assert "CheckpointWriteError" in second
    assert "disk is full" in second
    for text in (first, second):
        assert "ep0-ba3.sharded" in text
    assert pl.latest(folder) == os.path.join(folder, "ep0-ba2.sharded")


def test_a_rank_that_cannot_complete_tells_the_others(tmp_path):
    path = str(tmp_path / "a.sharded")

    def program(rank):
        def run():
            for event, state in train(network(), parallel="shard"):
                if event is Event.BATCH_CHECKPOINT:
                    # Rank 0 writes its part, what is in no parts, and then the index.
                    with fails_on(0, OSError(28, "No space left on device"), skip=2):
                        pl.save(state, path)

        return outcome(run)

    first, second = pool().run(program)
    assert "CheckpointWriteError" in first
    assert "raised on rank 0 of 2" in first
    assert "DistributedError" in second
    assert "rank 0 raised CheckpointWriteError" in second
    assert path in second
    assert not os.path.exists(os.path.join(path, INDEX))


def test_what_differs_between_ranks_is_refused(tmp_path):
    def program(rank):
        def one_each(path, remembered=0):
            for event, state in train(network(), parallel="shard"):
                if event is Event.BATCH_CHECKPOINT:
                    pl.save(state.remember("mine", torch.tensor(remembered)), path)

        return [
            outcome(lambda: one_each(str(tmp_path / "a.sharded"), remembered=rank)),
            outcome(lambda: one_each(str(tmp_path / f"{rank}.sharded"))),
        ]

    (different, paths), (different_1, paths_1) = pool().run(program)
    for text in (different, different_1):
        assert "state.algorithm_state.mine is another on rank 1 than on rank 0" in text
    for text in (paths, paths_1):
        assert "the ranks save different ones: rank 0 saves" in text
    assert pl.latest(str(tmp_path)) is None


@pytest.mark.parametrize("who", [(1,), pytest.param((0, 1), marks=pytest.mark.thorough)])
def test_a_signal_stops_all_ranks_at_the_same_boundary(tmp_path, who):
    folder = str(tmp_path)

    def stopped(rank):
        def run():
            saver = CheckpointSaver(folder, interval="10ep")
            for event, state in with_everything(parallel="shard", callbacks=saver):
                if rank in who and event is Event.BATCH_START and state.timestamp.batch == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

        return outcome(run)

    assert pool().run(stopped) == [f"SystemExit: {128 + signal.SIGTERM}"] * 2
    # The boundary after the one at which the others were told.
    assert [name for name in os.listdir(folder) if name.endswith(".sharded")] == ["ep0-ba4.sharded"]

    def both(rank):
        going_on = last(with_everything(parallel="shard", autoresume=folder))
        return going_on, last(with_everything(parallel="shard"))

    for found, wanted in pool().run(both):
        assert_same(found, wanted, "after a signal")


def test_folders_are_kept_and_removed_as_files_are(tmp_path):
    folder = str(tmp_path)
    torn = tmp_path / "ep9-ba99.sharded"
    torn.mkdir()
    (torn / f"{'0' * 16}-0-of-2.safetensors").write_bytes(b"half")
    mine = tmp_path / "mine.sharded"
    mine.mkdir()

    def program(rank):
        saver = CheckpointSaver(folder, interval="1ba", keep_last=2)
        return last(train(network(), parallel="shard", callbacks=saver))

    pool().run(program)
    names = {"ep1-ba8.sharded", "ep2-ba8.sharded", "latest", "mine.sharded"}
    assert set(os.listdir(folder)) == names
    # A run in one process goes on from there, and takes its place.
    last(train(network(), max_duration="3ep", autoresume=folder, callbacks=CheckpointSaver(folder, keep_last=1)))
    assert set(os.listdir(folder)) == {"ep3-ba12.safetensors", "latest", "mine.sharded"}


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

    patches = (container, "_put"), (os, "fsync"), (os, "replace")
    for owner, name in patches:
        setattr(owner, name, counted(getattr(owner, name)))


def kill_and_go_on(folder, rank, moment):
    def killed(here):
        if here == rank:
            dies_at(moment)
        last(with_everything(parallel="shard", autoresume=folder, callbacks=CheckpointSaver(folder, interval="1ba")))

    with pytest.raises(RankError, match="SIGKILL"):
        pool().run(killed)
    return pl.latest(folder)


def goes_on(folder):
    def program(rank):
        found = last(with_everything(parallel="shard", autoresume=folder))
        return found, last(with_everything(parallel="shard"))

    for found, wanted in pool().run(program):
        assert_same(found, wanted, "after a kill")


def test_after_a_kill_in_the_middle_of_a_save_the_last_complete_one_goes_on(tmp_path):
    folder = str(tmp_path)
    # The first save is complete; in the second rank 1 dies between pieces of its part.
    found = kill_and_go_on(folder, 1, 50)
    assert found == os.path.join(folder, "ep0-ba1.sharded")
    assert os.path.exists(os.path.join(folder, "ep0-ba2.sharded"))
    goes_on(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", range(0, 60, 7))
def test_after_a_kill_at_any_moment(tmp_path, rank, moment):
    folder = str(tmp_path)
    kill_and_go_on(folder, rank, moment)
    goes_on(folder)


def test_a_pool_is_left_as_it_was():
    assert pool().run(lambda rank: rank) == [0, 1]
