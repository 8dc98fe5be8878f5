"""Files of another origin or kind, and descriptions that are not true: each is refused, for a reason that it says."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop.checkpoint import container
from pure_loop.errors import CheckpointError, CheckpointNotFoundError
from tests.support.checkpoint_runs import fit, little_memory, messages, refused, small
from tests.support.hostile import MEMORY, Folder, checkpoint, described, document_of, header_of, rewritten, sealed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("run"))


class Bomb:
    """What a pickle that is opened would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_files_of_other_kinds(folder: Folder, tmp_path: Path) -> None:
    """Nothing in them runs, and those of torch.save are told from others."""
    bomb = Bomb(tmp_path / "ran")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert ("pickle" in folder.check(pickle.dumps(bomb, protocol=protocol))) == (protocol >= 2)
    for zipped in (True, False):
        torch.save({"x": bomb}, tmp_path / "t", _use_new_zipfile_serialization=zipped)
        text = folder.check((tmp_path / "t").read_bytes())
        assert "pickle" in text
        assert "What torch.save or Composer wrote is read by pl.from_composer(path, model)" in text
    for content in (b"", b"{", b"\0" * 8, b"\xff" * 64, b"\x89PNG\r\n\x1a\n" + b"\0" * 99, b"a" * 9):
        assert folder.check(content)
    for claimed in (33 << 20, 1 << 62, (1 << 64) - 1):
        assert "tells of a header" in folder.check(claimed.to_bytes(8, "little") + b'{"a":' + b" " * 100)
    assert not (tmp_path / "ran").exists()


def test_files_with_holes_pay_for_nothing(tmp_path: Path) -> None:
    path, size = tmp_path / "x.safetensors", 1 << 42
    header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError:
            pytest.skip("this file system has no files of so many bytes")
    with little_memory(), messages():
        assert "it is sparse" in refused(path, weights_only=True)
        assert pl.latest_path(tmp_path) is None


def test_what_stands_in_the_place_of_a_file(tmp_path: Path) -> None:
    """A folder and nothing; a pipe and a terminal, which would be waited for; a device."""
    (tmp_path / "folder.safetensors").mkdir()
    refused(tmp_path / "folder.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"nothing\.safetensors"):
        pl.load(tmp_path / "nothing.safetensors", model=small())
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "a pipe" in refused(tmp_path / "pipe.safetensors")
    leader, follower = os.openpty()
    try:
        for number, device in enumerate(("/dev/zero", "/dev/null", os.ttyname(follower))):
            (tmp_path / f"{number}.safetensors").symlink_to(device)
            assert "a device" in refused(tmp_path / f"{number}.safetensors")
        with messages() as said:
            assert pl.latest_path(tmp_path) is None
        assert len(said) == 5
    finally:
        os.close(leader)
        os.close(follower)
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "x.safetensors")


def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), name: str = "w", **more: Any) -> str:
    return f"{json.dumps(name)}: {json.dumps({'dtype': dtype, 'shape': shape, 'data_offsets': offsets, **more})}"


SHAPES = ([1 << 40], [1 << 62, 1 << 62], [0, 1 << 62, 1 << 62], [1] * 100, [1 << 64, 0], [-1], [True], [1.0], "1", None)
HEADERS = (
    *[(header, "is not JSON") for header in ("[]", "5", '"pure_loop"')],
    *[(header, "header can't be read") for header in ("{", '{"a": NaN}', '{"a": 1e999}', f'{{"a": {"9" * 5000}}}')],
    (f"{{{tensor()}, {tensor()}}}", "a name stands twice"),
    ('{"__metadata__": {"a": "1", "a": "2"}}', "a name stands twice"),
    ('{"__metadata__": {"a": 1}}', "are not texts"),
    ('{"__metadata__": []}', "are not texts"),
    *[(f'{{"w": {"[" * n}{"]" * n}}}', "nested too deep") for n in (10_000,)],
    (f"{{{tensor('F31')}}}", "dtype 'F31', which this version"),
    (f"{{{tensor(['F32'])}}}", "which this version"),
    *[(f"{{{tensor(shape=shape)}}}", "'w'") for shape in SHAPES],
    *[(f"{{{tensor(offsets=given)}}}", "offsets") for given in ([-4, 0], [0, 4, 4], 4, [0.0, 4])],
    (f"{{{tensor(offsets=[4, 0])}}}", "has -4 bytes"),
    (f"{{{tensor(offsets=[4, 8])}}}", "don't begin where"),
    (f"{{{tensor()}, {tensor(name='b')}}}", "don't begin where"),
    (f"{{{tensor(more=1)}}}", "in another way"),
    ('{"w": {"dtype": "F32", "shape": [1]}}', "in another way"),
    (f"{{{tensor('BOOL', [4])}}}", "other numbers than 0 and 1"),
    (f"{{{tensor(shape=[2], offsets=[0, 8])}}}", "cut off or damaged"),
    (f"{{{tensor('U8', [2], [0, 2], name=container.DIGEST)}, {tensor('U8', [2], [2, 4])}}}", "not at its end"),
    ('{"' + "w" * 100_000 + '": 5}', "in another way"),
    ('{"\ud800": 5}', "in another way"),
)


