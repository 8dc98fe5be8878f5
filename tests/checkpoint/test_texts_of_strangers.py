"""Texts of a file that a stranger wrote are shortened and escaped in errors and logs, wherever they stand in it.

Tried: each text and each key of the description of a checkpoint, one after the other, at each door: ``pl.load`` without
and with a model, weights alone, ``fit(load_path=)``, ``fit(autoresume=)``, ``pl.latest`` and ``pl.best``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from tests.support.checkpoint_runs import fit, messages, small
from tests.support.hostile import described, document_of

NASTY = "a\nWARNING all is well\r\x1b[2J\u2028" + "x" * 3000


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """The path of each text, and of each key of a mapping."""
    if isinstance(value, str):
        yield path, False
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(value, dict):
            yield (*path, key), True
        yield from places(item, (*path, key))


def changed(document: Any, path: tuple[Any, ...], is_key: bool) -> Any:
    result = copy.deepcopy(document)
    place = result
    for key in path[:-1]:
        place = place[key]
    if is_key:
        place[NASTY] = place.pop(path[-1])
    else:
        place[path[-1]] = NASTY
    return result


DOORS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: pl.load(path),
    "load with a model": lambda path: pl.load(path, model=small()),
    "load of weights": lambda path: pl.load(path, model=small(), weights_only=True),
    "load_path": lambda path: pl.run(fit(small(), load_path=path, max_duration="1ba")),
    "autoresume": lambda path: pl.run(fit(small(), autoresume=path.parent, max_duration="1ba")),
    "latest": lambda path: pl.latest(path.parent),
    "best": lambda path: pl.best(path.parent),
}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "ep0-ba4.safetensors"
    state = pl.run(fit(small(), max_duration="4ba"))
    pl.save(state, path, notes={"who": "me"})
    return path.read_bytes()


# Slow: each text in each place of a file, once more.
@pytest.mark.parametrize("door", ["load with a model", pytest.param("autoresume", marks=pytest.mark.slow)])
def test_no_text_of_a_file_is_said_as_it_is(tmp_path: Path, content: bytes, door: str) -> None:
    document, path = document_of(content), tmp_path / "ep0-ba4.safetensors"
    refused = 0
    for place, is_key in places(document):
        for other in tmp_path.iterdir():
            other.unlink()
        path.write_bytes(described(content, json.dumps(changed(document, place, is_key))))
        said: list[str] = []
        with messages() as logged:
            try:
                DOORS[door](path)
            except pl.PureLoopError as error:
                refused += 1
                said = [str(error), *getattr(error, "__notes__", ())]
        for text in (*said, *logged):
            assert "\nWARNING" not in text, (place, text[:300])
            assert "x" * 400 not in text, (place, text[:300])
            assert len(text) < 3000, (place, text[:300])
            assert all(line.isprintable() for line in text.split("\n")), place
    assert refused or door in ("latest", "best")
