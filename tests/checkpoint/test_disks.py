"""Disks and folders that can't be written to, and what killed processes leave: nothing that was there is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container, paths, storage
from pure_loop.errors import CheckpointError, CheckpointWriteError
from tests.support import streams as sameness
from tests.support.checkpoint_runs import fit, hidden, limited, messages, refused, small, wide


class TestDisks:
    """What can't be written is an error that names the path, and what was there before is as it was."""

    def check(self, caught: Any, folder: Path, number: int) -> None:
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == number
        assert str(folder) in str(caught.value)

    def test_a_folder_that_can_not_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        folder = tmp_path / "file" / "run"
        message = r"no file can be written to the folder: .*\. Pass another"
        with pytest.raises(CheckpointWriteError, match=message) as caught:
            pl.run(fit(small(), callbacks=[CheckpointSaver(folder)]))
        self.check(caught, folder, errno.ENOTDIR)
        assert ".probe" not in str(caught.value)

    @pytest.mark.parametrize("replacing", [True, False])
    def test_a_file_that_may_not_be_so_large(self, tmp_path: Path, replacing: bool) -> None:
        path = tmp_path / "x.safetensors"
        if replacing:
            pl.save(pl.State.create(small()), path)
        before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
        with limited(resource.RLIMIT_FSIZE, 60_000), pytest.raises(CheckpointWriteError) as caught:
            pl.save(pl.State.create(wide()), path)
        self.check(caught, tmp_path, errno.EFBIG)
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before

    @pytest.mark.parametrize("background", [True, False])
    def test_a_disk_that_fills(self, tmp_path: Path, background: bool) -> None:
        """A run on a disk with room for a few; when there is room again, the same command resumes."""
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1100k", "tmpfs", str(disk)]
        try:
            mounted = subprocess.run(mount, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no program to mount a small disk with")
        if mounted.returncode:
            pytest.skip(f"no small disk can be mounted: {mounted.stderr.strip()}")
        try:
            wanted = pl.run(fit(wide()))
            saver = CheckpointSaver(disk, interval="1ba", background=background)
            with pytest.raises(CheckpointWriteError, match="The disk is full") as caught:
                pl.run(fit(wide(), callbacks=[saver]))
            self.check(caught, disk, errno.ENOSPC)
            assert not hidden(disk)
            with messages() as said:
                newest = pl.latest(disk)
            assert not said
            assert newest is not None
            for each in disk.glob("ep*"):
                if str(each) != newest:
                    each.unlink()
            saver = CheckpointSaver(disk, interval="1ba", background=background, keep_last=1)
            sameness.assert_same(pl.run(fit(wide(), callbacks=[saver], autoresume=disk)), wanted, "with room again")
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def test_a_limit_in_the_middle_of_a_run(self, tmp_path: Path) -> None:
        saver = CheckpointSaver(tmp_path, interval="1ba")
        with contextlib.ExitStack() as stack:

            def limit(event: Event, state: pl.State) -> None:
                # Of four saves two at most are under way.
                if event is Event.BATCH_END and state.timestamp.batch == 5:
                    stack.enter_context(limited(resource.RLIMIT_FSIZE, 60_000))

            with pytest.raises(CheckpointWriteError) as caught:
                pl.run(fit(wide(), callbacks=[limit, saver]))
        self.check(caught, tmp_path, errno.EFBIG)
        assert not hidden(tmp_path)
        newest = pl.latest(tmp_path)
        assert newest is not None
        assert pl.load(newest, model=wide()).timestamp.batch in (2, 3, 4, 5)

    @pytest.mark.parametrize("kind", ["no permission", "a file in its place", "a file above it"])
    def test_a_folder_that_cannot_be_written_to(self, kind: str) -> None:
        """An error before the first batch, and of `save` too."""
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "run"
            if kind == "no permission":
                os.chmod(made, 0o755)
                folder.mkdir()
                pl.save(pl.State.create(small()), folder / "old.safetensors")
                folder.chmod(0o555)
            elif kind == "a file in its place":
                folder.write_text("mine")
            else:
                folder.write_text("mine")
                folder = folder / "deeper"
            user = os.geteuid()
            events: list[Event] = []
            try:
                if user == 0:
                    os.seteuid(65534)  # a user that permissions bind
                with pytest.raises(CheckpointWriteError, match=str(folder)):
                    pl.save(pl.State.create(small()), folder / "x.safetensors")
                with pytest.raises((CheckpointWriteError, CheckpointError), match=str(folder)):
                    events.extend(event for event, _ in fit(small(), callbacks=[CheckpointSaver(folder)]))
            finally:
                os.seteuid(user)
            assert Event.FIT_START not in events
            assert Event.BATCH_START not in events
            if kind == "no permission":
                folder.chmod(0o755)
                assert os.listdir(folder) == ["old.safetensors"]
                assert pl.latest(folder) == str(folder / "old.safetensors")
            else:
                assert (Path(made) / "run").read_text() == "mine"

    @pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users")
    def test_a_file_that_cannot_be_read(self) -> None:
        with tempfile.TemporaryDirectory() as made:
            os.chmod(made, 0o755)
            path = Path(made) / "x.safetensors"
            pl.save(pl.State.create(small()), path)
            path.chmod(0)
            user = os.geteuid()
            try:
                if user == 0:
                    os.seteuid(65534)
                refused(path)
                with messages() as said:
                    assert pl.latest(made) is None
                assert str(path) in said[0]
            finally:
                os.seteuid(user)

    def test_a_folder_of_the_name_of_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        path.mkdir()
        (path / "mine").write_text("mine")
        with pytest.raises(CheckpointWriteError, match=r"x\.safetensors"):
            pl.save(pl.State.create(small()), path)
        assert os.listdir(tmp_path) == ["x.safetensors"]
        assert (path / "mine").read_text() == "mine"

    def test_an_error_in_the_middle_of_writing_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At each step of it, and by an error of any kind."""
        path = tmp_path / "x.safetensors"
        pl.save(pl.State.create(small()), path)
        before = path.read_bytes()
        for module, name in ((os, "fsync"), (os, "replace"), (container, "_put"), (container, "raw")):
            for error in (OSError(errno.EIO, "the disk is broken"), KeyboardInterrupt(), MemoryError()):

                def fails(*_: Any, error: BaseException = error) -> Any:
                    raise error

                state = pl.State.create(small()).remember("x", torch.zeros(2, dtype=torch.complex128))
                with monkeypatch.context() as patch:
                    patch.setattr(module, name, fails)
                    if name == "raw":
                        patch.setattr("pure_loop.checkpoint.tree.raw", fails)
                    with pytest.raises(type(error)) as caught:
                        pl.save(state, path)
                assert name == "raw" or not isinstance(error, OSError) or str(path) in str(caught.value)
                assert path.read_bytes() == before
                assert os.listdir(tmp_path) == ["x.safetensors"]


class TestLeftovers:
    """What a killed process leaves is swept by the next run there, and nothing else is."""

    def test_swept_are_those_of_processes_that_are_gone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for host in ("machine", "machine.of.many-names", "-"):
            folder = tmp_path / host
            folder.mkdir()
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            gone = subprocess.Popen([sys.executable, "-c", ""])
            gone.wait()

            def of(pid: int, process: str = "0" * 8, host: str = host) -> Path:
                with monkeypatch.context() as patch:
                    patch.setattr(socket, "gethostname", lambda: host)
                    patch.setattr(os, "getpid", lambda: pid)
                    patch.setattr(paths, "_THIS_PROCESS", process)
                    path = folder / paths.leftover("ep0-ba3.safetensors")
                path.write_text("half")
                return path

            kept = [of(os.getppid()), of(gone.pid, host="another"), folder / ".mine", folder / ".mine.partial"]
            kept += [of(os.getpid(), process=paths._THIS_PROCESS), folder / "..x-99999999999999999999-0.partial"]
            # Started again in a container, a program has the number that the killed one had.
            swept = [of(gone.pid), of(os.getpid()), of(gone.pid, host="another"), of(os.getppid())]
            for path in swept[2:]:
                os.utime(path, (0, 0))
            link = of(gone.pid)
            link.unlink()
            link.symlink_to("nothing")
            for path in kept[2:]:
                path.write_text("mine")
            pl.run(fit(small(), callbacks=[CheckpointSaver(folder)]))
            assert [path.exists() for path in kept] == [True] * len(kept)
            assert [path.exists() for path in swept] == [False] * len(swept)
            assert not link.is_symlink()

    def test_one_that_is_killed_while_it_tries_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(paths, "_THIS_PROCESS", "0" * 8)
            patch.setattr(storage._Local, "remove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                pl.run(fit(small(), callbacks=[CheckpointSaver(tmp_path)]))
        assert hidden(tmp_path)
        pl.run(fit(small(), callbacks=[CheckpointSaver(tmp_path)]))
        assert not hidden(tmp_path)
