"""Names under which something is recorded, and paths with fields of the run, ``"runs/{run_name}/ep{epoch}.pt"``."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import TypeAlias

from pure_loop._internal.arguments import path_text
from pure_loop._text import one_line
from pure_loop.errors import ArgumentError, ArgumentTypeError

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


def check_name(name: object, author: str) -> str:
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


def check_recorded_run_name(name: object, path: object) -> str | None:
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


Fields: TypeAlias = Mapping[str, "str | int | None"]

COUNTS = (
    *("epoch", "batch", "sample", "token", "iteration", "batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
    *("epoch_in_iteration", "batch_in_iteration", "token_in_iteration"),
    *("total_seconds", "epoch_seconds", "batch_seconds"),
)
"""The fields of every path that a timestamp has; of seconds the whole ones."""

OF_RUN = ("run_name", "rank", "start", "local_rank", "world_size", "local_world_size", "node_rank")
"""The other fields of every path: the name of the run, the rank of the process that writes, when ``fit`` was called, in
whole seconds since 1970, and where among all processes this one is, as torchrun says."""

FIELDS = (*COUNTS, *OF_RUN)

# What Composer calls them.
_ELSEWHERE = {f"{unit}_wct": f"{unit}_seconds" for unit in ("total", "epoch", "batch")} | {"timestamp": "start"}


def counts_of(timestamp: object) -> dict[str, int]:
    """What stands for the fields of a path that a timestamp has."""
    return {name: int(getattr(timestamp, name)) for name in COUNTS}


def _instead(name: str) -> str:
    return f", write {{{_ELSEWHERE[name]}}}" if name in _ELSEWHERE else ""


# Digits alone, so that names can be recognised; a width is read before it is computed.
_DIGITS = re.compile(r"(0?[1-9][0-9]?)?d?")


class Pattern:
    """A path with fields of the run in braces; ``{{`` and ``}}`` stand for braces.

    Args:
        path: a text or a path.
        argument: for errors: ``"filename"``.
        fields: the names of fields that are known.

    Attributes:
        text: as it was written, but for a leading ``~``.
        fields: those that it has.

    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: it has a field that is unknown, or braces that are no field.

    >>> pattern = Pattern("runs/{run_name}/ep{epoch:02}.pt", "path")
    >>> pattern.of({"run_name": "calm-river", "epoch": 3})
    'runs/calm-river/ep03.pt'
    >>> pattern.filled({"run_name": "calm-river"}).match("runs/calm-river/ep12.pt")
    True
    """

    def __init__(self, path: object, argument: str, fields: Collection[str] = FIELDS) -> None:
        self.text = path_text(path, argument)
        self._argument = argument
        listed = ", ".join(fields)
        try:
            parts = list(string.Formatter().parse(self.text))
        except ValueError as error:
            raise ArgumentError(
                f"{argument}={self.text!r}: {error}. Braces hold a field of the run; there are {listed}. Write "
                "'{{' and '}}' for braces of the name itself."
            ) from None
        # Literal text, and a field with its format after it, or None.
        self._parts: list[tuple[str, str | None, str]] = []
        for literal, name, spec, conversion in parts:
            if name is not None and name not in fields:
                raise ArgumentError(
                    f"{argument}={self.text!r}: {{{name}}} is no field{_instead(name)}; there are {listed}. Write "
                    "'{{' and '}}' for braces of the name itself."
                )
            allowed = "" if name == "run_name" else _DIGITS
            if name is not None and (conversion or re.fullmatch(allowed, spec or "") is None):
                raise ArgumentError(
                    f"{argument}={self.text!r}: counts are written in digits alone, as {{batch}} or {{batch:06}}, and "
                    "{run_name} as it is."
                )
            self._parts.append((literal, name, spec or ""))
        self.fields = frozenset(name for _, name, _ in self._parts if name is not None)

    def of(self, values: Fields) -> str:
        """The path.

        Raises:
            ArgumentError: a field has no value here.
        """
        missing = sorted(name for name in self.fields if values.get(name) is None)
        if missing:
            raise ArgumentError(
                f"{self._argument}={self.text!r}: {{{missing[0]}}} has no value here. Outside of fit write the path "
                "itself; on other ranks than the first the name of the run has to be passed, fit(run_name=...); and "
                "which machine a rank is on torchrun says."
            )
        return "".join(
            literal if name is None else literal + format(values[name], spec) for literal, name, spec in self._parts
        )

    def filled(self, values: Fields) -> Pattern:
        """The pattern with these fields put in, and the others left."""
        result = Pattern("", self._argument)
        result.text = self.text
        for literal, name, spec in self._parts:
            if name is None or values.get(name) is None:
                result._parts.append((literal, name, spec))
            else:
                result._parts.append((literal + format(values[name], spec), None, ""))
        result.fields = frozenset(name for _, name, _ in result._parts if name is not None)
        return result

    def match(self, path: str) -> bool:
        """Whether the pattern gives such paths."""
        expression = "".join(
            re.escape(literal) + ("" if name is None else "[^/]+" if name == "run_name" else "[0-9]+")
            for literal, name, _ in self._parts
        )
        return re.fullmatch(expression, path) is not None