def test_headers_that_are_none(folder: Folder) -> None:
    for header, says in HEADERS:
        text = header.encode("utf-8", "surrogatepass")
        content = len(text).to_bytes(8, "little") + text + b"\2\0\0\0"
        assert says in folder.check(content, reads=False), header[:80]


def of(*names: str) -> tuple[str, ...]:
    return ("fields", *names)


def now(name: str) -> tuple[str, ...]:
    return of("timestamp", "fields", name)


SECOND = '{"enum": ["pure_loop.TimeUnit", "SECOND"]}'
EVENT = '{"enum": ["pure_loop.Event", "BEFORE_FORWARD"]}'
T = '"tensor": "algorithm_state.x.tensors.3"'  # of shape (3, 2)
WEIGHT = '{"tensor": "params.0.weight", "shape": [5, 4], "stride": [1, 1]}'
BIAS, THREE, TRUE, HALF = (
    f'{{"tensor": "{name}"}}'
    for name in ("params.0.bias", *(f"algorithm_state.x.{name}" for name in ("keys.1", "tensors.2", "number")))
)
LOSS_SCALE = '{"record": "pure_loop.LossScale", "fields": {"scale": %s, "growth_tracker": %s}}'
FROZEN = ("base", "params.0.weight")
UNKNOWN, KIND, MORE = "a class unknown to this program", "pure_loop.Time", f', "unit": {SECOND}, "x": 1'
NO_VALUES = (
    *(f'{{"bytes": "{text}"}}' for text in ("é", "000 00", "~~~~~")), '{"record": "pure_loop.Time", "fields": [1]}',
    f'{{{T}, "shape": [3, 2], "stride": [{1 << 20}, 1]}}', f'{{{T}, "dtype": "float32", "shape": [{1 << 40}]}}',
    '{"enum": ["pure_loop.Event", "__class__"]}', f'{{{T}, "shape": [3, 2], "stride": [1]}}', '{"float": "0x1p99999"}',
    '{"complex": ["0x1p1", "0x1p1", "0x1p1"]}', '{"complex": ["0x1p99999", "0x1p99999"]}', '{"tensor": ["x"]}',
    '{"tensor": "../../etc/passwd"}', '{"dict": [[{"dict": {}}, 1]]}', '{"device": "typewriter:1"}', '{"dict": [[1]]}',
    '{"float": "much"}', '{"set": [[1]]}', '{"device": []}',
)  # fmt: skip
# Of a description: the place, the JSON that is put there, and what the error says.
NOT_TRUE = [
    *[(MEMORY, text, "is no value") for text in NO_VALUES],
    *[(MEMORY, f'{{"record": "{name}", "fields": {{"x": "x"}}}}', UNKNOWN) for name in ("os:system", "antigravity:x")],
    *[(MEMORY, text, "") for text in ('{"record": ["os:system"], "fields": {}}', "[" * 900 + "]" * 900)],
    (MEMORY, '{"record": "pure_loop.Event", "fields": {}}', UNKNOWN),
    (MEMORY, '{"record": "pure_loop.State", "fields": {}}', "a State inside of a State"),
    *[(MEMORY, f'{{"record": "{KIND}", "fields": {{"value": 1{x}}}}}', "other fields than it has") for x in ("", MORE)],
    *[(MEMORY, f'{{"enum": ["{n}", "x"]}}', "an Enum that this program doesn't know") for n in ("os:system", KIND)],
    *[(MEMORY, text, "of an unknown kind") for text in ('{"pickle": "gASVIAAAAAAAAACMBXBvc2l4"}', "{}")],
    (MEMORY, f'[{{{T}}}, {{{T}, "shape": [6], "stride": [1]}}]', "is described in two ways"),
    *[(MEMORY, f'{{{T}, "dtype": "{d}", "shape": [3, 2]}}', "is no dtype") for d in ("float31", "nn")],
    *[(MEMORY, f'{{{T}, "dtype": "{d}", "shape": [24]}}', "not written as bytes") for d in ("bool", "quint8")],
    *[(MEMORY, f'{{{T}, "dtype": "int8", "shape": {s}}}', "no list of counts") for s in ([-3, -8], [1 << 80], 5)],
    *[(MEMORY, f'{{{T}, "shape": [3, 2], "stride": {s}}}', "overlap") for s in ([1, 1], [0, 0])],
    (MEMORY, f'{{{T}, "shape": [2], "stride": [5]}}', "have holes"),
    *[(MEMORY, f'{{{T}, "shape": [3, 2], "stride": {s}}}', "no list of counts") for s in ("[-2, 1]", "[true, 3]")],
    (of("params", "frozen", "0.weight"), WEIGHT, "overlap or have holes"),
    *[(MEMORY, f'{{"size": {sizes}}}', "no list of counts") for sizes in ('["a"]', f"[{1 << 80}]")],
    (MEMORY, '{"deque": [], "maxlen": 1.5}', "1.5 is no length"),
    (MEMORY, '{"deque": [], "maxlen": -1}', "maxlen must be non-negative"),
    *[(MEMORY, f'{{"{kind}": 5}}', "is no list") for kind in ("tuple", "set", "dict", "deque")],
    (MEMORY, '{"set": [1, 1]}', "an element stands twice"),
    (MEMORY, '{"dict": [[1, 2], [1, 3]]}', "a key stands twice"),
    (MEMORY, '{"a": 1, "a": 2}', "a name stands twice"),
    *[(MEMORY, f"{begin * 101}{end * 101}", "nested too deep") for begin, end in ("[]", ('{"tuple": [', "]}"))],
    (of("params", "frozen", "0.weight"), "5", "params['0.weight'] is a int"),
    (of("params"), "[1]", "its params is a list"),
    *[(of(name), "null", f"its {name} is a NoneType") for name in ("buffers", "algorithm_state", "metrics")],
    (of("event"), '"BATCH_END"', "its event is a str"),
    (of("position"), EVENT, "its position is BEFORE_FORWARD, which is no boundary"),
    *[(of(name), "null", f"unknown ['{name}']") for name in ("model", "_grads")],
    (of("timestamp", "record"), '"pure_loop.State"', ""),
    *[(of(name), THREE, f"its {name} is (3,) int64, and") for name in ("skipped", "nonfinite", "lr_scale")],
    *[(of(name), TRUE, f"its {name} is () bool, and a State has ()") for name in ("skipped", "nonfinite", "lr_scale")],
    (of("lr_scale"), BIAS, "its lr_scale is (5,) float32, and a State has () float64"),
    *[(of(name), "5", f"its {name} is a int") for name in ("frozen", "stop", "lr_scale", "skipped")],
    (of("frozen"), '{"frozenset": [1]}', "no set of names"),
    (of("loss_scale"), LOSS_SCALE % (BIAS, BIAS), "its loss_scale.scale is (5,) float32, and a State has () float32"),
    (of("loss_scale"), LOSS_SCALE % (HALF, HALF), "its loss_scale.growth_tracker is () float32"),
    (("fields",), "[]", "its fields is []"),
    (("state",), '"os:system"', "which this program doesn't know"),
    (("state",), '"pure_loop.Time"', "is the class of a State"),
    *[((name,), "5", f"its {name} is 5") for name in ("state", "model", "made_by", "notes")],
    *[(("format",), number, "its format is") for number in ("true", "0", '"1"')],
    (("saved_at",), str(1 << 81), "its saved_at is"),
    *[(path, text, "no checkpoint's") for path, text in ((MEMORY, "null1"), (("base",), "[1]"))],
    *[(FROZEN, f'[{tensor}, "{"0" * 32}"]', "its frozen parameter") for tensor in ('"X", [2]', '"F32", [true]')],
    (FROZEN, '["F32", [2, 2], "0"]', "the digest of its frozen parameter"),
    (("base", "opt_state"), f'["F32", [2, 2], "{"0" * 32}"]', "its frozen parameter"),
]  # fmt: skip


