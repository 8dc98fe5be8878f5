"""Paths of checkpoints as text, the names of files by a pattern, and those that they have until they are complete."""

from __future__ import annotations

import copy
import itertools
import os
import re
import secrets
import socket
import time
from typing import TypeAlias

from pure_loop._internal.arguments import path_text
from pure_loop._internal.names import COUNTS, OF_RUN, Fields, Pattern, counts_of
from pure_loop.errors import ArgumentError
from pure_loop.time import Timestamp

PathLike: TypeAlias = "str | os.PathLike[str]"

LEFTOVER = ".partial"
"""How the names of files end that are not complete yet."""

LONGEST_NAME = 255
"""The bytes that a name has at most, on nearly all file systems."""

_A_DAY = 86_400.0
_numbers = itertools.count()


def join(folder: PathLike, *names: str) -> str:
    """A path inside a folder, local or remote."""
    text = path_text(folder)
    if "://" not in text:
        return os.path.join(text, *names)
    return text + "/".join(names) if text.endswith("://") else "/".join((text.rstrip("/"), *names))


def same_place(left: PathLike, right: PathLike) -> bool:
    """Whether two paths are of the same folder."""
    a, b = (path_text(item).rstrip("/") for item in (left, right))
    return a == b or ("://" not in a + b and os.path.realpath(a) == os.path.realpath(b))


# In a container a program that is started again has the number of the one that was killed.
_THIS_PROCESS = secrets.token_hex(4)


def leftover(name: str) -> str:
    """A hidden name beside ``name`` with the process that writes there: what it leaves when it is killed is swept."""
    # Names have at most 255 bytes, and this one has more than ``name``.
    beginning = os.fsencode(name)[:_SHOWN_BYTES].decode(errors="ignore")
    return f".{beginning}.{_host()}-{os.getpid()}-{_THIS_PROCESS}-{next(_numbers)}{LEFTOVER}"


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


def is_name(text: str) -> bool:
    """Whether a file of a folder can have this name.

    >>> is_name("latest"), is_name("a/b"), is_name(".."), is_name("x" * 256)
    (True, False, False, False)
    """
    try:
        size = len(os.fsencode(text))
    except UnicodeEncodeError:
        return False
    return 0 < size <= LONGEST_NAME and text not in (".", "..") and "/" not in text and "\0" not in text


class Names:
    """The names of files by a pattern such as ``"ep{epoch}-ba{batch}.safetensors"``.

    Raises:
        ArgumentError: it names something else than counts of a timestamp and fields of a run, or another folder.

    >>> from pure_loop import Timestamp
    >>> names = Names("ep{epoch}-ba{batch:05}.safetensors", ".safetensors")
    >>> names.of(Timestamp(epoch=2, batch=30))
    'ep2-ba00030.safetensors'
    >>> names.match("ep2-ba00030.safetensors"), names.match("mine.safetensors")
    (True, False)
    """

    def __init__(self, pattern: PathLike, suffix: str) -> None:
        self._suffix = suffix
        self._pattern = Pattern(pattern, "filename")
        self._check(self._pattern.of({**_EXAMPLE, **counts_of(Timestamp())}))
        self._check(self._pattern.of({**_EXAMPLE, **_LARGE}), ": with counts of millions the name is")

    def _check(self, name: str, what: str = ": it is") -> None:
        if len(os.fsencode(name)) > LONGEST_NAME:
            raise ArgumentError(
                f"filename={self._pattern.text!r}{what} longer than {LONGEST_NAME} bytes; give a shorter one."
            )
        if not name.endswith(self._suffix) or name.startswith(".") or "\\" in name or not is_name(name):
            raise ArgumentError(
                f"filename={self._pattern.text!r}: a name in the folder that ends with {self._suffix!r}, not hidden, "
                f"of at most {LONGEST_NAME} bytes and without a folder of its own, such as 'ep{{epoch}}-ba{{batch}}"
                f"{self._suffix}'."
            )

    @property
    def fields_of_run(self) -> frozenset[str]:
        """Those of its fields that are not counts."""
        return self._pattern.fields & _EXAMPLE.keys()

    def filled(self, fields: Fields) -> Names:
        """The names of one run: counts are left, and its name, its rank and its start put in."""
        result = copy.copy(self)
        result._pattern = self._pattern.filled({name: fields.get(name) for name in _EXAMPLE})
        result._check(result._pattern.of({**_EXAMPLE, **_LARGE}), ": with counts of millions the name is")
        return result

    def of(self, timestamp: Timestamp) -> str:
        return self._pattern.of(counts_of(timestamp))

    def is_like(self, names: Names) -> bool:
        """Whether both give a name in some run."""
        start, mine, its = Timestamp(), self.filled(_EXAMPLE), names.filled(_EXAMPLE)
        return mine.match(its.of(start)) or its.match(mine.of(start))

    def match(self, name: str) -> bool:
        """Whether the pattern gives such names."""
        return self._pattern.match(name)


_EXAMPLE: dict[str, str | int] = {**dict.fromkeys(OF_RUN, 0), "run_name": "run", "start": 1234567}
_LARGE = dict.fromkeys(COUNTS, 1234567)
