"""Folders of this machine and others: saved, loaded, found, kept and resumed from alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import storage
from pure_loop.errors import CheckpointError, CheckpointNotFoundError
from tests.support import streams as sameness
from tests.support.checkpoint_runs import fit, messages, small


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

    def test_what_is_kept(self, anywhere: str) -> None:
        saver = CheckpointSaver(
            *(anywhere,), interval="1ba", filename="ba{batch}.safetensors", keep_last=2, latest=None
        )
        pl.run(fit(small(), callbacks=[saver]))
        names = [f"ba{batch}.safetensors" for batch in (7, 8)]
        assert sorted(storage.storage_of(anywhere).names()) == names
        # Another run there counts those of the first as its own.
        pl.run(fit(small(), max_duration="9ba", autoresume=anywhere, callbacks=[saver]))
        assert sorted(storage.storage_of(anywhere).names()) == [names[1], "ba9.safetensors"]

    @pytest.mark.parametrize("stop", range(1, 9))
    def test_resumes_by_itself(self, anywhere: str, stop: int, trained: pl.State) -> None:
        def options() -> dict[str, Any]:
            return {"autoresume": anywhere, "callbacks": [CheckpointSaver(anywhere, interval="2ba", keep_last=1)]}

        for event, state in fit(small(), **options()):
            if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == stop:
                break
        sameness.assert_same(pl.run(fit(small(), **options())), trained, f"{anywhere}, stopped after batch {stop}")

    def test_damage_is_passed_over(self, anywhere: str, trained: pl.State) -> None:
        pl.save(trained, f"{anywhere}/a.safetensors")
        pl.save(trained, f"{anywhere}/b.safetensors")
        with fsspec.open(f"{anywhere}/b.safetensors", "rb") as file:
            content = bytearray(file.read())
        content[-99] ^= 1
        with fsspec.open(f"{anywhere}/b.safetensors", "wb") as file:
            file.write(content)
        with messages() as said:
            assert pl.latest(anywhere) == f"{anywhere}/a.safetensors"
        assert "b.safetensors" in said[0]

    def test_a_protocol_unknown(self) -> None:
        for call in (pl.latest, CheckpointSaver):
            with pytest.raises(pl.ArgumentError, match="carrier-pigeon://home"):
                call("carrier-pigeon://home")
