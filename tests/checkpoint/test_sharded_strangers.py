"""Folders of States in parts that are damaged or a stranger's: they are refused, and passed over."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.checkpoint import container
from pure_loop.checkpoint.document import METADATA_KEY
from pure_loop.checkpoint.index import INDEX, INDEX_KEY
from pure_loop.errors import CheckpointError, ResumeError
from tests.support.checkpoint_runs import messages, place
from tests.support.sharding import network, parts, small, train
from tests.support.streams import assert_same
from tests.support.tiers import examples


def passed_over(folder, says=None):
    """The newer of the two is refused, and ``latest`` gives the older one."""
    newer, older = (os.path.join(folder, f"{each}.sharded") for each in ("newer", "older"))
    with pytest.raises(CheckpointError, match=says) as caught:
        pl.load(newer, model=network())
    assert newer in str(caught.value)
    with messages() as said:
        assert pl.latest_path(folder) == older
    assert any(f"{newer} is passed over" in each for each in said)


def first_part(path):
    return os.path.join(path, parts(path)[0])


def index_of(path):
    return os.path.join(path, INDEX)


def exchange(path, how):
    """The first part is that of another save, a link to outside, or a folder."""
    part = first_part(path)
    shutil.move(part, f"{path}-elsewhere")
    if how == "save":
        small(f"{path}-other", weight=2.0)
        shutil.copy(first_part(f"{path}-other"), part)
    elif how == "link":
        os.symlink(f"{path}-elsewhere", part)
    else:
        os.mkdir(part)


DAMAGES = {
    "without its index": lambda path: os.unlink(index_of(path)),
    "without a part": lambda path: os.unlink(os.path.join(path, parts(path)[1])),
    **{f"with another {how}": lambda path, how=how: exchange(path, how) for how in ("save", "link", "folder")},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_is_not_whole(name, sharded_copy):
    newer, older = (os.path.join(sharded_copy, f"{each}.sharded") for each in ("newer", "older"))
    DAMAGES[name](newer)
    if name != "without its index":
        passed_over(sharded_copy)
        return
    with pytest.raises(CheckpointError, match="is a folder"):
        pl.load(newer, model=network())
    with messages():
        assert pl.latest_path(sharded_copy) == older


@given(which=st.sampled_from([first_part, index_of]), cut=st.booleans(), where=st.integers(1, 1 << 16))
@examples(15, 1000)
def test_no_bit_is_another_one(sharded_saves, tmp_path_factory, which, cut, where):
    folder = str(tmp_path_factory.mktemp("run") / "run")
    shutil.copytree(sharded_saves, folder)
    path = Path(which(os.path.join(folder, "newer.sharded")))
    content = bytearray(path.read_bytes())
    content[-(where % len(content))] ^= 1 << where % 8
    path.write_bytes(content[: where % len(content)] if cut else content)
    passed_over(folder)


def rewrite(path, change, document=lambda text: None):
    """Write the index anew, with a digest that is right, as a stranger would."""
    with open(index_of(path), "rb") as opened:
        header, _ = container.read(opened, path)
    metadata = dict(header.metadata)
    for key, of in ((INDEX_KEY, change), (METADATA_KEY, document)):
        value = json.loads(metadata[key])
        of(value)
        metadata[key] = json.dumps(value)
    with open(index_of(path), "wb") as opened:
        container.write(opened, {}, metadata)


def first(index):
    return next(each for each in index["tensors"].values() if each[3] and len(each[3]) > 1)


def put(*path):
    """A change: the last of these in the place that the others lead to; the first tensor in parts is ``"first"``."""

    def change(index):
        *way, key, value = path
        tree = index
        for each in way:
            tree = first(index) if each == "first" else tree[each]
        tree[key] = value(tree[key]) if callable(value) else value

    return change


def bigger(index):
    tensor = first(index)
    tensor[1] = [1 << 40, *tensor[1][1:]]
    tensor[3] = [[0, [0] * len(tensor[1]), tensor[1]]]


NAMES = "../older.sharded/x.safetensors", "/etc/passwd", "", "x\0y", 7, "0123456789abcdef-0-of-2.safetensors/../../x"
NONE = float("inf"), float("nan"), True, 10**400, -1, 1.5, None
MEMORY = ("tensors", "opt_state.memory.0.weight")
STRANGE = [
    *[(put("files", 0, 0, name), "names the file") for name in NAMES],
    *[(put("files", 0, 1, size), "") for size in NONE],
    (put("files", 0, 2, 7), "in another way than pl.save"),
    *[(put("first", place, 0, count), "") for place in (1, 3) for count in NONE],
    *[(put("first", 3, 0, place, value), "") for place in (1, 2) for value in (7, [-1, 0], [0.0, 0], [0])],
    *[(put("first", 3, 0, 0, number), "") for number in NONE],
    (put("first", 2, 1), "it has dtype"),
    (lambda index: index["files"].append(index["files"][0]), "twice"),
    (bigger, "bytes of tensors in"),
    (lambda index: first(index)[3].pop(), "not all of it, once"),
    (lambda index: first(index)[3][1].__setitem__(slice(1, 3), first(index)[3][0][1:]), "not all of it, once"),
    (put("first", 3, 0, 1, 0, 1 << 20), "outside of its shape"),
    (put("first", 3, 0, 0, 7), "in file 7"),
    (put("files", [[[[]]]]), "can't be read"),
    (lambda index: index.pop("tensors"), "its index is none"),
    (lambda index: index["tensors"].pop(MEMORY[1]), "opt_state.memory"),
    (lambda index: index["tensors"].update(nobody=["F32", [0], False, []]), "no field refers to its tensors ['nobody'"),
    (put(*MEMORY, 0, "I64"), "lacks 'opt"),
    (put("first", 0, "F1"), "dtype 'F1'"),
]  # fmt: skip


def test_an_index_of_a_stranger(sharded_copy):
    path = os.path.join(sharded_copy, "newer.sharded")
    content = Path(index_of(path)).read_bytes()
    for change, says in STRANGE:
        Path(index_of(path)).write_bytes(content)
        rewrite(path, change)
        with pytest.raises(CheckpointError) as caught:
            pl.load(path, model=network())
        assert says in str(caught.value)
    Path(index_of(path)).write_bytes(content)
    rewrite(path, lambda index: None)
    assert pl.latest_path(sharded_copy) == path


@pytest.mark.parametrize(
    ("path", "number"), [(("fields", "timestamp", "fields", "batch"), -1), (("saved_at",), 10**400)]
)
def test_numbers_that_no_state_has(path, number, sharded_copy):
    """In the description that an index has, as in that of a file."""
    rewrite(os.path.join(sharded_copy, "newer.sharded"), lambda index: None, put(*path, number))
    passed_over(sharded_copy)
    with pytest.raises(ResumeError, match=r"older\.sharded"):  # it has another optimizer's memory
        train(network(), autoresume=sharded_copy, max_duration="3ba")


def test_an_index_with_tensors_is_none(sharded_copy):
    """It would be read whole when the folder is listed."""
    path = index_of(os.path.join(sharded_copy, "newer.sharded"))
    with open(path, "rb") as file:
        header, _ = container.read(file, path)
    with open(path, "wb") as file:
        container.write(file, {"params.x": torch.zeros(3)}, header.metadata)
    passed_over(sharded_copy, "it is no index of a sharded checkpoint")


SAMPLES = [None, True, "", "F64", "I64", "BOOL", [], {}, [[]], -1, 0, 1, 7, 1 << 31, (1 << 63) - 1, 1 << 70]
NASTY = st.sampled_from(SAMPLES) | st.floats() | st.text(max_size=5)


@given(st.data())
@examples(40, 5000)
def test_any_change_to_an_index_is_refused_or_none(sharded_saves, tmp_path_factory, data):
    path = str(tmp_path_factory.mktemp("run") / "a.sharded")
    shutil.copytree(os.path.join(sharded_saves, "newer.sharded"), path)

    def change(index):
        owner, key, value = None, None, index
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
    except (CheckpointError, ResumeError):
        return
    wanted = pl.load(os.path.join(sharded_saves, "newer.sharded"), model=network())
    assert_same(found, wanted, "after a change that was taken")


def test_what_is_no_folder_of_ours(sharded_copy):
    newer = os.path.join(sharded_copy, "newer.sharded")
    for name in (INDEX, parts(newer)[0]):
        with pytest.raises(CheckpointError, match="pass the folder that it is in"):
            pl.load(os.path.join(newer, name), model=network())
    assert pl.latest_path(newer) is None
    with pytest.raises(ResumeError, match=r"params\['0.weight'\] is \(5, 3\) float64 in the file and \(4, 3\)"):
        pl.load(newer, model=network(width=4))
    with pytest.raises(ResumeError, match="another optimizer"):
        train(network(), load_path=newer)


def test_a_folder_elsewhere_and_an_order_with_files(sharded_copy):
    with place("memory") as run:
        state = small(f"{run}/a.sharded", batch=1)
        assert pl.latest_path(run) == f"{run}/a.sharded"
        assert torch.equal(pl.load(f"{run}/a.sharded", model=network()).params["0.weight"], state.params["0.weight"])
    # Folders of batches 1 and 2, and files of 1 and 3.
    pl.save(state, Path(sharded_copy) / "z.safetensors")
    assert str(pl.latest_path(sharded_copy)).endswith("newer.sharded")
    pl.save(state.count_batch(samples=4).count_batch(samples=4), Path(sharded_copy) / "a.safetensors")
    assert str(pl.latest_path(sharded_copy)).endswith("a.safetensors")
