"""Checkpoints that were changed with knowledge of the format, and have a digest that is right.

Whatever a description or a header says: ``load`` gives a State that training and saving take, or an error of ours that
names the file; ``latest`` and ``autoresume`` never fail because of it, and take the good file beside it where it can't
be read; and it takes little time and memory.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.checkpoint import container
from pure_loop.checkpoint.document import write_document
from pure_loop.checkpoint.tree import _READERS, UnknownClassError
from pure_loop.errors import CheckpointError, ResumeError
from tests.support.checkpoint_runs import fit, little_memory, messages, small
from tests.support.cpu_time import within
from tests.support.hostile import MODULUS, MOST_SECONDS, document_of, sealed
from tests.support.streams import assert_same
from tests.support.tiers import examples

# As text, because most of them are nothing that json.dumps writes.
NUMBERS = (
    *("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "-1", "-0.0"),
    *("0", "1", "2", "7", "1.5", "true", "false", "null", str(1 << 31), str((1 << 63) - 1), str(1 << 63), "1e308"),
    *('{"float": "inf"}', '{"float": "0x1p99999"}', '{"complex": ["0x0p0", "inf"]}', '"1"', "[]"),
)
OTHERS = (
    *(
        '""',
        '"x"',
        "[]",
        "[[]]",
        "{}",
        '{"dict": {}}',
        '{"frozen": {}}',
        '{"tuple": []}',
        '{"set": []}',
        "[" * 99 + "]" * 99,
    ),
    *("[" * 400 + "]" * 400, '{"tuple": [' * 150 + "]}" * 150, '{"dict": [[1, 2], [1, 3]]}', '{"set": [1, 1]}'),
    *('{"set": [[]]}', '{"a": 1, "a": 2}', '{"tensor": "params.0.weight"}', '{"tensor": "nothing"}', '{"bytes": "00"}'),
    *('{"record": "pure_loop.State", "fields": {}}', '{"record": "os:system", "fields": {}}', '{"device": "meta"}'),
    *('{"enum": ["pure_loop.Event", "BEFORE_FORWARD"]}', '{"enum": ["pure_loop.Event", "FIT_END"]}', '{"size": [-1]}'),
    json.dumps({"set": [1 + number * MODULUS for number in range(5000)]}),
    json.dumps({"dict": [[1 + number * MODULUS, 0] for number in range(5000)]}),
    json.dumps([0] * 50_000),
)
TENSORS = (
    *('"shape": [3, 2], "stride": [1, 1]', '"shape": [3, 2], "stride": [0, 0]', '"shape": [2, 3], "stride": [3, 1]'),
    *('"shape": [3, 2], "stride": [1, 3]', '"shape": [-3, -2], "stride": [1, 1]', '"dtype": "float64", "shape": [3]'),
    *('"dtype": "int32", "shape": [3, 2]', '"dtype": "complex64", "shape": [3]', '"dtype": "bool", "shape": [24]'),
    *('"device": "cuda"', '"device": "meta"', '"device": 7', '"shape": [1e999], "stride": [1]', '"more": 1'),
    *(
        '"dtype": "quint8", "shape": [24]',
        '"dtype": "float4_e2m1fn_x2", "shape": [24]',
        '"dtype": "uint8", "shape": [24]',
    ),
)


def trained() -> pl.State:
    memory = {
        "list": [1, 2.5, None],
        "set": {1, 2},
        "keys": {1: torch.arange(3), (2, "b"): True},
        "time": pl.Time("3ep"),
    }
    stream = fit(
        small(), algorithms=[pl.algorithms.ema(half_life="3ba"), pl.Algorithm("mine", {Event.INIT: lambda s: s})]
    )
    for event, state in stream:
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 5:
            return state.remember("mine", memory)
    raise AssertionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of batch 5 of a run, to be changed, and one of batch 3, which is good."""
    folder = tmp_path_factory.mktemp("run")
    for event, state in fit(small()):
        if event is Event.BATCH_END and state.timestamp.batch == 3:
            pl.save(state, folder / "good.safetensors")
            break
    pl.save(trained(), folder / "x.safetensors")
    (folder / "x.safetensors").rename(folder / "original")
    return folder


