"""Where checkpoints lie: folders of this machine, and others by fsspec (``"s3://bucket/run"``, ``"memory://run"``).

A file appears under its name whole or not at all: it is written beside, flushed to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from pure_loop._internal.arguments import path_text
from pure_loop.checkpoint.paths import LEFTOVER, PathLike, is_abandoned, join, leftover
from pure_loop.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    MissingExtraError,
)


@attrs.frozen
class Storage(ABC):
    """One path: a file or a folder. Where a place has no links, and nothing to sweep or flush, that does nothing.

    Attributes:
        path: as text.
    """

    path: str

    @abstractmethod
    def open(self) -> BinaryIO:
        """The file, to be read.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: it can't be opened.
        """

    @abstractmethod
    def size(self) -> int:
        """Of the file, in bytes, without opening it."""

    def stamp(self) -> object:
        """What differs once another file has taken this name; None where there is no file, or that can't be told."""
        return None

    @abstractmethod
    def writing(self) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file that takes this name when the ``with`` block ends; after an error it is as if nothing had been.

        Raises:
            CheckpointWriteError: it can't be written.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """What is in the folder; nothing where there is none.

        Raises:
            CheckpointError: it can't be listed.
        """

    @abstractmethod
    def is_folder(self) -> bool: ...

    @abstractmethod
    def exists(self) -> bool: ...

    @abstractmethod
    def remove(self) -> None:
        """Remove the file, or the folder with all its files; nothing where there is none."""

    def link_to(self, name: str) -> None:
        """Make this path a link to a file beside it.

        Raises:
            CheckpointWriteError: it can't be made.
        """
        return

    def is_link(self) -> bool:
        return False

    def sweep(self) -> None:
        """Remove from the folder what writers that were killed have left there."""
        return

    def flush(self) -> None:
        """See to it that the folder itself survives a loss of power."""
        return

    def leads_out(self, name: str) -> bool:
        """Whether a name in the folder is a link to elsewhere."""
        return False


def storage_of(path: PathLike) -> Storage:
    """The place of a path.

    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: it has a protocol that fsspec doesn't know.
        MissingExtraError: it has a protocol, and fsspec is not installed.
    """
    text = path_text(path)
    if not text:
        raise ArgumentError("the path is empty: write the name of a file or a folder.")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the path {text!r} holds {text[error.start]!r}, which no file name can.") from error
    if "\0" in text:
        raise ArgumentError(f"the path {text!r} holds a NUL character, which no file name can.")
    if "://" not in text:
        return _Local(text)
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError(
            f"{text} is a remote path, which fsspec opens, and it is not installed: pip install 'pure_loop[remote]'."
        ) from error
    try:
        system, inside = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise MissingExtraError(f"{text} needs another package beside fsspec: {error}") from error
    except ValueError as error:
        raise ArgumentError(f"{text} is no path that fsspec can open: {error}.") from error
    return _Remote(text, system, inside)


def _not_found(where: Storage) -> CheckpointNotFoundError:
    folder, _, name = where.path.rpartition("/" if "://" in where.path else os.sep)
    message = f"there is no checkpoint at {where.path}{_instead(folder or os.curdir, name)}"
    return CheckpointNotFoundError(errno.ENOENT, message, where.path)


def _instead(folder: str, name: str) -> str:
    """What the folder holds in place of a file, the names that are most like it first."""
    where = "the working directory" if folder == os.curdir else folder
    try:
        beside = storage_of(folder)
        names = sorted(item for item in beside.names() if not item.startswith("."))
        if not names:
            return f"; {where} is empty" if beside.exists() else f"; there is no folder {folder} either"
    except (CheckpointError, OSError):  # it can't be listed, or is a file
        return ""
    import difflib

    like = difflib.get_close_matches(name, names, n=_SHOWN)
    first = [*like, *(item for item in names if item not in like)][:_SHOWN]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return f"; {where} holds {', '.join(first)}{more}, and pl.latest_path({folder!r}) finds its newest checkpoint"


_SHOWN = 5


# A file system that compresses gives a checkpoint fewer blocks, too, but not so few.
_LARGE, _LEAST_SHARE = 256 << 20, 0.01


def _refuse_sparse(path: str, status: os.stat_result) -> None:
    """Refuse a large file that is nearly nothing but a hole: a few bytes would cost the memory of all that it claims.

    Raises:
        CheckpointError: it takes less than a hundredth of its size on the disk.
    """
    blocks = getattr(status, "st_blocks", None)  # which not all systems count
    if blocks is not None and status.st_size > _LARGE and blocks * 512 < _LEAST_SHARE * status.st_size:
        raise CheckpointError(
            f"{path} can't be read: it is sparse, of {status.st_size:,} bytes {blocks * 512:,} are on the disk, and a "
            "checkpoint has its numbers there. If it was copied so, copy it again."
        )


@attrs.frozen
class _Local(Storage):
    def open(self) -> BinaryIO:
        try:
            # Opening a pipe waits for its writer, and reading from a terminal for its user.
            status = os.stat(self.path)
            mode = status.st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
                raise CheckpointError(f"{self.path} can't be read: it is {kind}.")
            _refuse_sparse(self.path, status)
            return open(self.path, "rb", buffering=0)
        except FileNotFoundError as error:
            raise _not_found(self) from error
        except OSError as error:
            raise not_read(self.path, error) from error

    def size(self) -> int:
        return os.stat(self.path).st_size

    def stamp(self) -> object:
        try:
            status = os.lstat(self.path)
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        target = Path(self.path)
        if not target.name:  # "." and such
            raise _not_written(self.path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
        beside = target.with_name(leftover(target.name))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.lstat(target)  # a name that is too long is refused before the file is written
            try:
                with open(beside, "xb", buffering=0) as file:
                    yield file
                    os.fsync(file.fileno())
                os.replace(beside, target)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(beside)
                raise
            _flush_folder(target.parent)
        except OSError as error:
            raise _not_written(self.path, error) from error

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise not_read(self.path, error) from error

    def is_folder(self) -> bool:
        return os.path.isdir(self.path)

    def exists(self) -> bool:
        return os.path.exists(self.path)

    def remove(self) -> None:
        import shutil

        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(self.path) and not os.path.islink(self.path):
                shutil.rmtree(self.path)
            else:
                os.unlink(self.path)

    def link_to(self, name: str) -> None:
        target = Path(self.path)
        beside = target.with_name(leftover(target.name))
        try:
            os.symlink(name, beside)
            os.replace(beside, target)
        except OSError as error:
            raise _not_written(self.path, error) from error

    def is_link(self) -> bool:
        return os.path.islink(self.path)

    def sweep(self) -> None:
        for name in self.names():
            path = os.path.join(self.path, name)
            if name.startswith(".") and name.endswith(LEFTOVER) and is_abandoned(name, path):
                _Local(path).remove()

    def flush(self) -> None:
        _flush_folder(Path(self.path).absolute().parent)

    def leads_out(self, name: str) -> bool:
        return os.path.realpath(os.path.join(self.path, name)) != os.path.join(os.path.realpath(self.path), name)


def _flush_folder(folder: Path) -> None:
    """Flush a rename to the disk."""
    if os.name == "nt":
        return  # where folders can't be opened
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def not_read(path: str, error: OSError) -> CheckpointError:
    """What is raised where the system can't read a file or a folder that is there."""
    return CheckpointError(f"{path} can't be read: {error.strerror or error}.")


