"""Folders of strangers: what an index may say, and what is no folder of ours."""

from __future__ import annotations

import json
import os
import shutil
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.checkpoint import container
from pure_loop.checkpoint.document import METADATA_KEY
from pure_loop.checkpoint.index import INDEX, INDEX_KEY
from tests.support.sharding import network, parts, small, train
from tests.support.streams import assert_same
from tests.support.tiers import examples


def rewrite(path, change, document=None):
    """Write the index anew, with a digest that is right, as a stranger would."""
    file = os.path.join(path, INDEX)
    with open(file, "rb") as opened:
        header, _ = container.read(opened, file)
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


def _nested(index):
    index["files"] = [[[[]]]]


STRANGE = {
    **{
        f"a file named {name}": (_of(_name(name)), "names the file")
        for name in (
            *("../older.sharded/x.safetensors", "/etc/passwd", "", "x\0y"),
            *(7, "0123456789abcdef-0-of-2.safetensors/../../x"),
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
    "a tensor of no field": (
        _of(lambda index: index["tensors"].update(nobody=["F32", [0], False, []])),
        "no field refers to its tensors .'nobody'",
    ),
    "another dtype": (
        _of(lambda index: index["tensors"]["opt_state.memory.0.bias"].__setitem__(0, "I64")),
        "lacks 'opt",
    ),
    "an unknown dtype": (_of(lambda index: _first(index).__setitem__(0, "F1")), "dtype 'F1'"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_index_of_a_stranger_is_refused(name, sharded_copy):
    path = os.path.join(sharded_copy, "newer.sharded")
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
@examples(60, 5000)
def test_any_change_to_an_index_is_refused_or_none(sharded_saves, tmp_path_factory, data):
    path = str(tmp_path_factory.mktemp("run") / "a.sharded")
    shutil.copytree(os.path.join(sharded_saves, "newer.sharded"), path)

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
    wanted = pl.load(os.path.join(sharded_saves, "newer.sharded"), model=network())
    assert_same(found, wanted, "after a change that was taken")


IMPOSSIBLE = {
    **{
        f"{name} {number}": (path, number)
        for name, path in (("batch", ("fields", "timestamp", "fields", "batch")), ("seed", ("fields", "seed")))
        for number in (float("nan"), True)
    },
    "batch below zero": (("fields", "timestamp", "fields", "batch"), -1),
    "batch beyond all": (("fields", "timestamp", "fields", "batch"), 10**400),
    "a time beyond all": (("saved_at",), 10**400),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_numbers_that_no_state_has(name, sharded_copy):
    """In the description that an index has, as in that of a file: refused, and the folder before it is the newest."""
    path, number = IMPOSSIBLE[name]

    def document(text):
        for key in path[:-1]:
            text = text[key]
        text[path[-1]] = number

    rewrite(os.path.join(sharded_copy, "newer.sharded"), lambda index: None, document)
    with pytest.raises(pl.CheckpointError):
        pl.load(os.path.join(sharded_copy, "newer.sharded"), model=network())
    assert pl.latest(sharded_copy) == os.path.join(sharded_copy, "older.sharded")
    generous = {"max_duration": "3ba", "optimizer": pl.optim.sgd(lr=0.1)}
    with pytest.raises(pl.ResumeError, match=r"older\.sharded"):  # it has another optimizer's memory
        train(network(), autoresume=sharded_copy, **generous)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), True, 10**400, -1, 1.5, None])
def test_numbers_that_no_index_has(number, sharded_copy):
    path = os.path.join(sharded_copy, "newer.sharded")

    def change(index):
        tensor = next(tensor for tensor in index["tensors"].values() if tensor[1])
        draw = [index["files"][0], tensor[1], tensor[3][0], tensor[3][0][1], tensor[3][0][2]]
        draw[where].__setitem__({0: 1, 2: 0}.get(where, 0), number)

    for where in range(5):
        shutil.copytree(path, f"{path}.{where}")
        rewrite(f"{path}.{where}", change)
        with pytest.raises(pl.CheckpointError):
            pl.load(f"{path}.{where}", model=network())
    assert pl.latest(sharded_copy) == path


def test_what_is_no_folder_of_ours(sharded_copy, tmp_path):
    newer = os.path.join(sharded_copy, "newer.sharded")
    for name in (INDEX, parts(newer)[0]):
        with pytest.raises(pl.CheckpointError, match="pass the folder that it is in"):
            pl.load(os.path.join(newer, name), model=network())
    assert pl.latest(newer) is None
    with pytest.raises(pl.ResumeError, match=r"params\['0.weight'\] is \(5, 3\) float64 in the file and \(4, 3\)"):
        pl.load(newer, model=network(width=4))
    with pytest.raises(pl.ResumeError, match="another optimizer"):
        train(network(), load_path=newer)
    with pytest.raises(pl.CheckpointError, match="is a folder"):
        pl.load(sharded_copy, model=network())


def test_nothing_of_a_folder_is_unpickled(sharded_copy):
    path = os.path.join(sharded_copy, "newer.sharded")
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
