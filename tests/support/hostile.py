"""Files of about one megabyte that are made to cost much, and what loading and listing them costs.

Run as a program, ``python -m tests.support.hostile FOLDER files``, it writes each of them, loads it, asks ``latest``
for it, and prints lines of JSON: its name, the way it was read, its bytes, CPU seconds, bytes of memory at the peak,
and what came. With ``folders`` it does so with folders of 90 MB.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pure_loop as pl
from pure_loop.checkpoint import container
from pure_loop.checkpoint.document import METADATA_KEY, write_document
from tests.support.checkpoint_runs import small
from tests.support.cpu_time import cpu_seconds

MEGABYTE = 1 << 20
MOST_SECONDS = 2.0
# Integers, floats and tuples that differ by this have one hash.
MODULUS = sys.hash_info.modulus
COUNT = 60_000


def repeated(item: str, size: int = MEGABYTE) -> str:
    """A JSON list of this size."""
    return f"[{','.join([item] * (size // (len(item) + 1)))}]"


def counted(item: Callable[[int], str], count: int = COUNT) -> str:
    """A JSON list of what ``item`` gives for 0, 1, 2, ..., up to a megabyte."""
    found: list[str] = []
    size = 0
    for number in range(count):
        found.append(item(number))
        size += len(found[-1]) + 1
        if size > MEGABYTE:
            break
    return f"[{','.join(found)}]"


def collision(number: int) -> int:
    return 1 + number * MODULUS


MEMORIES: dict[str, Callable[[], str]] = {
    "a set of colliding integers": lambda: f'{{"set": {counted(lambda i: str(collision(i)))}}}',
    "a frozenset of colliding integers": lambda: f'{{"frozenset": {counted(lambda i: str(collision(i)))}}}',
    "a set of negative colliding integers": lambda: f'{{"set": {counted(lambda i: str(-collision(i)))}}}',
    "a set of colliding floats": lambda: f'{{"set": {counted(lambda i: repr(float(i + 1) * 2.0 ** (61 * (i % 16))))}}}',
    "a set of colliding tuples": lambda: f'{{"set": {counted(lambda i: f"""{{"tuple": [5, {collision(i)}]}}""")}}}',
    "a set of colliding frozensets": lambda: (
        f'{{"set": {counted(lambda i: f"""{{"frozenset": [{collision(i)}]}}""")}}}'
    ),
    "a set of colliding complex numbers": lambda: (
        f'{{"set": {counted(lambda i: f"""{{"complex": ["{float(-1000003 * i).hex()}", "{float(i).hex()}"]}}""")}}}'
    ),
    "a dict by colliding integers": lambda: f'{{"dict": {counted(lambda i: f"[{collision(i)}, 0]")}}}',
    "an ordered dict by colliding integers": lambda: f'{{"ordered": {counted(lambda i: f"[{collision(i)}, 0]")}}}',
    "a frozen dict by colliding tuples": lambda: (
        f'{{"frozen": {counted(lambda i: f"""[{{"tuple": [{collision(i)}]}}, 0]""")}}}'
    ),
    "a set of distinct integers": lambda: f'{{"set": {counted(lambda i: str(i << 40))}}}',
    "lists": lambda: repeated("[]"),
    "lists of lists": lambda: repeated("[[0]]"),
    "deep lists": lambda: repeated("[" * 60 + "]" * 60),
    "deep tuples": lambda: repeated('{"tuple": [' * 60 + "]}" * 60),
    "dicts": lambda: repeated('{"dict": {}}'),
    "objects of no kind": lambda: repeated("{}"),
    "sets": lambda: repeated('{"set": []}'),
    "zeros": lambda: repeated("0"),
    "long integers": lambda: repeated("9" * 4300),
    "an integer too long": lambda: "9" * MEGABYTE,
    "a float of many digits": lambda: "0." + "9" * MEGABYTE,
    "a float in hexadecimal": lambda: f'{{"float": "0x1.{"f" * MEGABYTE}p0"}}',
    "bytes": lambda: f'{{"bytes": "{"0" * MEGABYTE}"}}',
    "a text": lambda: f'"{"x" * MEGABYTE}"',
    "a text of wide characters": lambda: f'"{chr(0x1F600) * (MEGABYTE // 4)}"',
    "texts of wide characters": lambda: repeated(f'"{chr(0x1F600)}"'),
    "one tensor often": lambda: repeated('{"tensor": "skipped"}'),
    "one tensor described in two ways": lambda: repeated('{"tensor": "skipped"}, {"tensor": "skipped", "device": "x"}'),
    "one tensor of many dimensions": lambda: f'{{"tensor": "skipped", "shape": {repeated("1")}, "stride": [1]}}',
    "numbers of NumPy": lambda: repeated('{"numpy": "number", "of": {"tensor": "skipped"}}'),
    "devices": lambda: repeated('{"device": "cpu"}'),
    "dtypes": lambda: repeated('{"dtype": "float32"}'),
    "sizes": lambda: repeated('{"size": [1]}'),
    "a size": lambda: f'{{"size": {repeated("1")}}}',
    "records": lambda: repeated(
        '{"record": "pure_loop.Time", "fields": {"value": 1, "unit": {"enum": ["pure_loop.TimeUnit", "EPOCH"]}}}'
    ),
    "a record with many fields": lambda: (
        f'{{"record": "pure_loop.Time", "fields": {{{counted(lambda i: f"""{chr(34)}{i}{chr(34)}: 0""")[1:-1]}}}}}'
    ),
    "a kind that is long": lambda: f'{{"{"k" * MEGABYTE}": 0}}',
    "a class that is long": lambda: f'{{"record": "{"k" * MEGABYTE}", "fields": {{}}}}',
    "a name that is long": lambda: f'{{"tensor": "{"k" * MEGABYTE}"}}',
    "a name that stands twice": lambda: f'{{"dict": {{{counted(lambda i: """"x": 0""")[1:-1]}}}}}',
}


def checkpoint() -> bytes:
    """The file of a small State that has trained."""
    state = pl.State.create(small()).count_batch(samples=4).replace(event=pl.Event.BATCH_END)
    text, tensors = write_document(state.replace(position=pl.Event.BATCH_END).remember("x", 0))
    file = Buffer()
    container.write(file, tensors, {METADATA_KEY: text, "format": "pt"})
    return file.getvalue()


class Buffer(io.BytesIO):
    """A file in memory."""


def with_memory(value: str) -> bytes:
    """A checkpoint whose algorithm ``x`` remembers this JSON, with a digest that is right."""
    return rewritten(checkpoint(), ("fields", "algorithm_state", "frozen", "x"), value)


def sealed(header: str, data: bytes = b"") -> bytes:
    """A file with this header and a digest that is right."""
    text = header.encode("utf-8", "surrogatepass")
    before = len(text).to_bytes(8, "little") + text + data
    return before + hashlib.blake2b(before, digest_size=32).digest()


def document_of(content: bytes) -> Any:
    """The description in a checkpoint."""
    header, _ = container.read(io.BytesIO(content), "x")
    return json.loads(header.metadata["pure_loop"])


def described(content: bytes, text: str) -> bytes:
    """A checkpoint with another description, this text, and a digest that is right."""
    header, tensors = container.read(io.BytesIO(content), "x")
    file = Buffer()
    limit = container.MOST_MEMORY  # what a writer refuses, a stranger writes
    container.MOST_MEMORY = 1 << 60  # type: ignore[misc]
    try:
        container.write(file, tensors, {**header.metadata, "pure_loop": text})
    finally:
        container.MOST_MEMORY = limit  # type: ignore[misc]
    return file.getvalue()


def rewritten(content: bytes, path: tuple[Any, ...], text: str) -> bytes:
    """A checkpoint whose description has this JSON, of whatever kind, at a place, and a digest that is right."""
    document = document_of(content)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "HERE"
    return described(content, json.dumps(document).replace('"HERE"', text))


DIGEST = '"pure_loop.blake2b-256":{"dtype":"U8","shape":[32],"data_offsets":[0,32]}'


def entries(entry: Callable[[int], str]) -> bytes:
    return sealed(f"{{{counted(entry)[1:-1]},{DIGEST}}}")


HEADERS: dict[str, Callable[[], bytes]] = {
    "empty tensors": lambda: entries(lambda i: f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "tensors of many dimensions": lambda: entries(
        lambda i: f'"{i}":{{"dtype":"U8","shape":[{"9," * 63}0],"data_offsets":[0,0]}}'
    ),
    "entries that are none": lambda: entries(lambda i: f'"{i}":{{}}'),
    "metadata of many names": lambda: sealed(
        f'{{"__metadata__":{{{counted(lambda i: f"{chr(34)}{i}{chr(34)}:{chr(34) * 2}")[1:-1]}}},{DIGEST}}}'
    ),
    "a header of lists": lambda: sealed(f'{{"x":{repeated("[]")}}}'),
    "a header of deep lists": lambda: sealed(f'{{"x":{repeated("[" * 60 + "]" * 60)}}}'),
    "a description of lists": lambda: sealed(
        f'{{"__metadata__":{{"pure_loop":{json.dumps(repeated("[]"))}}},{DIGEST}}}'
    ),
}


def files() -> Iterator[tuple[str, bytes]]:
    for name, memory in MEMORIES.items():
        yield name, with_memory(memory())
    for name, header in HEADERS.items():
        yield name, header()


def peak() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def costs(function: Callable[[], object]) -> tuple[float, int, str]:
    """CPU seconds, the least of three tries of what takes long; bytes at the peak above those before; and what came."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()

    def outcome() -> str:
        try:
            return type(function()).__name__
        except pl.PureLoopError as error:
            return f"{type(error).__name__} {len(str(error))}"

    came, seconds = cpu_seconds(outcome)
    memory, tries = peak() - before, 1
    while seconds > MOST_SECONDS and tries < 3:  # as in ``cpu_time.within``
        seconds, tries = min(seconds, cpu_seconds(outcome)[1]), tries + 1
    return seconds, memory, came


