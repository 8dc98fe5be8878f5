"""Folders of this machine and others: saved, loaded, found, kept and resumed from alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import pure_loop as pl
from pure_loop.checkpoint import storage
from pure_loop.errors import CheckpointError, CheckpointNotFoundError
from tests.support import streams as sameness
from tests.support.checkpoint_runs import fit, small


@pytest.fixture(scope="module")
def trained() -> pl.State:
    return pl.run(fit(small()))


@pytest.fixture(params=["local", "file", "memory"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder that isn't there yet: of this machine, and by fsspec."""
    name = f"memory://{tmp_path.name}/run"
    yield {"local": str(tmp_path / "run"), "file": f"file://{tmp_path}/run", "memory": name}[request.param]
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class TestPlaces:
    def test_saved_loaded_and_found(self, anywhere: str, trained: pl.State) -> None:
        assert pl.latest(anywhere) is None
        path = f"{anywhere}/deep/x.safetensors"
        with pytest.raises(CheckpointNotFoundError, match=r"x\.safetensors"):
            pl.load(path, model=small())
        for state in (pl.State.create(small()), trained):  # and one over the other
            pl.save(state, path)
            sameness.assert_same(pl.load(path, model=small()), state, anywhere)
        assert pl.latest(f"{anywhere}/deep") == path
        assert storage.storage_of(f"{anywhere}/deep").names() == ["x.safetensors"]
        with pytest.raises(
            CheckpointNotFoundError, match=rf"deep/y\.safetensors; {anywhere}/deep holds x\.safetensors, and"
        ):
            pl.load(f"{anywhere}/deep/y.safetensors", model=small())
        with pytest.raises(CheckpointNotFoundError, match=f"there is no folder {anywhere}/other either"):
            pl.load(f"{anywhere}/other/x.safetensors", model=small())
        with pytest.raises(CheckpointError, match="folder"):
            pl.load(f"{anywhere}/deep", model=small())

    def test_of_many_files_those_with_names_like_it_are_named(self, tmp_path: Path) -> None:
        for name in (*(f"{letter}.txt" for letter in "abcdefg"), "epoch10.safetensors", ".hidden"):
            (tmp_path / name).touch()
        says = r"holds epoch10\.safetensors, a\.txt, b\.txt, c\.txt, d\.txt and 3 more, and pl\.latest\("
        with pytest.raises(CheckpointNotFoundError, match=says):
            pl.load(tmp_path / "epoch1.safetensors", model=small())
        (tmp_path / "empty").mkdir()
        with pytest.raises(CheckpointNotFoundError, match="empty is empty"):
            pl.load(tmp_path / "empty" / "x.safetensors", model=small())
        with pytest.raises(CheckpointError, match="x"):
            pl.load(tmp_path / "a.txt" / "x.safetensors", model=small())
