"""Files of loggers: destinations that are files, names of files and of metrics, and what a run has to remember.

Two names stay two, and a name becomes the same one each time: one that has to change ends with a digest of what it was.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from posixpath import normpath
from typing import Any, BinaryIO, ClassVar

from pure_loop._internal.arguments import path_text
from pure_loop._internal.names import Pattern, check_recorded_run_name, digest_of
from pure_loop._internal.owned_files import naming, release, reserve
from pure_loop.cadence import CadenceLike
from pure_loop.errors import ArgumentError
from pure_loop.loggers._destination import Destination, Names


def read_path(path: str | os.PathLike[str], name: str) -> Path:
    """
    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: it is empty, holds a NUL character, or is a URL.
    """
    text = path_text(path, name)
    if not text or "\0" in text:
        raise ArgumentError(f"{name}={text!r} is no path that a file can have.")
    if "://" in text:
        raise ArgumentError(
            f"{name}={text!r} is a URL, and what is written are local files: give a local path; "
            "pl.loggers.RemoteUploader(url) uploads what loggers write."
        )
    return Path(text)


def read_file_path(path: str | os.PathLike[str], name: str, file_name: str = "metrics") -> Path:
    """The path of a file, which need not be there yet.

    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: no file can have it, or it is that of a folder.
    """
    file = read_path(path, name)
    if file.name in ("", "..") or os.path.isdir(file):
        example = os.fspath(file / file_name)
        raise ArgumentError(f"{name}={os.fspath(path)!r} is a folder: write the path of a file, such as {example!r}.")
    return file


def make_folder(folder: Path, logger: str) -> None:
    """Make the folder, and try that a file can be written there.

    Raises:
        OSError: it can't; names the logger and the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(
            error.errno,
            f"{logger} can't write to the folder: {reason}. Pass another folder, or change its permissions",
            str(folder),
        ) from error


def replace_file(path: Path, text: str, writer: str = "a logger") -> None:
    """Write a file that appears under its name whole or not at all."""
    beside = path.with_name(f".{path.name}.partial")
    with naming(path, writer):
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def open_to_cut(path: Path, writer: str) -> BinaryIO:
    """Open a file, which is made if it isn't there, without a buffer, to be read, cut and continued."""
    # Not for appending, which can't write over what is there.
    with naming(path, writer):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    return os.fdopen(descriptor, "r+b", buffering=0)


def write_all(file: BinaryIO, text: str, path: Path, writer: str) -> None:
    """Write a text where a file is, in one call of the system unless the disk is full."""
    rest = memoryview(text.encode())
    with naming(path, writer):
        while rest:
            rest = rest[file.write(rest) :]


def csv_lines(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def first_line(path: Path) -> bytes:
    """The first line of a file, if it is whole; else nothing."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except OSError:
        return b""
    return line if line.endswith(b"\n") else b""


def remove_written(folder: Path) -> None:
    """Remove the images or tables of another run, ``ba<batch>-<name>``, from their folder; links are not followed."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if re.match("ba[0-9]+-", path.name) and (path.is_symlink() or path.is_file()):
            path.unlink()


class RunFile:
    """What a run has to remember of its destination, in a JSON file: its name, and ids of services.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """What it holds; nothing where there is no such file, or it is none of ours."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, content: Mapping[str, object]) -> None:
        replace_file(self.path, json.dumps(json_safe(content), indent=1) + "\n")

    @property
    def run_name(self) -> str | None:
        """The name of the run.

        Raises:
            ArgumentError: no run can be named so.
        """
        return check_recorded_run_name(self.read().get("run_name"), self.path)


def json_safe(value: Any) -> Any:
    """The value as strict JSON has it: NaN and infinities are texts, as in the JSON of protocol buffers.

    >>> json_safe({"a": (1, float("nan"), float("-inf"))})
    {'a': [1, 'NaN', '-Infinity']}
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    if number != number:
        return "NaN"
    if number in (float("inf"), float("-inf")):
        return "Infinity" if number > 0 else "-Infinity"
    return number


# Characters of a name in that of a file, which has a batch, a number and an ending besides.
_LONGEST_PART = 100
# MLflow's limit is 250.
_LONGEST_KEY = 200


def file_part(name: str) -> str:
    """A name as a part of that of a file: letters and digits of ASCII, and ``._-``; ``/`` is ``~``.

    >>> file_part("confusion"), file_part("val/images"), file_part("val images")
    ('confusion', 'val~images', 'val-images~~44a8612a1c')
    """
    safe = re.sub(r"[^A-Za-z0-9._~-]+", "-", name.replace("~", "-").replace("/", "~"))
    # The number of an image follows the name.
    has_number = re.search(r"-\d+(-|$)", safe) is not None
    if safe.replace("~", "/") == name and "~~" not in safe and not has_number and 0 < len(safe) <= _LONGEST_PART:
        return safe
    return f"{safe[:_LONGEST_PART]}~~{digest_of(name)}"


def mlflow_key(name: str) -> str:
    """A name that MLflow takes: characters of ASCII, no path that leads elsewhere, at most 250 of them.

    >>> mlflow_key("val/loss"), mlflow_key("精度")
    ('val/loss', '_-c118b58d31')
    """
    safe = re.sub(r"[^A-Za-z0-9_. /-]+", "_", name)
    if safe == name and normpath(name) == name and not name.startswith(("/", ".")) and len(name) <= _LONGEST_KEY:
        return name
    parts = [part for part in safe[:_LONGEST_KEY].split("/") if part.strip(".")]
    return f"{'/'.join(parts)}-{digest_of(name)}"


class FileDestination(Destination):
    """A destination with a file; the first line says whether it is a record.

    Args:
        path: that of the file, with fields of the run.
        include, exclude, flush, overwrite: see :class:`pure_loop.loggers._destination.Destination`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        include: Names,
        exclude: Names,
        flush: CadenceLike,
        overwrite: bool,
    ) -> None:
        place = Pattern(path, f"{type(self).__name__} path")
        super().__init__(include=include, exclude=exclude, flush=flush, place=place, overwrite=overwrite)
        self.settle(place.text)

    def settle(self, path: str) -> None:
        self.path: Path = read_file_path(path, f"{type(self).__name__} path")

    @property
    def in_the_way(self) -> Sequence[str]:
        return [self.path.name] if first_line(self.path) else []

    def reserve(self) -> None:
        make_folder(self.path.parent, type(self).__name__)
        reserve(self.path, type(self).__name__)

    def release(self) -> None:
        release(self.path)


class FolderDestination(Destination):
    """A destination with a folder, in which ``<prefix>_run.json`` says of which run the record is.

    Args:
        folder: the folder, a path with fields of the run.
        include, exclude, flush, overwrite: see :class:`pure_loop.loggers._destination.Destination`.
    """

    prefix: ClassVar[str]
    """Of the names of files in the folder."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        include: Names,
        exclude: Names,
        flush: CadenceLike,
        overwrite: bool = False,
    ) -> None:
        place = Pattern(folder, f"{type(self).__name__} folder")
        super().__init__(include=include, exclude=exclude, flush=flush, place=place, overwrite=overwrite)
        self.settle(place.text)

    def settle(self, path: str) -> None:
        self.folder: Path = read_path(path, f"{type(self).__name__} folder")
        self._run_file = RunFile(self.folder / f"{self.prefix}_run.json")

    @property
    def recorded_run_name(self) -> str | None:
        return self._run_file.run_name