def test_descriptions_that_are_not_true(folder: Folder) -> None:
    modules = set(sys.modules)
    content = described(checkpoint(), json.dumps(document_of(checkpoint()) | {"base": {}}))
    for path, value, says in NOT_TRUE:
        found = folder.check(rewritten(content, path, value), reads=False)
        assert found, (path, value[:80])
        assert says in found, (path, value[:80])
    assert not {each for each in set(sys.modules) - modules if each in ("antigravity", "subprocess", "webbrowser")}
    for text in ("", "[]", "null", "5", '"x"', "{", "[" * 99999, '{"format": 1}', "{}"):
        assert "no checkpoint's" in folder.check(described(content, text), reads=False)


NUMBERS = [
    *("1e999", "-1e999", "Infinity", "NaN", "1" + "0" * 400, "1" + "0" * 5000, "-1", "true", "1.5", "1.0", '"1"'),
    *("null", "[1]", '{"float": "inf"}', '{"float": "nan"}', str(1 << 63)),
]
TIME = '{"record":"pure_loop.Time","fields":{"value":%s,"unit":{"enum":["pure_loop.TimeUnit","EPOCH"]}}}'


def test_numbers_that_none_can_be(folder: Folder) -> None:
    """Of one count each number, and of the others some; autoresume passes over them, too."""
    others = ["epoch", "sample", "token", "batch_in_epoch", "iteration", "token_in_iteration", "batches_per_epoch"]
    rows = [(now("batch"), number) for number in NUMBERS]
    rows += zip(map(now, others), itertools.cycle([*NUMBERS[-5:-2], "-1"]))
    no_seconds = [number for number in NUMBERS if number not in ("-1", "1.5", "1.0", str(1 << 63))]
    rows += [(now("total_seconds"), number) for number in no_seconds]
    rows += [(of("previous_timestamp", "fields", "batch"), "-1"), (of("previous_timestamp"), "5")]
    rows += [(of("seed"), number) for number in NUMBERS if number not in ("-1", str(1 << 63), "1" + "0" * 400)]
    rows += [(("saved_at",), number) for number in ("1.5", "true", "null", "1" + "0" * 400)]
    rows += [(now("max_duration"), TIME % number) for number in [*no_seconds, "-1", "[1]"]]
    for number, (path, value) in enumerate(rows):
        assert folder.check(rewritten(checkpoint(), path, value), reads=number % 9 == 0), (path, value[:80])
        with pytest.raises(CheckpointError):
            pl.checkpoint.describe(folder.path)