def report(name: str, folder: Path, path: Path, size: int) -> None:
    model = small()
    ways: dict[str, Callable[[], object]] = {
        "load": lambda: pl.load(path, model=model),
        "weights": lambda: pl.load(path, model=model, weights_only=True),
        "latest": lambda: pl.latest(folder),
    }
    for how, function in ways.items():
        print(json.dumps([name, how, size, *costs(function)]), flush=True)


def of_files(folder: Path) -> None:
    """Each file alone."""
    path = folder / "x.safetensors"
    for name, content in files():
        path.write_bytes(content)
        report(name, folder, path, len(content))
        path.unlink()


def of_folders(folder: Path) -> None:
    """Many in one folder: 90 files of a megabyte, and three of 27."""
    for count, item in ((90, "[]"), (90, "[[0]]"), (3, "[]"), (3, '{"tensor": "params.0.weight"}')):
        content = with_memory(repeated(item, (81 << 20) // count))
        for number in range(count):
            (folder / f"{number}.safetensors").write_bytes(content)
        size, name = count * len(content), f"{count} of {item}"
        del content
        report(name, folder, folder / "0.safetensors", size)
        for path in folder.iterdir():
            path.unlink()


def main(folder: Path, what: str) -> None:
    import numpy  # noqa: F401  # not a part of what a file costs

    pl.save(pl.State.create(small()), folder / "warm.safetensors")
    pl.load(folder / "warm.safetensors", model=small())
    (folder / "warm.safetensors").unlink()
    {"files": of_files, "folders": of_folders}[what](folder)


if __name__ == "__main__":
    import logging

    logging.getLogger("pure_loop").setLevel(logging.CRITICAL)
    main(Path(sys.argv[1]), sys.argv[2])