@pytest.fixture(scope="module")
def original(folder: Path) -> bytes:
    return (folder / "original").read_bytes()


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in ((*path, key), *places(value, (*path, key)))]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


@st.composite
def changes(draw: st.DrawFn, tree: Any) -> str:
    """JSON in the place of which something else stands here and there, as text."""
    tree, texts = copy.deepcopy(tree), []

    def put(text: str) -> str:
        texts.append(text)
        return f"TEXT{len(texts) - 1}."

    for _ in range(draw(st.integers(1, 2))):
        where = places(tree)
        how = draw(
            st.sampled_from(
                ["number", "number", "other", "tensor", "remove", "rename", "twice", "move", "wrap", "kind"]
            )
        )
        if how == "number":
            where = [path for path in where if is_number(at(tree, path))] or where
        if how == "tensor":
            where = [path for path in where if isinstance(at(tree, path), dict) and "tensor" in at(tree, path)] or where
        path = draw(st.sampled_from(where))
        parent, key = at(tree, path[:-1]), path[-1]
        if how == "number":
            parent[key] = put(draw(st.sampled_from(NUMBERS)))
        elif how == "other":
            parent[key] = put(draw(st.sampled_from(OTHERS)))
        elif how == "tensor" and isinstance(parent[key], dict) and "tensor" in parent[key]:
            name = draw(st.sampled_from([json.dumps(parent[key]["tensor"]), '"params.0.weight"', '"skipped"', "0"]))
            parent[key] = put(f'{{"tensor": {name}, {draw(st.sampled_from(TENSORS))}}}')
        elif how == "remove":
            del parent[key]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["x", "", "0.weight", "batch", "__class__", *_READERS]))] = parent.pop(key)
        elif how == "twice":
            if isinstance(parent, dict):
                parent[put(f"{json.dumps(key)}: {json.dumps(parent[key])}, {json.dumps(key)}")] = parent[key]
            else:
                parent.append(parent[key])
        elif how == "move":
            parent[key] = copy.deepcopy(at(tree, draw(st.sampled_from(where))))
        elif how == "wrap":
            kind = draw(st.sampled_from(["list", *_READERS]))
            parent[key] = [parent[key]] if kind == "list" else {kind: parent[key]}
        elif how == "kind" and isinstance(parent[key], dict) and parent[key]:
            first = next(iter(parent[key]))
            parent[key] = {draw(st.sampled_from(sorted(_READERS))): parent[key][first]}
        if not places(tree):
            break
    text = json.dumps(tree)
    for number, replacement in reversed(list(enumerate(texts))):
        text = text.replace(f'"TEXT{number}."', replacement)
    return text


def loaded(path: Path, **options: Any) -> tuple[pl.State | None, Exception | None]:
    """What the file gives: a State, or an error that names it."""
    refused: Exception | None = None
    try:
        return pl.load(path, model=small(), **options), None
    except (CheckpointError, ResumeError) as error:
        refused = error
    assert str(path) in str(refused)
    assert len(str(refused)) < 2000
    return None, refused


def check(content: bytes, folder: Path) -> None:
    path, good = folder / "x.safetensors", folder / "good.safetensors"
    path.write_bytes(content)
    with messages(), little_memory():
        (state, refused), _, latest = within(
            MOST_SECONDS, lambda: (loaded(path), loaded(path, weights_only=True), pl.latest(folder))
        )
    unreadable = isinstance(refused, CheckpointError) and not isinstance(refused, UnknownClassError)
    assert latest in ([str(good)] if unreadable else [str(good), str(path)])
    with messages():
        resumed = start_of(folder, autoresume=folder)
        if isinstance(refused, CheckpointError):
            assert resumed == 3
        if state is not None:
            start_of(folder, load_path=path)
            again = folder / "again"
            pl.save(state, again)
            assert written(pl.load(again, model=small())) == written(state)


