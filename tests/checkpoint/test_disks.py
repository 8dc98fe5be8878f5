"""Disks, folders and names that can't be written to, and what killed processes leave: what was there is not lost."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container, paths, storage, tree
from pure_loop.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError
from tests.support.checkpoint_runs import fit, limited, messages, names, place, refused, small, state_at, trained, wide
from tests.support.streams import assert_same


@contextlib.contextmanager
def not_written(folder: Path, number: int | None = None, says: str | None = None) -> Iterator[None]:
    """An error that names the path."""
    with pytest.raises(CheckpointWriteError, match=says) as caught:
        yield
    assert isinstance(caught.value, OSError)
    assert number in (None, caught.value.errno)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("background", [True, False])
def test_files_that_may_not_be_so_large(tmp_path: Path, background: bool) -> None:
    """Of ``save`` and in the middle of a run; where they may be again, the same command resumes."""
    path, run = tmp_path / "x.safetensors", tmp_path / "run"
    for replaced in (False, True):
        if replaced:
            pl.save(state_at(), path)
        with limited(resource.RLIMIT_FSIZE, 60_000), not_written(tmp_path, errno.EFBIG):
            pl.save(pl.State.create(wide()), path)
        assert names(tmp_path) == ["x.safetensors"] * replaced
    assert pl.load(path, model=small()).timestamp.batch == 0

    def limit(event: Event, state: pl.State) -> None:
        # Of four saves two at most are under way.
        if event is Event.BATCH_END and state.timestamp.batch == 5:
            stack.enter_context(limited(resource.RLIMIT_FSIZE, 60_000))

    saver = CheckpointSaver(run, interval="1ba", background=background, keep_last=3)
    with contextlib.ExitStack() as stack, not_written(run, errno.EFBIG):
        pl.run(fit(wide(), callbacks=limit, autoresume=saver))
    assert not names(run, hidden=True)
    newest: Any = pl.latest_path(run)
    assert pl.load(newest, model=wide()).timestamp.batch in (2, 3, 4, 5)
    assert_same(pl.run(fit(wide(), autoresume=saver)), pl.run(fit(wide())), "resumed")


@contextlib.contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Root is another user meanwhile."""
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("kind", ["no permission", "a file in its place", "a file above it"])
def test_a_folder_that_cannot_be_written_to(kind: str) -> None:
    """An error before the first batch, and of ``save`` too; a file that can't be read is refused."""
    with tempfile.TemporaryDirectory() as made:
        run = Path(made) / "run"
        folder = run / "deeper" if kind == "a file above it" else run
        os.chmod(made, 0o755)
        if kind == "no permission":
            pl.save(state_at(), run / "old.safetensors")
            run.chmod(0o555)
        else:
            run.write_text("mine")
        with bound_by_permissions():
            with not_written(folder):
                pl.save(state_at(), folder / "x.safetensors")
            with pytest.raises((CheckpointWriteError, CheckpointError), match=str(folder)) as caught:
                assert not [event for event, _ in fit(callbacks=CheckpointSaver(folder)) if event is Event.BATCH_START]
        assert ".probe" not in str(caught.value)
        if kind != "no permission":
            assert run.read_text() == "mine"
            return
        run.chmod(0o755)
        assert os.listdir(run) == ["old.safetensors"]
        (run / "old.safetensors").chmod(0)
        with bound_by_permissions(), messages() as said:
            refused(run / "old.safetensors")
            assert pl.latest_path(run) is None
        assert str(run / "old.safetensors") in said[0]


def test_an_error_in_the_middle_of_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step of it, and by an error of any kind; a folder of the file's name stays, too."""
    (tmp_path / "folder.safetensors").mkdir()
    with not_written(tmp_path, errno.EISDIR, "a folder of that name"):
        pl.save(state_at(), tmp_path / "folder.safetensors")
    path = tmp_path / "x.safetensors"
    pl.save(state_at(), path)
    before = path.read_bytes()
    state = state_at().remember("x", torch.zeros(2, dtype=torch.complex128))
    for module, name in ((os, "fsync"), (os, "replace"), (container, "_put"), (tree, "raw")):
        for error in (OSError(errno.EIO, "the disk is broken"), KeyboardInterrupt(), MemoryError()):

            def fails(*_: Any, error: BaseException = error) -> Any:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(module, name, fails)
                with pytest.raises(type(error)) as caught:
                    pl.save(state, path)
            assert name == "raw" or not isinstance(error, OSError) or str(path) in str(caught.value)
            assert path.read_bytes() == before
            assert names(tmp_path) == ["folder.safetensors", "x.safetensors"]


