"""What files that are made to cost much cost: 256 kB take half a second and 25 MB, a folder what its largest takes."""

from __future__ import annotations

import base64
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.checkpoint.index import Index
from pure_loop.checkpoint.validation import MOST_MEMORY, decoded, memory_of, parse, refuse_collisions
from tests.support.checkpoint_runs import little_memory, messages, small, state_at
from tests.support.cpu_time import within
from tests.support.hostile import MEMORY, Folder, checkpoint, rewritten, sealed
from tests.support.tiers import examples

SIZE = 1 << 18
# Integers, floats and tuples that differ by this have one hash.
MODULUS = sys.hash_info.modulus


def repeated(item: str, size: int = SIZE) -> str:
    """A JSON list of this size."""
    return f"[{','.join([item] * (size // (len(item) + 1)))}]"


def counted(item: Callable[[int], str], count: int = 0) -> str:
    """A JSON list of what ``item`` gives for 0, 1, 2, ..., so many times or up to that size."""
    return f"[{','.join(map(item, range(count or SIZE // len(item(60_000)))))}]"


def one_hash(number: int) -> str:
    return str(1 + number * MODULUS)


MEMORIES = {
    "a set of colliding integers": f'{{"set": {counted(one_hash)}}}',
    "a set of colliding floats": f'{{"set": {counted(lambda i: repr(float(i + 1) * 2.0 ** (61 * (i % 16))))}}}',
    "a dict by colliding integers": f'{{"dict": {counted(lambda i: f"[{one_hash(i)}, 0]")}}}',
    "a frozen dict by colliding tuples": f'{{"frozen": {counted(lambda i: f"""[{{"tuple": [{one_hash(i)}]}}, 0]""")}}}',
    "lists of lists": repeated("[[0]]"),
    "deep tuples": repeated('{"tuple": [' * 60 + "]}" * 60),
    "an integer too long": "9" * SIZE,
    "bytes": f'{{"bytes": "{"0" * SIZE}"}}',
    "texts of wide characters": repeated(f'"{chr(0x1F600)}"'),
    "one tensor of many dimensions": f'{{"tensor": "skipped", "shape": {repeated("1")}, "stride": [1]}}',
    "a kind that is long": f'{{"{"k" * SIZE}": 0}}',
}
DIGEST = '"pure_loop.blake2b-256":{"dtype":"U8","shape":[32],"data_offsets":[0,32]}'
ZEROS = "9," * 63 + "0"
HEADERS = {
    "many dimensions": counted(lambda i: f'"{i}":{{"dtype":"U8","shape":[{ZEROS}],"data_offsets":[0,0]}}')[1:-1],
    "deep lists": f'"x":{repeated("[" * 60 + "]" * 60)}',
}


@pytest.mark.parametrize("name", [*MEMORIES, *HEADERS])
def test_a_file(name: str, tmp_path: Path) -> None:
    content = rewritten(checkpoint(), MEMORY, MEMORIES[name]) if name in MEMORIES else b""
    Folder(tmp_path).check(
        content or sealed(f"{{{HEADERS[name]},{DIGEST}}}"), reads=False, seconds=0.5, memory=25 << 20
    )


def test_of_a_folder_one_description_at_a_time_is_in_memory(tmp_path: Path) -> None:
    content = rewritten(checkpoint(), MEMORY, repeated("[]", 300_000))
    for number in range(12):
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    with little_memory(32 << 20), messages():
        assert pl.latest_path(tmp_path) == str(tmp_path / "9.safetensors")


def test_keys_of_one_hash(tmp_path: Path) -> None:
    """Some are a set, as by chance; many are refused at once."""
    for count in (2, 32, 33):
        numbers = [1 + number * MODULUS for number in range(count)]
        said = Folder(tmp_path).check(rewritten(checkpoint(), MEMORY, json.dumps({"set": numbers})), reads=False)
        assert said == "" if count < 33 else "33 of its 33 keys have one hash" in said
    refuse_collisions([*range(10_000), *map(str, range(10_000)), *(float(n) / 3 for n in range(10_000)), -1, -2])
    with pytest.raises(TypeError):
        refuse_collisions([[]] * 40)


def test_the_bound_of_memory_is_one() -> None:
    items = ("[]", "{}", "[0]", '{"":0}', "0", "1000", "1.5", '""', '"ab"', "null", "[[0]]", "[" * 50 + "]" * 50, '"é"')
    for item in items:
        text = repeated(item, 10_000)
        tracemalloc.start()
        kept = parse(text)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept
        assert peak <= memory_of(text), item
    text = repeated("[]", 8 << 20)
    assert memory_of(text) > MOST_MEMORY
    with pytest.raises(ValueError, match="MiB of memory, and at most 256 MiB are allowed"):
        parse(text)


