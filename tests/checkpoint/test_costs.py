"""What files that are made to cost much cost: a megabyte at most 2 seconds and 100 MB, a folder what its largest does.

Tried besides those of ``tests.support.hostile``: indexes of many chunks and files, folders of many descriptions,
devices and pipes in the place of a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

import pure_loop as pl
from pure_loop.checkpoint.index import Index
from pure_loop.checkpoint.validation import MOST_MEMORY, memory_of, parse, refuse_collisions
from tests.support.checkpoint_runs import messages, refused, small
from tests.support.cpu_time import within
from tests.support.hostile import MODULUS, MOST_SECONDS, counted, repeated, with_memory

MOST_BYTES = 100 << 20

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")


def measured(folder: Path, what: str) -> list[tuple[str, str, int, float, int, str]]:
    """What another process measures: name, way of loading, bytes of the file, seconds, bytes of memory, what came."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile", str(folder), what],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@needs_proc
@pytest.mark.slow  # measures time and memory in a process of its own
def test_each_file(tmp_path: Path) -> None:
    found = measured(tmp_path, "files")
    assert len(found) > 100
    for name, how, size, seconds, memory, came in found:
        assert seconds < MOST_SECONDS, (name, how)
        assert memory < MOST_BYTES * size / (1 << 20), (name, how)
        assert int(came.partition(" ")[2] or 0) < 1500, (name, how, came)


@needs_proc
@pytest.mark.slow
def test_folders(tmp_path: Path) -> None:
    """90 MB: one description at a time is in memory, and of one that is too large nothing but its text."""
    for name, how, size, _, memory, _ in measured(tmp_path, "folders"):
        assert size > 80 << 20
        assert memory < 3 * MOST_BYTES, (name, how, memory)


@pytest.mark.parametrize("count", [2, 33, 60_000])
def test_integers_of_one_hash(tmp_path: Path, count: int) -> None:
    """Two of them are a set, as by chance; many are refused at once."""
    numbers = [1 + number * MODULUS for number in range(count)]
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_memory(f'{{"set": {json.dumps(numbers)}}}'))
    if count == 2:
        assert pl.load(path, model=small()).algorithm_state["x"] == set(numbers)
        return
    assert f"{count:,} of its {count:,} keys have one hash" in refused(path)


def test_keys_of_different_hashes_are_keys() -> None:
    refuse_collisions([*range(10_000), *map(str, range(10_000)), *(float(n) / 3 for n in range(10_000)), -1, -2])
    with pytest.raises(TypeError):
        refuse_collisions([[]] * 40)