def test_swept_are_leftovers_of_processes_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for host in ("machine", "machine.of.many-names", "-"):
        folder = tmp_path / host
        folder.mkdir()
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)

        def of(pid: int, process: str = "0" * 8, host: str = host, folder: Path = folder) -> Path:
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
        swept.append(of(gone.pid))
        swept[-1].unlink()
        swept[-1].symlink_to("nothing")
        for path in kept[2:]:
            path.write_text("mine")
        pl.run(fit(callbacks=[CheckpointSaver(folder)]))
        assert all(path.exists() for path in kept)
        assert not any(os.path.lexists(path) for path in swept)
    # One that is killed while it tries the folder.
    with monkeypatch.context() as patch:
        patch.setattr(paths, "_THIS_PROCESS", "0" * 8)
        patch.setattr(storage._Local, "remove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            pl.run(fit(callbacks=[CheckpointSaver(tmp_path / "run")]))
    assert names(tmp_path / "run", hidden=True)
    pl.run(fit(callbacks=[CheckpointSaver(tmp_path / "run")]))
    assert not names(tmp_path / "run", hidden=True)


@pytest.mark.parametrize("kind", ["local", "file", "memory"])
def test_what_is_not_there_is_told_with_what_is(kind: str) -> None:
    with place(kind) as anywhere:
        assert pl.latest_path(anywhere) is None
        path = f"{anywhere}/deep/epoch10.safetensors"
        for state in (state_at(), trained()):  # and one over the other
            pl.save(state, path)
            assert_same(pl.load(path, model=small()), state, anywhere)
        assert storage.storage_of(f"{anywhere}/deep").names() == ["epoch10.safetensors"]
        for name in (*(f"{letter}.txt" for letter in "abcdefg"), ".hidden"):
            with storage.storage_of(f"{anywhere}/deep/{name}").writing() as file:
                file.write(b"x")
        if kind == "local":
            os.mkdir(f"{anywhere}/empty")
        for missing, says in (
            ("empty/x", "empty is empty" if kind == "local" else "no folder"),
            (
                "deep/epoch1",
                "deep holds epoch10.safetensors, a.txt, b.txt, c.txt, d.txt and 3 more, and pl.latest_path(",
            ),
            ("other/x", f"there is no folder {anywhere}/other either"),
        ):
            with pytest.raises(CheckpointNotFoundError) as caught:
                pl.load(f"{anywhere}/{missing}.safetensors", model=small())
            assert f"{missing}.safetensors; " in str(caught.value)
            assert says in str(caught.value)
        with pytest.raises(CheckpointError, match="folder"):
            pl.load(f"{anywhere}/deep", model=small())


@pytest.mark.parametrize("name", ["a" * 243, "é" * 121 + "a", "字" * 81], ids=["ascii", "two bytes", "three bytes"])
def test_the_longest_names(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / f"{name}.safetensors", tmp_path / "é" / name / name / f"{name}.safetensors"):
        assert len(os.fsencode(path.name)) == 255
        pl.save(state_at(seed=3), path)
        assert pl.load(path, model=small()).seed == 3
    assert pl.latest_path(tmp_path) == str(tmp_path / f"{name}.safetensors")
    assert not names(tmp_path, hidden=True)
    path = tmp_path / "none" / f"{name}a.safetensors"
    with not_written(path, errno.ENAMETOOLONG, "at most 255 bytes on most file systems: give a shorter one"):
        pl.save(state_at(), path)
    assert not list(path.parent.iterdir())
    with pytest.raises(CheckpointError, match="File name too long"):
        pl.load(path, model=small())
    run = tmp_path / "run"
    pl.run(fit(callbacks=[CheckpointSaver(run, filename="a" * 230 + "{batch}.safetensors", latest="b" * 255)]))
    assert os.readlink(run / ("b" * 255)) == "a" * 230 + "8.safetensors"
    assert not names(run, hidden=True)


@pytest.mark.parametrize("path", ["a\0b", "run/\0/x.safetensors", "\ud800.safetensors", "memory://a\0b"], ids=ascii)
def test_a_path_that_none_can_be_is_refused_at_the_call(path: str) -> None:
    for call in (
        lambda: pl.load(path, model=small()),
        lambda: pl.save(state_at(), path),
        lambda: pl.latest_path(path),
        lambda: pl.checkpoint.describe(path),
        lambda: CheckpointSaver(path),
        lambda: fit(load_path=path),
        lambda: fit(autoresume=path),
    ):
        with pytest.raises(pl.errors.ArgumentError, match="which no file name can"):
            call()
