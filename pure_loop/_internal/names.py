"""Names under which something is recorded."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from pure_loop._text import one_line
from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["check_name", "check_recorded_run_name", "check_run_name", "digest_of", "printable"]

_LONGEST_RUN_NAME = 128


def digest_of(name: str) -> str:
    """Ten hexadecimal digits, by which a name that has to change differs from others."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()


def printable(name: str) -> str:
    """A name in one line that every encoding has: line ends, control characters and lone surrogates are escaped.

    >>> printable("val/精度"), printable("a\\nb")
    ('val/精度', 'a\\\\nb~8dfcd2050f')
    """
    return name if name.isprintable() else f"{one_line(name)}~{digest_of(name)}"


def check_name(name: Any, author: str) -> str:
    """A name as loggers are given it.

    Raises:
        ArgumentTypeError: it is no text.
        ArgumentError: it is empty.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"{author} records something under the name {name!r} of type {type(name).__name__}: a name is a text."
        )
    if not name.strip():
        raise ArgumentError(f"{author} records something under the name {name!r}, and a name is not empty.")
    return printable(name)


def check_run_name(name: str) -> str:
    """The name of a run, after which loggers name files and folders.

    Raises:
        ArgumentError: a folder can't be named so, or the name leads out of one.
    """
    wrong = next((character for character in name if character in '/\\:*?"<>|' or not character.isprintable()), None)
    if wrong is not None:
        raise ArgumentError(
            f"run_name={name[:_LONGEST_RUN_NAME]!r} holds {wrong!r}: loggers name files and folders so, which not all "
            'systems allow; write letters, digits, "-", "_" and ".", such as "baseline-1".'
        )
    if not name.strip() or name != name.strip() or name.startswith("."):
        raise ArgumentError(
            f"run_name={name!r}: a name is not empty, and begins with no dot and no space; write one such as "
            '"baseline-1", or None for a new name.'
        )
    if len(name.encode()) > _LONGEST_RUN_NAME:
        raise ArgumentError(
            f"run_name has {len(name.encode())} bytes, and names of files have room for {_LONGEST_RUN_NAME}."
        )
    return name


def check_recorded_run_name(name: Any, path: object) -> str | None:
    """The name of a run that a file has, checked as one that is passed; None where it has none.

    Raises:
        ArgumentError: it is no name that a run of this library has.
    """
    if not isinstance(name, str) or not name:
        return None
    try:
        return check_run_name(name)
    except ArgumentError as error:
        raise ArgumentError(
            f"{path} was changed, or is not of this library: it names its run, and {error} Remove the file, or record "
            "in another place."
        ) from None
