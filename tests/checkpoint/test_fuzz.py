"""Files whose bytes, headers or descriptions are changed at random: what is read fits, or is refused, and soon."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.checkpoint import container
from pure_loop.checkpoint.tree import _READERS
from pure_loop.errors import ResumeError
from tests.conftest import THOROUGH
from tests.support import problem
from tests.support.checkpoint_runs import small
from tests.support.hostile import Folder, at, checkpoint, described, document_of, header_of, places, sealed
from tests.support.tiers import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("run"))


def test_what_is_changed_is_right_to_begin_with(folder: Folder) -> None:
    header, data = header_of(checkpoint())
    text = json.dumps(document_of(checkpoint()))
    for content in (checkpoint(), sealed(json.dumps(header), data), described(checkpoint(), text)):
        assert not folder.check(content)
        assert pl.latest_path(folder.folder) == str(folder.path)
        assert pl.load(folder.path, model=small()).algorithm_state["x"]["keys"][2, "b"]["inner"] is pl.Event.BATCH_END


@st.composite
def mutilated(draw: st.DrawFn) -> bytes:
    """Some bytes are changed, taken, doubled, moved or added, or become zeros as after a loss of power."""
    content = bytearray(checkpoint())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.integers(0, header) | st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 1, 1, 2, 7, 32, 500, len(content)]))
        other = draw(st.integers(0, len(content)))
        drawn = draw(st.binary(max_size=40) | st.sampled_from([bytes(length), content[other : other + length]]))
        if draw(st.booleans()) and where < len(content):
            content[where] ^= 1 << draw(st.integers(0, 7))
        else:
            content[where : where + length] = drawn
    return bytes(content)


@examples(80, 1500)
@given(content=mutilated())
def test_no_byte_is_another_one(folder: Folder, content: bytes) -> None:
    assume(content != checkpoint())
    assert folder.check(content, reads=False)


# As text, because most of them are nothing that json.dumps writes.
NUMBERS = (
    *("1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "9" * 5000, "-1", "-0.0", "0", "1", "2", "7", "1.5"),
    *("true", "false", "null", str(1 << 31), str((1 << 63) - 1), str(1 << 63), "1e308", '{"float": "inf"}', '"1"'),
)
OTHERS = (
    *('""', '"x"', "[]", "[[]]", "{}", "[" * 99 + "]" * 99, '{"tuple": [' * 150 + "]}" * 150, '{"a": 1, "a": 2}'),
    *(f'{{"{kind}": []}}' for kind in ("dict", "frozen", "tuple", "set")),
    *('{"tensor": "params.0.weight"}', '{"tensor": "nothing"}', '{"bytes": "00"}', '{"set": [[]]}', '{"size": [-1]}'),
    *('{"record": "pure_loop.State", "fields": {}}', '{"record": "os:system", "fields": {}}', '{"device": "meta"}'),
    *(f'{{"enum": ["pure_loop.Event", "{name}"]}}' for name in ("BEFORE_FORWARD", "FIT_END")),
)
TENSORS = (
    *(f'"shape": {shape}' for shape in ('[5, 4], "stride": [1, 1]', '[4, 5], "stride": [1, 4]', "[-5, -4]", "[1e999]")),
    *(f'"dtype": "{dtype}", "shape": [5, 4]' for dtype in ("int32", "float64", "bool", "quint8", "float4_e2m1fn_x2")),
    *('"dtype": "float64", "shape": [10]', '"device": "cuda"', '"device": "meta"', '"device": 7', '"more": 1'),
)


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "tensor" in value


@st.composite
def changes(draw: st.DrawFn, tree: Any) -> str:
    """JSON in the place of which something else stands here and there, as text."""
    tree, texts = copy.deepcopy(tree), []
    for _ in range(draw(st.integers(1, 2))):
        everywhere = list(places(tree))
        kind = draw(st.sampled_from([lambda _: True, lambda value: isinstance(value, int | float), is_tensor]))
        where = [path for path, value in everywhere if kind(value)] or [path for path, _ in everywhere]
        *path, key = draw(st.sampled_from(where))
        parent = at(tree, path)
        how = draw(st.sampled_from(["text", "text", "text", "remove", "rename", "twice", "move", "wrap"]))
        if how == "text":
            text = draw(st.sampled_from(NUMBERS + OTHERS))
            if is_tensor(parent[key]):
                text = f'{{"tensor": {json.dumps(parent[key]["tensor"])}, {draw(st.sampled_from(TENSORS))}}}'
            texts.append(text)
            parent[key] = f"TEXT{len(texts) - 1}."
        elif how == "remove":
            del parent[key]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["x", "", "0.weight", "batch", "__class__", *_READERS]))] = parent.pop(key)
        elif how == "twice" and isinstance(parent, list):
            parent.append(parent[key])
        elif how == "move":
            parent[key] = copy.deepcopy(draw(st.sampled_from([value for _, value in everywhere])))
        elif how == "wrap":
            kind = draw(st.sampled_from(["list", *_READERS]))
            parent[key] = [parent[key]] if kind == "list" else {kind: parent[key]}
        if not tree:
            break
    text = json.dumps(tree)
    for number, replacement in enumerate(texts):
        text = text.replace(f'"TEXT{number}."', replacement)
    return text


@examples(40, 1500)
@given(data=st.data(), of_header=st.booleans())
def test_whatever_a_header_or_a_description_says(folder: Folder, data: st.DataObject, of_header: bool) -> None:
    if not of_header:
        folder.check(described(checkpoint(), data.draw(changes(document_of(checkpoint())))))
        return
    header, numbers = header_of(checkpoint())
    metadata = header.pop("__metadata__")
    folder.check(sealed(f'{{"__metadata__": {json.dumps(metadata)}, {data.draw(changes(header))[1:]}', numbers))


NASTY = "a\nWARNING all is well\r\x1b[2J\u2028" + "x" * 3000


def test_no_text_of_a_file_is_said_as_it_is(folder: Folder) -> None:
    """Texts and keys of a description become, one by one, what would be seen in a terminal; in the fast tier some."""
    document, refused = document_of(checkpoint()), 0
    found = [
        (path, is_key) for path, value in places(document) for is_key in (True, False)[: 1 + isinstance(value, str)]
    ]
    for (*path, last), is_key in found[:: 1 if THOROUGH else 3]:
        changed = copy.deepcopy(document)
        place = at(changed, path)
        if is_key and not isinstance(place, dict):
            continue
        place[NASTY if is_key else last] = place.pop(last) if is_key else NASTY
        refused += bool(folder.check(described(checkpoint(), json.dumps(changed)), reads=False))
    assert refused > 20


@examples(25, 1000)
@given(data=st.data(), tie=st.booleans(), strict=st.booleans())
def test_plain_weights(folder: Folder, data: st.DataObject, tie: bool, strict: bool) -> None:
    """Of a model with and without a tie: what the file has is taken bit for bit, or refused."""

    def build() -> torch.nn.Module:
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
        dtype = torch.int32 if kind == "dtype" else data.draw(st.sampled_from([torch.float32, torch.float16]))
        fill = 1.0 if kind in ("same", "dtype") else data.draw(numbers)
        tensors[name] = torch.full((4,) if kind == "shape" else shapes.get(name, (1,)), fill).to(dtype)
    with open(folder.path, "wb") as file:
        container.write(file, tensors, {})
    model = build()
    try:
        state = pl.load(folder.path, model=model, weights_only=True, strict=strict)
    except ResumeError:
        return
    for name, tensor in state.params.items():
        given_here = [
            tensors[each] for each in [name, "1.weight"][: 1 + (tie and name == "0.weight")] if each in tensors
        ]
        if not given_here:
            assert not strict
            problem.close({name: tensor}, {name: model.get_parameter(name)}, 0.0)
        for given_tensor in given_here:
            assert torch.equal(tensor.view(torch.int32), given_tensor.float().view(torch.int32))