def try_folder(folder: PathLike) -> None:
    """See that files can be written to a folder: one is, and removed.

    Raises:
        CheckpointWriteError: none can; names the folder.
    """
    probe = storage_of(join(folder, leftover("probe")))
    try:
        with probe.writing() as file:
            file.write(b"?")
        probe.remove()
    except CheckpointWriteError as error:
        code = error.errno or errno.EIO
        path = path_text(folder)
        text = f"no file can be written to the folder: {os.strerror(code)}. Pass another one, or change its permissions"
        raise CheckpointWriteError(code, text, path) from error


def _not_written(path: str, error: OSError) -> CheckpointWriteError:
    advice = {
        errno.ENOSPC: "The disk is full: make room, or keep fewer checkpoints (keep_last=3).",
        errno.EDQUOT: "Your quota is used up: make room, or keep fewer checkpoints (keep_last=3).",
        errno.EFBIG: "Files may not be so large here.",
        errno.ENAMETOOLONG: "Names have at most 255 bytes on most file systems: give a shorter one.",
        errno.EACCES: "The folder can't be written to: give another, or ask for the permission.",
        errno.EPERM: "The folder can't be written to: give another, or ask for the permission.",
        errno.EROFS: "The folder can't be written to: give another.",
        errno.EISDIR: "There is a folder of that name: give the name of a file.",
        errno.ENOTDIR: "A part of the path is a file, not a folder.",
        errno.EEXIST: "A part of the path is a file, not a folder.",
    }.get(error.errno or 0, "")
    reason = error.strerror or str(error)
    return CheckpointWriteError(
        error.errno or errno.EIO,
        f"checkpoint {path} was not written: {reason}. {advice} What was there before is as it was".replace("  ", " "),
        path,
    )


@attrs.frozen
class _Remote(Storage):
    system: Any
    inside: str

    def open(self) -> BinaryIO:
        try:
            file: BinaryIO = self.system.open(self.inside, "rb")
            return file
        except FileNotFoundError as error:
            raise _not_found(self) from error
        except OSError as error:
            raise not_read(self.path, error) from error

    def size(self) -> int:
        return int(self.system.size(self.inside))

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        folder, _, name = self.inside.rpartition("/")
        beside = f"{folder}/{leftover(name)}"
        try:
            self.system.makedirs(folder, exist_ok=True)
            try:
                with self.system.open(beside, "wb") as file:
                    yield file
                self.system.mv(beside, self.inside)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    self.system.rm(beside)
                raise
        except OSError as error:
            raise _not_written(self.path, error) from error

    def names(self) -> list[str]:
        self.system.invalidate_cache()
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in self.system.ls(self.inside, detail=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise not_read(self.path, error) from error

    def is_folder(self) -> bool:
        return bool(self.system.isdir(self.inside))

    def exists(self) -> bool:
        self.system.invalidate_cache()
        return bool(self.system.exists(self.inside))

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.system.rm(self.inside, recursive=True)