@pytest.mark.parametrize(
    "item", ["[]", "{}", "[0]", '{"":0}', "0", "1000", "1.5", '""', '"ab"', "null", "[[0]]", "[" * 50 + "]" * 50, '"é"']
)
def test_the_bound_of_memory_is_one(item: str) -> None:
    text = repeated(item, 100_000)
    tracemalloc.start()
    kept = parse(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept
    assert peak <= memory_of(text)


def test_a_text_that_would_take_too_much() -> None:
    text = repeated("[]", 8 << 20)
    assert memory_of(text) > MOST_MEMORY
    with pytest.raises(ValueError, match="MiB of memory, and at most 256 MiB are allowed"):
        parse(text)


def test_what_would_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pure_loop.checkpoint.container.MOST_MEMORY", 1 << 20)
    state = pl.State.create(small()).remember("x", [[] for _ in range(10_000)])
    with pytest.raises(pl.CheckpointError, match="keep long lists of numbers in tensors"):
        pl.save(state, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


DIGEST = "0" * 32
FILE = f'["{"0" * 16}-whole.safetensors", 100, "{DIGEST}"]'


def index(chunks: str, shape: str, size: int = 100) -> str:
    file = FILE.replace(" 100,", f" {size},")
    return f'{{"files": [{file}], "tensors": {{"params.x": ["U8", {shape}, true, {chunks}]}}}}'


NAME = '"{0}":["U8",[0],false,[]]'
INDEXES = {
    "chunks of one dimension": index(counted(lambda i: f"[0,[{i}],[1]]", 80_000), "[80000]"),
    "chunks that are paid for": index(counted(lambda i: f"[0,[{i}],[1]]", 50_000), "[50000]", 1 << 40),
    "chunks of a grid": index(counted(lambda i: f"[0,[{i // 200},{i % 200}],[1,1]]", 40_000), "[200,200]"),
    "one chunk often": index(repeated("[0,[0,0],[1,1]]"), "[60000,60000]"),
    "chunks of many dimensions": index(
        counted(lambda i: f"[0,[{'0,' * 62}{i // 60},{i % 60}],[{'1,' * 63}1]]", 3600), f"[{'1,' * 62}60,60]"
    ),
    "chunks that cross": index(counted(lambda i: f"[0,[{i},0],[1,60000]]", 30_000), "[60000,60000]"),
    "files": f'{{"files": [{",".join([FILE] * 15_000)}], "tensors": {{}}}}',
    "names": f'{{"files": [], "tensors": {{{counted(NAME.format)[1:-1]}}}}}',
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name: str) -> None:
    """Each is read or refused soon; a grid of chunks, as ranks write, is taken."""

    def outcome() -> object:
        try:
            return Index.of_text(INDEXES[name], "an index").tensors
        except pl.CheckpointError as error:
            return error

    result = within(MOST_SECONDS, outcome)
    if name in ("chunks that are paid for", "names"):
        assert result
        assert not isinstance(result, pl.CheckpointError)
    else:
        assert isinstance(result, pl.CheckpointError)
        assert len(str(result)) < 500


def test_a_grid_and_what_is_none() -> None:
    """Cut along both dimensions at the same places; of other cuttings, which no ranks make, each is refused."""
    size = 10_000
    grid = json.dumps([[0, [row, column], [2, 3]] for row in (0, 2) for column in (0, 3)])
    assert len(Index.of_text(index(grid, "[4,6]", size), "x").tensors["params.x"].chunks) == 4
    for cut in (
        [[0, [0, 0], [2, 3]], [0, [0, 3], [2, 3]], [0, [2, 0], [2, 3]], [0, [2, 0], [2, 3]]],
        [[0, [0, 0], [2, 4]], [0, [0, 4], [2, 2]], [0, [2, 0], [2, 2]], [0, [2, 2], [2, 4]]],
        [[0, [0, 0], [4, 3]], [0, [0, 2], [4, 3]]],
        [[0, [0, 0], [4, 3]], [0, [0, 3], [4, 2]]],
        [[0, [0, 0], [4, 0]], [0, [0, 0], [4, 6]]],
    ):
        with pytest.raises(pl.CheckpointError, match="are not all of it, once"):
            Index.of_text(index(json.dumps(cut), "[4,6]", size), "x")


def test_an_index_with_tensors_is_none(sharded_copy: str) -> None:
    """It would be read whole when the folder is listed."""
    from pure_loop.checkpoint import container
    from pure_loop.checkpoint.index import INDEX
    from tests.support.sharding import network

    path = Path(sharded_copy) / "newer.sharded" / INDEX
    with open(path, "rb") as file:
        header, _ = container.read(file, path)
    with open(path, "wb") as file:
        container.write(file, {"params.x": torch.zeros(3)}, header.metadata)
    with pytest.raises(pl.CheckpointError, match="it is no index of a sharded checkpoint"):
        pl.load(path.parent, model=network())
    with messages() as said:
        assert str(pl.latest(sharded_copy)).endswith("older.sharded")
    assert "newer.sharded" in said[0]


def test_a_device_in_the_place_of_a_file(tmp_path: Path) -> None:
    """Reading from a terminal would wait for its user."""
    leader, follower = os.openpty()
    try:
        for number, device in enumerate(("/dev/zero", "/dev/null", os.ttyname(follower))):
            (tmp_path / f"{number}.safetensors").symlink_to(device)
            assert "device" in refused(tmp_path / f"{number}.safetensors")
        with messages() as said:
            assert pl.latest(tmp_path) is None
        assert len(said) == 3
    finally:
        os.close(leader)
        os.close(follower)
