"""Files that are not as they were written: each is refused, and the newest good one found."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.checkpoint import container, storage
from pure_loop.errors import CheckpointError
from tests.conftest import THOROUGH
from tests.support import streams as sameness
from tests.support.checkpoint_runs import fit, messages, refused, small, wide


@pytest.fixture(scope="module")
def trained() -> pl.State:
    return pl.run(fit(small()))


class TestDamage:
    """A file that is not what was written is refused, and `latest` takes the newest of the others."""

    @pytest.fixture
    def folder(self, tmp_path: Path, trained: pl.State) -> Path:
        # Nothing is finished in it: it is older than whatever the flip of a byte makes of the newer one.
        pl.save(pl.State.create(small()), tmp_path / "older.safetensors")
        pl.save(trained, tmp_path / "newer.safetensors")
        return tmp_path

    @pytest.fixture
    def content(self, folder: Path) -> bytes:
        return (folder / "newer.safetensors").read_bytes()

    def passed_over(self, folder: Path, damaged: bytes) -> None:
        path = folder / "newer.safetensors"
        path.write_bytes(damaged)
        refused(path)
        with messages() as said:
            assert pl.latest(folder) == str(folder / "older.safetensors")
        assert len(said) == 1
        assert str(path) in said[0]

    def test_cut_or_lengthened_by_a_byte(self, folder: Path, content: bytes) -> None:
        self.passed_over(folder, content[:-1])
        self.passed_over(folder, content + b"\0")

    def test_every_byte_flipped(self, folder: Path) -> None:
        path, model = folder / "newer.safetensors", small()
        pl.save(pl.State.create(model).count_batch(samples=16), path)
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        for index in range(len(content)):
            damaged = bytearray(content)
            damaged[index] ^= 1 << (index * 5 % 8)
            if index % 30 == 0 or THOROUGH:
                self.passed_over(folder, bytes(damaged))
            # The header, where a name that is another may seem to be right, and some of the numbers.
            elif index < header or index % 7 == 0:
                path.write_bytes(damaged)
                with pytest.raises(CheckpointError) as caught:
                    pl.load(path, model=model)
                assert str(path) in str(caught.value)

    def test_a_block_of_zeros(self, folder: Path, content: bytes) -> None:
        """What a file system may leave after the power went: the size is right and the data are not."""
        for start in range(0, len(content) - 64, 512):
            self.passed_over(folder, content[:start] + bytes(64) + content[start + 64 :])

    def test_a_name_of_the_digest_that_is_another(self, folder: Path, content: bytes) -> None:
        """As a plain file it would be whole."""
        name = container.DIGEST.encode()
        self.passed_over(folder, content.replace(name, b"Q" + name[1:]))

    def test_all_are_damaged(self, folder: Path) -> None:
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes()[:-1])
        with messages() as said:
            assert pl.latest(folder) is None
        assert len(said) == 2

    def test_one_that_goes_while_it_is_looked_at(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another process keeps the last few, and removes the others."""
        verify = container.verify

        def gone(file: Any, path: Any) -> Any:
            if "newer" in str(path):
                raise OSError(errno.EIO, "the disk has a hole")
            return verify(file, path)

        monkeypatch.setattr(container, "verify", gone)
        with messages() as said:
            assert pl.latest(folder) == str(folder / "older.safetensors")
        assert "the disk has a hole" in said[0]

    def test_one_that_becomes_another_while_it_is_read(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, trained: pl.State
    ) -> None:
        """What was opened is read, and not what has its name by then."""
        path, opened = folder / "newer.safetensors", storage._Local.open

        def opening(self: Any) -> Any:
            found = opened(self)
            pl.save(pl.State.create(wide()), path)
            return found

        monkeypatch.setattr(storage._Local, "open", opening)
        sameness.assert_same(pl.load(path, model=small()), trained, "the file that was opened")
