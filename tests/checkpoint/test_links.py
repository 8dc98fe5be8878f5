"""Retention removes nothing outside of the run's folder: of a link the link alone goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure_loop._internal.names import Pattern
from pure_loop.checkpoint.index import INDEX, remove
from pure_loop.checkpoint.paths import Names
from pure_loop.checkpoint.run_folder import Links, Retention, RunFolder, Saved

KINDS = ("file", "sharded", "file that was moved", "sharded that was moved", "index that was moved", "dead link")


def content(folder: Path) -> dict[str, bytes | str]:
    """What is in a folder, by its path inside; links by where they lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def make(run: Path, kind: str, batch: int) -> str:
    """A checkpoint of a batch in the run's folder; its name."""
    name = f"ba{batch}.safetensors" if kind in ("file", "file that was moved", "dead link") else f"ba{batch}.sharded"
    path = run / name
    if name.endswith(".sharded"):
        path.mkdir()
        path.joinpath(INDEX).write_text(f"index {batch}")
        path.joinpath("part").write_text(f"part {batch}")
    else:
        path.write_text(f"file {batch}")
    return name


def move(run: Path, archive: Path, kind: str, name: str) -> None:
    """Move what the kind says to the archive, and link to it."""
    path = run / name
    if kind == "index that was moved":
        path = path / INDEX
    if "moved" in kind:
        target = archive / f"{name}-{path.name}"
        path.rename(target)
        path.symlink_to(target)
    elif kind == "dead link":
        path.unlink()
        path.symlink_to(archive / "nothing")


def run_folder(path: Path, last: int) -> RunFolder:
    names = Names("ba{batch}.safetensors", ".safetensors")
    folder = RunFolder(Pattern(path, "folder"), names, Retention(last), Links("latest"))
    folder.settle({})
    return folder


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), st.integers(1, 3))
def test_what_links_lead_to_stays(kinds: list[str], last: int) -> None:
    """Of all kinds of checkpoints that expire, moved or not: the archive is as it was, to the byte.

    Neighbours: a link to a file, to a folder, to nothing; a folder of which the index alone is a link; ``latest``.
    """
    with tempfile.TemporaryDirectory() as place:
        run, archive = Path(place, "run"), Path(place, "archive")
        run.mkdir()
        archive.mkdir()
        folder = run_folder(run, last)
        names = []
        for batch, kind in enumerate(kinds):
            name = make(run, kind, batch)
            names.append(name)
            folder.add(Saved(name, batch, None))
            move(run, archive, kind, name)
        before = content(archive)
        for batch in range(len(kinds), len(kinds) + last):
            path = run / f"ba{batch}.safetensors"
            path.write_text("new")
            folder.add(Saved(path.name, batch, None))
        assert content(archive) == before
        # What was the run's own, and is no link, is removed.
        assert not any((run / name).exists() for name, kind in zip(names, kinds, strict=True) if kind == "file")


@pytest.mark.parametrize("name", ["ba1.safetensors", "ba1.sharded"])
def test_a_link_is_removed_itself(tmp_path: Path, name: str) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    run.mkdir()
    archive.mkdir()
    make(run, "file" if name.endswith("safetensors") else "sharded", 1)
    (run / name).rename(archive / name)
    (run / name).symlink_to(archive / name)
    before = content(archive)
    remove(str(run / name))
    assert not (run / name).is_symlink()
    assert content(archive) == before
