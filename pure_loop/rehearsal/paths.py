"""Whether files can be written to a place: tried, and left as it was."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from pure_loop.checkpoint.storage import try_folder

__all__ = ["try_place"]


def try_place(name: str, place: str) -> str:
    """Try that a file can be written to a folder, or in the place of a file; folders that are made are removed.

    Args:
        name: ``"folder"``, or ``"path"`` of a file.
        place: where; a URL of fsspec is tried if it is a local or an in-memory one, so that no service is called.

    Returns:
        A sentence that says what was found.

    Raises:
        CheckpointWriteError, OSError: no file can be written there; names the place.
    """
    if "://" in place:
        return f"{place} is remote, and was not tried"
    folder = Path(place).absolute()
    if name == "path":
        if os.path.isdir(place):
            raise IsADirectoryError(errno.EISDIR, "there is a folder in the place of the file", place)
        if os.path.exists(place) and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, "the file can't be written to", place)
        folder = folder.parent
    missing = []
    above = folder
    while not os.path.lexists(above) and above != above.parent:
        missing.append(above)
        above = above.parent
    try:
        try_folder(os.fspath(folder))
        if name == "path":
            with contextlib.suppress(FileNotFoundError):
                os.lstat(place)  # a name that is too long
    finally:
        for made in missing:
            with contextlib.suppress(OSError):  # it was not made, or another process has put something there
                made.rmdir()
    return f"{place} can be written to" + (", once it is made" if missing and name == "folder" else "")