def test_what_would_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in (("MOST_MEMORY", 1 << 20), ("_LONGEST_HEADER", 10_000)):
        with monkeypatch.context() as patch:
            patch.setattr(f"pure_loop.checkpoint.container.{limit}", most)
            with pytest.raises(pl.errors.CheckpointError, match="keep long lists of numbers in tensors"):
                pl.save(state_at().remember("x", [[] for _ in range(10_000)]), tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
CONTENT = st.binary(max_size=64) | st.integers(0, 200_000).map(lambda size: bytes(range(251)) * (size // 251))


@examples(100, 3000)
@given(CONTENT, st.text(ALPHABET, max_size=12) | st.text(ALPHABET + '" ,\n\x00é', max_size=12))
def test_base85_is_read_or_refused_as_python_does(content: bytes, text: str) -> None:
    assert decoded(base64.b85encode(content).decode()) == content
    try:
        expected = base64.b85decode(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"base85|ascii"):
            decoded(text)
    else:
        assert decoded(text) == expected


def test_a_long_text_takes_few_times_its_size(tmp_path: Path) -> None:
    """3 MB took 90 MB. Now: the file, its description as text and as JSON, and the bytes."""
    pl.save(state_at().remember("x", bytes(range(256)) * (10 << 10)), tmp_path / "x.safetensors")
    tracemalloc.start()
    pl.load(tmp_path / "x.safetensors", model=small())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * (tmp_path / "x.safetensors").stat().st_size


FILE = f'["{"0" * 16}-whole.safetensors", 100, "{"0" * 32}"]'


def index(chunks: str, shape: str, size: int = 100) -> str:
    file = FILE.replace(" 100,", f" {size},")
    return f'{{"files": [{file}], "tensors": {{"params.x": ["U8", {shape}, true, {chunks}]}}}}'


MANY = counted(lambda i: f"[0,[{'0,' * 62}{i // 30},{i % 30}],[{'1,' * 63}1]]", 900)
INDEXES = {
    "chunks that are paid for": (index(counted(lambda i: f"[0,[{i}],[1]]", 10_000), "[10000]", 1 << 40), ""),
    "one chunk often": (index(repeated("[0,[0,0],[1,1]]"), "[60000,60000]"), "not all of it, once"),
    "chunks of many dimensions": (index(MANY, f"[{'1,' * 62}30,30]"), "bytes of tensors"),
    "chunks that cross": (index(counted(lambda i: f"[0,[{i},0],[1,60000]]", 10_000), "[10000,60000]"), "of tensors"),
    "files": (f'{{"files": [{",".join([FILE] * 4_000)}], "tensors": {{}}}}', "names a file twice"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index(name: str) -> None:
    """Each is read or refused soon."""
    text, says = INDEXES[name]

    def outcome() -> str:
        try:
            return "" if Index.of_text(text, "an index").tensors else "nothing"
        except pl.errors.CheckpointError as error:
            return str(error)

    found = within(0.5, outcome)
    assert len(found) < 500
    assert found == "" if says == "" else says in found


def test_a_grid_and_what_is_none() -> None:
    """Cut along both dimensions at the same places; of other cuttings, which no ranks make, each is refused."""
    grid = json.dumps([[0, [row, column], [2, 3]] for row in (0, 2) for column in (0, 3)])
    assert len(Index.of_text(index(grid, "[4,6]", 10_000), "x").tensors["params.x"].chunks) == 4
    for cut in (
        [[0, [0, 0], [2, 3]], [0, [0, 3], [2, 3]], [0, [2, 0], [2, 3]], [0, [2, 0], [2, 3]]],
        [[0, [0, 0], [2, 4]], [0, [0, 4], [2, 2]], [0, [2, 0], [2, 2]], [0, [2, 2], [2, 4]]],
        [[0, [0, 0], [4, 3]], [0, [0, 2], [4, 3]]],
        [[0, [0, 0], [4, 3]], [0, [0, 3], [4, 2]]],
        [[0, [0, 0], [4, 0]], [0, [0, 0], [4, 6]]],
    ):
        with pytest.raises(pl.errors.CheckpointError, match="are not all of it, once"):
            Index.of_text(index(json.dumps(cut), "[4,6]", 10_000), "x")