def test_a_newer_format_says_what_to_install(folder: Folder) -> None:
    document = document_of(checkpoint()) | {"format": 2, "made_by": {"pure_loop": "9.9"}}
    assert "9.9" in folder.check(described(checkpoint(), json.dumps(document)))


def test_a_description_without_a_digest_and_a_digest_without_one(folder: Folder) -> None:
    """As a plain file of weights each would be whole."""
    content = checkpoint()
    name = container.DIGEST.encode()
    assert "it has no digest" in folder.check(content.replace(name, b"Q" + name[1:]))
    header, data = header_of(content)
    folder.path.write_bytes(sealed(json.dumps(header | {"__metadata__": {}}), data))
    with messages() as said:
        assert pl.latest_path(folder.folder) != str(folder.path)
    assert "it has a digest and no description of a State" in said[0]


def test_two_parameters_of_one_tensor(folder: Folder) -> None:
    """A file can say that two names have one tensor; where the model has two, they are two."""
    content = rewritten(checkpoint(), of("params", "frozen", "1.bias"), '{"tensor": "params.0.bias"}')
    assert not folder.check(content)
    for options in ({}, {"weights_only": True}):
        state = pl.load(folder.path, model=small(), **options)
        assert torch.equal(state.params["0.bias"], state.params["1.bias"])
        assert state.params["0.bias"].data_ptr() != state.params["1.bias"].data_ptr()
    last = pl.run(fit(pl.load(folder.path, model=small()), max_duration="2ep"))
    assert not torch.equal(last.params["0.bias"], last.params["1.bias"])
