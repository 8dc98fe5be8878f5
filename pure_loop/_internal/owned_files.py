"""Files that grow while a run goes on: one process writes to each, and what can't be written names its file.

A process that writes has a lock on a hidden file beside. The system drops it where the process ends, however it does,
and processes that it forks don't have it. What another run has left is refused by one error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from pure_loop._internal.logs import get_logger
from pure_loop.errors import FileInUseError, FileWriteError, RunExistsError

__all__ = ["naming", "refuse_other_run", "release", "reserve"]

_log = get_logger("pure_loop.files")

# Seconds for which a run waits for another process, such as the job that it was queued again for, to end.
_PATIENCE = 10.0
_POLL = 0.1
# Bytes of a name in that of its lock, which has to be a name, too.
_SHOWN_BYTES = 100
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@attrs.define
class _Lock:
    """The lock of this process on a file.

    Attributes:
        descriptor: of the hidden file.
        process: which holds it; a fork of it doesn't.
        holders: how many of the process's writers.
    """

    descriptor: int
    process: int
    holders: int


# By the path of the hidden file: where one descriptor of a file is closed, the process's lock is gone.
_held: dict[str, _Lock] = {}
# Of the threads of this process, which share its locks: one at a time takes or drops one.
_turn = threading.Lock()


def reserve(path: Path, writer: str) -> None:
    """Wait until no other process writes to a file, and keep others from it until :func:`release`.

    Args:
        path: of the file, in a folder that is there.
        writer: the class that writes, for errors.

    Raises:
        FileInUseError: another process writes to it, and goes on.
        FileWriteError: no file can be made beside it.
    """
    beside = _beside(path)
    with _turn:
        lock = _held.get(beside)
        if lock is not None and lock.process == os.getpid():
            lock.holders += 1
            return
        with naming(path, writer):
            descriptor = _locked(beside)
        if descriptor is not None:
            _held[beside] = _Lock(descriptor, os.getpid(), 1)
            return
    raise FileInUseError(
        errno.EAGAIN,
        f"{writer}: {path} is written by {_holder(beside)}, and two would tear its lines and record every step "
        f"twice. It was waited for {_PATIENCE:g} seconds; end it, or give this run a file of its own",
        os.fspath(path),
    )


def release(path: Path) -> None:
    """Let others write to a file."""
    beside = _beside(path)
    with _turn:
        lock = _held.get(beside)
        if lock is None or lock.process != os.getpid():
            return
        lock.holders -= 1
        if not lock.holders:
            del _held[beside]
            if lock.descriptor >= 0:
                # Before it is let go: a process that waits for it sees that it is gone, and makes a new one.
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                os.close(lock.descriptor)


def _beside(path: Path) -> str:
    beginning = os.fsencode(path.name)[:_SHOWN_BYTES].decode(errors="ignore")
    place = os.path.realpath(path.parent)
    return os.path.join(place, f".{beginning}.{zlib.crc32(os.fsencode(path.name)):08x}.lock")


def _locked(beside: str) -> int | None:
    """A descriptor of the hidden file, locked; -1 where there are no locks; None: another process has the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        return -1
    end = time.monotonic() + _PATIENCE
    while True:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                _log.warning(
                    "%s: this file system has no locks (%s), so two processes could write there", beside, error
                )
                return -1
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > end:
                return None
            time.sleep(_POLL)
            continue
        if _is_there(descriptor, beside):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return descriptor
        os.close(descriptor)  # the process that had it has removed it


def _is_there(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(beside: str) -> str:
    try:
        with open(beside, encoding="utf-8", errors="replace") as file:
            text = file.read(_SHOWN_BYTES)
    except OSError:
        text = ""
    return text if text.isprintable() and text else "another process"


@contextmanager
def naming(path: str | os.PathLike[str], writer: str) -> Iterator[None]:
    """What the system refuses in the block names the file.

    Raises:
        FileWriteError: (an OSError) in the place of an OSError.
    """
    try:
        yield
    except (FileInUseError, FileWriteError):
        raise
    except OSError as error:
        raise not_written(path, writer, error) from error


def not_written(path: str | os.PathLike[str], writer: str, error: OSError) -> FileWriteError:
    """The error that names the file which could not be written."""
    advice = {
        errno.ENOSPC: "The disk is full: make room, or write elsewhere",
        errno.EDQUOT: "Your quota is used up: make room, or write elsewhere",
        errno.EFBIG: "Files may not be so large here",
        errno.EACCES: "Ask for the permission, or write elsewhere",
        errno.EROFS: "Write elsewhere",
    }.get(error.errno or 0, "")
    code, reason = error.errno or errno.EIO, error.strerror or str(error)
    text = f"{writer} can't write {os.fspath(path)}: {reason}" + (f". {advice}" if advice else "")
    return FileWriteError(code, text, os.fspath(path))


def _forget() -> None:
    """In a fork: the locks are the parent's, and so is the thread that may have had its turn."""
    global _turn
    _turn = threading.Lock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


_SHOWN = 3


def refuse_other_run(
    writer: str,
    place: str | os.PathLike[str],
    names: Sequence[str] = (),
    *,
    resume: str = "",
    own: str = "",
    why: str = "",
) -> None:
    """Refuse to replace what another run has left.

    Args:
        writer: the class that writes, ``"CheckpointSaver"``.
        place: its folder, or its file.
        names: of the files in the folder that are in the way; a file is in its own way.
        resume: how that run is resumed, ``'fit(..., autoresume="runs/1")'``; "": it can't be from here.
        own: a place for each run, such as ``"runs/{run_name}"``; "": made of ``place``.
        why: what tells the two runs apart.

    Raises:
        RunExistsError: always.
    """
    path = os.fspath(place)
    names = () if list(names) == [os.path.basename(path)] else names
    left = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    folder, dot, suffix = path.rpartition(".") if not names and "." in os.path.basename(path) else (path, "", "")
    own = own or (f"{folder}-{{run_name}}{dot}{suffix}" if not names else f"{path.rstrip('/')}/{{run_name}}")
    steps = [
        f"to replace it, {writer}(..., overwrite=True)",
        f"to keep both, a place for each run, such as {own!r}",
        *([f"to resume it, {resume}"] if resume else []),
    ]
    raise RunExistsError(
        f"{writer}: {path} holds {f'{left} of ' if left else 'what was left by '}another run{why}, which this run "
        f"would replace. Write, {'; '.join(steps)}."
    )
