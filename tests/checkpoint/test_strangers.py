"""Files of another origin, of another kind, model or program: at worst each is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.checkpoint import container
from pure_loop.errors import CheckpointError, CheckpointNotFoundError, ResumeError
from tests.support.checkpoint_runs import fit, little_memory, messages, refused, small


@pytest.fixture(scope="module")
def trained() -> pl.State:
    return pl.run(fit(small()))


@pytest.fixture(scope="module")
def good(trained: pl.State, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a checkpoint."""
    path = tmp_path_factory.mktemp("good") / "good.safetensors"
    pl.save(trained, path)
    return path.read_bytes()


class Bomb:
    """What a pickle that is opened would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class TestStrangersFiles:
    """At worst a file is refused: nothing in it runs, and nothing is allocated that its size doesn't pay for."""

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_a_pickle(self, tmp_path: Path, protocol: int) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol=protocol))
        text = refused(path)
        assert protocol < 2 or "pickle" in text
        assert pl.latest(tmp_path) is None
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("zipped", [True, False])
    def test_of_torch_save(self, tmp_path: Path, zipped: bool) -> None:
        path = tmp_path / "x.safetensors"
        content = {"weights": small().state_dict(), "x": Bomb(tmp_path / "ran")}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        assert "pickle" in refused(path)
        assert "weights_only=True" in refused(path, weights_only=True)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"\0" * 8, b"\xff" * 64, b"\x89PNG\r\n\x1a\n" + b"\0" * 99, b"a" * 9]
    )
    def test_of_another_kind(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(content)
        refused(path)
        refused(path, weights_only=True)

    def test_a_header_of_a_claimed_gigabyte(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        for claimed in (1 << 30, 1 << 62, (1 << 64) - 1):
            path.write_bytes(claimed.to_bytes(8, "little") + b'{"a":' + b" " * 100)
            with little_memory():
                refused(path)
        # A hole pays for its size in no memory and on no disk.
        with open(path, "r+b") as file:
            file.write((1 << 30).to_bytes(8, "little"))
            file.truncate(2 << 30)
        with little_memory():
            refused(path)

    def test_a_tensor_larger_than_memory_in_a_file_with_holes(self, tmp_path: Path) -> None:
        path, size = tmp_path / "x.safetensors", 1 << 42
        header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with open(path, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            try:
                file.truncate(8 + len(header) + size)
            except OSError:
                pytest.skip("this file system has no files of so many bytes")
        with little_memory():
            assert "it is sparse" in refused(path, weights_only=True)
        assert pl.latest(tmp_path) is None

    @pytest.mark.parametrize(
        "shape",
        [
            [1 << 40],
            [1 << 62, 1 << 62],
            [1 << 40, 0],
            [0, 1 << 62, 1 << 62],
            [1] * 100,
            [1 << 64, 0],
            [-1],
            [True],
            [1.0],
            "1",
            None,
            [[1]],
        ],
    )
    def test_shapes_that_few_bytes_cannot_have(self, tmp_path: Path, shape: Any) -> None:
        path = tmp_path / "x.safetensors"
        for size in (0, 4):
            header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
            if size == 0 and shape == [1 << 40, 0]:
                continue  # it has no numbers, and no bytes
            with little_memory():
                assert "memory" not in refused(path, weights_only=True)

    @pytest.mark.parametrize(
        "header",
        [
            "[]",
            "5",
            '"pure_loop"',
            "{",
            '{"a": NaN}',
            '{"a": 1e999}',
            '{"a": ' + "9" * 5000 + "}",
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
            '"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            '{"__metadata__": {"a": "1", "a": "2"}}',
            '{"__metadata__": {"a": 1}}',
            '{"__metadata__": []}',
            '{"w": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}',
            '{"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": 4}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "more": 1}}',
            '{"w": {"dtype": "F32", "shape": [1]}}',
            '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
            '"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            '{"w": {"dtype": "BOOL", "shape": [4], "data_offsets": [0, 4]}}',
            '{"w": ' + "[" * 10_000 + "]" * 10_000 + "}",
            '{"w": ' * 10_000 + "1" + "}" * 10_000,
            '{"' + "w" * 100_000 + '": 5}',
            '{"\ud800": 5}',
        ],
        ids=lambda header: header[:60],
    )
    def test_headers_that_are_none(self, tmp_path: Path, header: str) -> None:
        path = tmp_path / "x.safetensors"
        text = header.encode("utf-8", "surrogatepass")
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"\2\0\0\0")
        assert len(refused(path, weights_only=True)) < 1000
        with messages():
            assert pl.latest(tmp_path) is None

    def test_a_folder_or_nothing_in_the_place_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "folder.safetensors").mkdir()
        refused(tmp_path / "folder.safetensors")
        with pytest.raises(CheckpointNotFoundError, match=r"nothing\.safetensors"):
            pl.load(tmp_path / "nothing.safetensors", model=small())
        os.mkfifo(tmp_path / "pipe.safetensors")  # which would be waited for
        assert "pipe" in refused(tmp_path / "pipe.safetensors")
        with messages() as said:
            assert pl.latest(tmp_path) is None
        assert len(said) == 2
        (tmp_path / "file").write_text("")
        refused(tmp_path / "file" / "x.safetensors")
        with pytest.raises(pl.ArgumentError, match="file is a file: pass the folder"):
            pl.latest(tmp_path / "file")
        with pytest.raises(pl.ArgumentError, match="file is a file: pass the folder"):
            fit(small(), autoresume=tmp_path / "file")


class Document:
    """The description in a checkpoint, to be changed: the digest is made anew, so that it doesn't save the reader."""

    def __init__(self, content: bytes) -> None:
        self.header, self.tensors = container.read(io.BytesIO(content), "x")
        self.json = json.loads(self.header.metadata["pure_loop"])

    def bytes(self, text: str | None = None) -> bytes:
        file = io.BytesIO()
        self.tensors["x"] = torch.arange(6.0).view(3, 2)
        text = json.dumps(self.json) if text is None else text
        container.write(file, self.tensors, {**self.header.metadata, "pure_loop": text})
        return file.getvalue()


def memory(value: Any) -> Callable[[Any], Any]:
    """A change: that value as an algorithm's memory."""

    def change(document: Any) -> None:
        document["fields"]["algorithm_state"]["frozen"]["x"] = value

    return change


def at(*path: str, value: Any) -> Callable[[Any], Any]:
    def change(document: Any) -> None:
        for each in path[:-1]:
            document = document[each]
        document[path[-1]] = value

    return change


NAME = "x"
SECOND = {"enum": ["pure_loop.TimeUnit", "SECOND"]}
NOT_TRUE = {
    **{
        f"a {name}": memory({"record": name, "fields": {"args": "touch x"}})
        for name in (
            "os:system",
            "subprocess:Popen",
            "builtins:eval",
            "torch.nn.modules.linear:Linear",
            "antigravity:x",
        )
    },
    "a class that is a list": memory({"record": ["os:system"], "fields": {}}),
    "an enum unknown": memory({"enum": ["os:system", "x"]}),
    "a record as an enum": memory({"enum": ["pure_loop.Time", "x"]}),
    "an enum as a record": memory({"record": "pure_loop.Event", "fields": {}}),
    "no such member": memory({"enum": ["pure_loop.Event", "__class__"]}),
    "fields missing": memory({"record": "pure_loop.Time", "fields": {"value": 1}}),
    "fields unknown": memory({"record": "pure_loop.Time", "fields": {"value": 1, "unit": SECOND, "__class__": 1}}),
    "fields of another kind": memory({"record": "pure_loop.Time", "fields": [1]}),
    "a kind unknown": memory({"pickle": "gASVIAAAAAAAAACMBXBvc2l4"}),
    "an object with nothing": memory({}),
    "no such tensor": memory({"tensor": "../../etc/passwd"}),
    "a tensor with a list as its name": memory({"tensor": [NAME]}),
    "a tensor described in two ways": memory([{"tensor": NAME}, {"tensor": NAME, "shape": [6], "stride": [1]}]),
    "a dtype unknown": memory({"tensor": NAME, "dtype": "float31", "shape": [3, 2]}),
    "a dtype that is none": memory({"tensor": NAME, "dtype": "nn", "shape": [3, 2]}),
    "numbers as bools": memory({"tensor": NAME, "dtype": "bool", "shape": [24]}),
    "numbers as quantized": memory({"tensor": NAME, "dtype": "quint8", "shape": [24]}),
    "a shape too large": memory({"tensor": NAME, "dtype": "float32", "shape": [1 << 40]}),
    "a shape below zero": memory({"tensor": NAME, "dtype": "float32", "shape": [-3, -2]}),
    "a shape beyond all": memory({"tensor": NAME, "dtype": "float32", "shape": [1 << 80]}),
    "a stride out of the memory": memory({"tensor": NAME, "shape": [3, 2], "stride": [1 << 20, 1]}),
    "a stride below zero": memory({"tensor": NAME, "shape": [3, 2], "stride": [-2, 1]}),
    "a stride of nothing": memory({"tensor": NAME, "shape": [3, 2], "stride": [0, 0]}),
    "a stride of another length": memory({"tensor": NAME, "shape": [3, 2], "stride": [1]}),
    "a float too large": memory({"float": "0x1p99999"}),
    "a float of words": memory({"float": "much"}),
    "a complex of three": memory({"complex": ["0x1p1"] * 3}),
    "a complex too large": memory({"complex": ["0x1p99999"] * 2}),
    "a size of texts": memory({"size": ["a"]}),
    "a size beyond all": memory({"size": [1 << 80, "a"]}),
    "bytes that are none": memory({"bytes": "é"}),
    "a device unknown": memory({"device": "typewriter:1"}),
    "a device that is a list": memory({"device": []}),
    "a set of lists": memory({"set": [[1]]}),
    "a dict of one": memory({"dict": [[1]]}),
    "a dict by dicts": memory({"dict": [[{"dict": {}}, 1]]}),
    "a dict of a number": memory({"dict": 5}),
    "a tuple of a number": memory({"tuple": 5}),
    "a parameter that is a number": at("fields", "params", "frozen", "0.weight", value=5),
    "parameters that are a list": at("fields", "params", value=[1]),
    "parameters that are deep": at("fields", "params", value="DEEP"),
    "memory that is deep": memory("DEEP"),
    "memory that is deep in records": memory("DEEPER"),
    "memory that is deeper than a writer goes": memory("DEEPISH"),
    "a batch below zero": at("fields", "timestamp", "fields", "batch", value=-1),
    "a batch beyond all": at("fields", "timestamp", "fields", "batch", value=10**300),
    "a batch that is a text": at("fields", "timestamp", "fields", "batch", value="1"),
    "seconds beyond all": at("fields", "timestamp", "fields", "total_seconds", value=10**400),
    "a duration beyond all": at(
        *("fields", "timestamp", "fields", "max_duration"),
        value={"record": "pure_loop.Time", "fields": {"value": 10**400, "unit": SECOND}},
    ),
    "a duration that is NaN": at(
        *("fields", "timestamp", "fields", "max_duration"),
        value={"record": "pure_loop.Time", "fields": {"value": float("nan"), "unit": SECOND}},
    ),
    "a duration of lists": at(
        *("fields", "timestamp", "fields", "max_duration"),
        value={"record": "pure_loop.Time", "fields": {"value": [1], "unit": [1]}},
    ),
    "a timestamp that is a State": at("fields", "timestamp", "record", value="pure_loop.State"),
    "a seed that is a text": at("fields", "seed", value="1"),
    "a model": at("fields", "model", value=None),
    "a gradient": at("fields", "_grads", value=None),
    "a field unknown": at("fields", "__class__", value="pure_loop.Time"),
    "a State's class unknown": at("state", value="os:system"),
    "a State's class that is none": at("state", value="pure_loop.Time"),
    "fields that are a list": at("fields", value=[]),
    "a newer format": at("format", value=99),
    "a format that is a bool": at("format", value=True),
    "a format before the first": at("format", value=0),
}


class TestDescriptionsThatAreNotTrue:
    """With a digest that is right: the file was written so."""

    @pytest.mark.parametrize("name", NOT_TRUE)
    def test_it_is_refused(self, name: str, good: bytes, tmp_path: Path) -> None:
        path, document = tmp_path / "x.safetensors", Document(good)
        NOT_TRUE[name](document.json)
        text = json.dumps(document.json)
        text = text.replace('"DEEPISH"', "[" * 250 + "]" * 250)
        text = text.replace('"DEEPER"', '{"tuple": [' * 300 + "]}" * 300).replace('"DEEP"', "[" * 900 + "]" * 900)
        path.write_bytes(document.bytes(text))
        modules = set(sys.modules)
        with little_memory():
            assert len(refused(path)) < 1500
            with pytest.raises((CheckpointError, ResumeError)):
                fit(small(), load_path=path)
        assert not {each for each in set(sys.modules) - modules if each in ("antigravity", "subprocess", "webbrowser")}

    @pytest.mark.parametrize("text", ["", "[]", "null", "5", '"x"', "{", "[" * 99999, '{"format": 1}', "{}"])
    def test_no_description(self, text: str, good: bytes, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(Document(good).bytes(text))
        refused(path)
        with messages() as said:
            assert pl.latest(tmp_path) is None
        assert str(path) in said[0]

    def test_a_newer_format_says_what_to_install(self, good: bytes, tmp_path: Path) -> None:
        document = Document(good)
        document.json |= {"format": 2, "made_by": {"pure_loop": "9.9"}}
        (tmp_path / "x.safetensors").write_bytes(document.bytes())
        assert "9.9" in refused(tmp_path / "x.safetensors")


class TestOtherModels:
    """Each says which leaf, and how it is on either side; nothing is loaded half."""

    def check(self, state: pl.State, path: Path, *says: str, model: nn.Module | None = None) -> None:
        pl.save(state, path)
        for attempt in (
            lambda: pl.load(path, model=model or small()),
            lambda: fit(model or small(), load_path=path),
            lambda: fit(model or small(), autoresume=path.parent),
            lambda: fit(pl.State.create(model or small()), autoresume=path.parent),
        ):
            with pytest.raises(ResumeError) as caught:
                attempt()
            for each in (str(path), *says):
                assert each in str(caught.value)

    def test_names(self, tmp_path: Path) -> None:
        other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.check(pl.State.create(other), tmp_path / "x.safetensors", "the file lacks ['3.weight'")

    def test_shapes(self, tmp_path: Path) -> None:
        other = small()
        other[0] = nn.Linear(4, 3)
        self.check(pl.State.create(other), tmp_path / "x.safetensors", "0.weight", "(3, 4)", "(3, 2)")

    def test_shapes_of_buffers(self, tmp_path: Path) -> None:
        other = small()
        other[1].register_buffer("running_var", torch.zeros(7))
        self.check(pl.State.create(other), tmp_path / "x.safetensors", "buffers", "1.running_var", "(7,)", "(3,)")

    def test_dtypes(self, tmp_path: Path) -> None:
        self.check(pl.State.create(small().double()), tmp_path / "x.safetensors", "0.weight", "float64", "float32")

    @pytest.mark.parametrize("tied_in_the_file", [True, False])
    def test_tied(self, tmp_path: Path, tied_in_the_file: bool) -> None:
        def model(tied: bool) -> nn.Module:
            torch.manual_seed(0)
            found = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            if tied:
                found[1].weight = found[0].weight
            return found

        path = tmp_path / "x.safetensors"
        self.check(pl.State.create(model(tied_in_the_file)), path, "1.weight", model=model(not tied_in_the_file))

    def test_another_optimizer(self, tmp_path: Path, trained: pl.State) -> None:
        path = tmp_path / "x.safetensors"
        pl.save(trained, path)
        for how in ({"load_path": path}, {"autoresume": tmp_path}):
            with pytest.raises(ResumeError, match="opt_state was made by another optimizer") as caught:
                fit(small(), optimizer=pl.optim.adamw(lr=0.1), **how)
            assert str(path) in str(caught.value)