def written(state: pl.State) -> tuple[Any, dict[str, bytes]]:
    """All that a file has of a State."""
    text, tensors = write_document(state)
    return json.loads(text)["fields"], {
        name: b"".join(map(bytes, container.pieces_of([tensor]))) for name, tensor in tensors.items()
    }


def start_of(folder: Path, **where: Any) -> int | None:
    """The batch at which training is resumed; None where the file is refused as another model's."""
    at, said = None, ""
    try:
        stream = fit(small(), **where)
        for event, state in stream:
            at = state.timestamp.batch if event is Event.AFTER_LOAD else at
            if event is Event.FIT_START:  # what numbers an algorithm remembers is between it and its memory
                break
        stream.close()
        return at
    except ResumeError as error:
        said = str(error)
    assert str(folder / "x.safetensors") in said
    return None


def test_what_is_changed_is_right_to_begin_with(folder: Path, original: bytes) -> None:
    check(original, folder)
    path = folder / "x.safetensors"
    assert pl.latest(folder) == str(path)
    assert_same(pl.load(path, model=small()), trained(), "the original")
    assert start_of(folder, autoresume=folder) == 5


@examples(25, 800)
@given(data=st.data())
def test_descriptions(folder: Path, original: bytes, data: st.DataObject) -> None:
    text = data.draw(changes(document_of(original)))
    header = json.loads(original[8 : 8 + int.from_bytes(original[:8], "little")])
    header["__metadata__"]["pure_loop"] = text
    check(sealed(json.dumps(header), numbers_of(original)), folder)


@examples(25, 800)
@given(data=st.data())
def test_headers(folder: Path, original: bytes, data: st.DataObject) -> None:
    header = json.loads(original[8 : 8 + int.from_bytes(original[:8], "little")])
    metadata = header.pop("__metadata__")
    text = data.draw(changes(header))
    text = f'{{"__metadata__": {json.dumps(metadata)}, {text[1:]}'
    check(sealed(text, numbers_of(original)), folder)


def numbers_of(content: bytes) -> bytes:
    return content[8 + int.from_bytes(content[:8], "little") : -32]


@examples(30, 1000)
@given(data=st.data(), tie=st.booleans())
def test_weights(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, tie: bool) -> None:
    """Plain files of weights, of a model with and without a tie: what the file has is taken bit for bit, or refused."""

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        if tie:
            model[1].weight = model[0].weight
        return model

    numbers = st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")])
    shapes = {"0.weight": (2, 2), "0.bias": (2,), "1.weight": (2, 2), "1.bias": (2,)}
    tensors = {}
    for name in data.draw(st.permutations([*shapes, "unknown"])):
        kind = data.draw(st.sampled_from(["right", "right", "right", "same", "missing", "shape", "dtype"]))
        if kind == "missing" or (name == "unknown" and kind != "shape"):
            continue
        shape = (4,) if kind == "shape" else shapes.get(name, (1,))
        fill = 1.0 if kind == "same" else data.draw(numbers)
        dtype = torch.int32 if kind == "dtype" else data.draw(st.sampled_from([torch.float32, torch.float16]))
        tensors[name] = torch.full(shape, fill if dtype.is_floating_point else 1, dtype=dtype)
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    with open(path, "wb") as file:
        container.write(file, tensors, {})
    strict = data.draw(st.booleans())
    try:
        state = pl.load(path, model=build(), weights_only=True, strict=strict)
    except ResumeError:
        return
    for name, tensor in state.params.items():
        names = [name, "1.weight"] if tie and name == "0.weight" else [name]
        given_here = [tensors[each] for each in names if each in tensors]
        if not given_here:
            assert not strict
            assert torch.equal(tensor, build().get_parameter(name))
        for given_tensor in given_here:
            assert torch.equal(tensor.view(torch.int32), given_tensor.float().view(torch.int32))
