"""Paths of checkpoints as text, and the names that files have until they are complete."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
import time
from typing import TypeAlias

__all__ = ["LEFTOVER", "PathLike", "is_abandoned", "join", "leftover", "same_place"]

PathLike: TypeAlias = "str | os.PathLike[str]"

LEFTOVER = ".partial"
"""How the names of files end that are not complete yet."""

_A_DAY = 86_400.0
_numbers = itertools.count()


def join(folder: PathLike, *names: str) -> str:
    """A path inside a folder, local or remote."""
    text = os.fspath(folder)
    if "://" not in text:
        return os.path.join(text, *names)
    return text + "/".join(names) if text.endswith("://") else "/".join((text.rstrip("/"), *names))


def same_place(one: PathLike, other: PathLike) -> bool:
    """Whether two paths are of the same folder."""
    a, b = (os.fspath(item).rstrip("/") for item in (one, other))
    return a == b or ("://" not in a + b and os.path.realpath(a) == os.path.realpath(b))


# In a container a program that is started again has the number of the one that was killed.
_THIS_PROCESS = secrets.token_hex(4)


def leftover(name: str) -> str:
    """A hidden name beside ``name`` with the process that writes there: what it leaves when it is killed is swept."""
    # Names have at most 255 bytes, and this one has more than ``name``.
    shown = os.fsencode(name)[:_SHOWN_BYTES].decode(errors="ignore")
    return f".{shown}.{_host()}-{os.getpid()}-{_THIS_PROCESS}-{next(_numbers)}{LEFTOVER}"


_SHOWN_BYTES = 100


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())


_WRITER = re.compile(r"\..*\.(?P<host>[A-Za-z0-9_-]+)-(?P<pid>[0-9]{1,9})-(?P<process>[0-9a-f]{8})-[0-9]+")


def is_abandoned(name: str, path: str) -> bool:
    """Whether a file that is not complete is of a writer that was killed."""
    writer = _WRITER.fullmatch(name.removesuffix(LEFTOVER))
    if writer is None:
        return False  # no name of ours
    try:
        # Of a link itself: what it leads to may be gone, or older.
        age = time.time() - os.lstat(path).st_mtime
        if age > _A_DAY:
            return True
        if writer["host"] != _host():
            return False
        if int(writer["pid"]) == os.getpid():
            return writer["process"] != _THIS_PROCESS
        os.kill(int(writer["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # gone by now, or another user's process
        return False
    return False
