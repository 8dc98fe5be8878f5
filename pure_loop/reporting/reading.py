"""Reading the record of a run, from a logger or from the files that a run leaves. No file can run code."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch

from pure_loop._internal.lazy import require
from pure_loop._internal.reprs import count
from pure_loop._internal.version import __version__
from pure_loop.checkpoint import describe
from pure_loop.checkpoint.files import SHARDED, SUFFIX
from pure_loop.checkpoint.finding import found_at
from pure_loop.checkpoint.flight import JOURNAL, read_flight
from pure_loop.errors import ArgumentError, CheckpointError
from pure_loop.loggers._files import RunFile
from pure_loop.loggers._lines import content_of
from pure_loop.loggers.in_memory import InMemoryLogger, numbers_in
from pure_loop.loggers.tensorboard import TensorBoardLogger, records
from pure_loop.reporting.record import TRAIN_LOSS, CheckpointEntry, Record, Series

# How files begin that a JSONLinesLogger and a CSVLogger write.
_LINES, _ROWS = b'{"time": ', b"batch,epoch,time"
# A file that was changed may have any; floats hold these.
_MOST = 2**53

Reader: TypeAlias = Callable[[Path, str, Record], "dict[str, Series] | None"]
"""From a file, its name and a record to the numbers by name, and what else there is to the record; None: not ours."""


def number_of(value: object) -> float | None:
    """A number as a file has it, ``"NaN"`` for NaN; None: it is none."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MOST


def of_memory(logger: InMemoryLogger) -> Record:
    """What an InMemoryLogger has; the environment is that of this process."""
    record, series = Record(settings=dict(logger.hyperparameters)), dict[str, Series]()
    for name, at, number in numbers_in(logger.metrics):
        series.setdefault(name, Series()).add(at.batch, float(number), at.epoch)
    if series or record.settings:
        record.add(series, ["InMemoryLogger"])
    for name, version in (("pure_loop", __version__), ("torch", torch.__version__)):
        record.saw(name, version)
    record.saw("python", platform.python_version())
    return record


def of_folder(folder: Path) -> Record:
    """What a run has left in a folder and in those directly in it: files of loggers, checkpoints, a flight.

    Raises:
        ArgumentError: they are of several runs.
    """
    places = [folder, *(path for path in sorted(folder.iterdir()) if _is_place(path))]
    record = of_files(folder, (path for place in places for path in sorted(place.iterdir())))
    if len(record.names) > 1:
        listed = ", ".join(f"{name!r} in {place}" for name, place in list(record.names.items())[:4])
        raise ArgumentError(
            f"report: {os.fspath(folder)!r} holds {len(record.names)} runs, {listed}: a report is of one. Pass the "
            "folder of one of them, or its logger, such as pl.loggers.JSONLinesLogger(path)."
        )
    return record


def of_files(folder: Path, paths: Iterable[Path]) -> Record:
    """The record that some files have; of folders, sharded checkpoints count.

    Args:
        folder: to which names are relative.
        paths: of files of any kind.
    """
    record = Record()
    named = [(path, os.path.relpath(path, folder)) for path in paths]
    for reader in (_read_lines, _read_rows, _read_events, _read_journal, _read_checkpoint):
        parts: dict[str, dict[str, Series]] = {}
        for path, name in named:
            try:
                part = reader(path, name, record) if _reader(path) is reader else None
            except OSError as error:  # no permission; or a run that goes on has removed it
                record.problems.append(f"{name} can't be read: {error.strerror or error}.")
                continue
            if part is not None:
                parts[name] = part
        if parts:
            sources = [count(len(parts), "checkpoint", "checkpoints")] if reader is _read_checkpoint else [*parts]
            record.add(_joined([*parts.values()]), sources)
    record.checkpoints.sort(key=lambda kept: (kept.header.progress if kept.header else (), kept.name), reverse=True)
    return record


def _is_place(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and path.suffix != SHARDED


def _reader(path: Path) -> Reader | None:
    """What reads a file; None: it is none of ours."""
    if path.name.startswith(".") or path.is_symlink():
        return None
    if path.is_dir():
        return _read_checkpoint if path.suffix == SHARDED else None
    if not path.is_file():
        return None
    if path.suffix == SUFFIX:
        return _read_checkpoint
    if path.name == JOURNAL:
        return _read_journal
    if path.name.startswith("events.out.tfevents."):
        return _read_events
    with open(path, "rb") as file:
        head = file.read(len(_ROWS))
    return _read_lines if head.startswith(_LINES) else _read_rows if head == _ROWS else None


def _joined(parts: Sequence[Mapping[str, Series]]) -> dict[str, Series]:
    """The numbers of several files; those of one that begins later continue those of the one before."""
    joined: dict[str, Series] = {}
    for part in sorted(parts, key=lambda part: min((series.batches[0] for series in part.values()), default=0)):
        for name, series in part.items():
            if name not in joined:
                joined[name] = series
            else:
                for batch, value, epoch in zip(series.batches, series.values, series.epochs, strict=True):
                    joined[name].add(batch, value, epoch)
    return joined


def _read_lines(path: Path, name: str, record: Record) -> dict[str, Series]:
    """A file of a JSONLinesLogger."""
    series: dict[str, Series] = {}
    unread = 0
    with open(path, "rb") as file:
        for line in file:
            content = content_of(line)
            unread += content is None or not _has_read(content, name, record, series)
    if unread:
        record.problems.append(f"{name}: {count(unread, 'line is', 'lines are')} cut or damaged, and left out.")
    return series


def _has_read(content: Mapping[str, Any], where: str, record: Record, series: dict[str, Series]) -> bool:
    kind, name, value, batch = (content[key] for key in ("kind", "name", "value", "batch"))
    if not _is_count(batch) or not isinstance(name, str):
        return False
    record.timed(content.get("time"))
    if kind == "metric":
        number, epoch = number_of(value), content["epoch"]
        if number is not None:
            series.setdefault(name, Series()).add(batch, number, epoch if _is_count(epoch) else None)
        return number is not None
    if kind == "hyperparameters" and isinstance(value, dict):
        record.settings |= value
    elif kind == "run" and isinstance(value, str):
        record.names.setdefault(value, where)
    return True


def _read_rows(path: Path, name: str, record: Record) -> dict[str, Series]:
    """A file of a CSVLogger, and what it keeps beside it."""
    _read_run_file(path.with_name(f"{path.stem}.run.json"), name, record)
    series: dict[str, Series] = {}
    unread = 0
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        columns = _cells(file.readline())[3:]
        for line in file:
            cells = _cells(line)
            counts = [int(cell) for cell in cells[:2] if cell.isdecimal() and len(cell) < len(str(_MOST))]
            numbers = [number_of(cell) for cell in cells]
            if len(counts) < 2 or len(cells) != len(columns) + 3 or any(map(_is_damaged, cells, numbers)):
                unread += 1
                continue
            record.timed(numbers[2])
            for column, number in zip(columns, numbers[3:], strict=True):
                if number is not None:
                    series.setdefault(column, Series()).add(counts[0], number, counts[1])
    if unread:
        record.problems.append(f"{name}: {count(unread, 'row is', 'rows are')} cut or damaged, and left out.")
    return series


def _cells(line: str) -> list[str]:
    """The cells of a row; none where it is cut, or is no row."""
    try:
        return next(csv.reader([line], strict=True), []) if line.endswith("\n") else []
    except csv.Error:
        return []


def _is_damaged(cell: str, number: float | None) -> bool:
    return bool(cell) and number is None


def _read_events(path: Path, name: str, record: Record) -> dict[str, Series]:
    """A file of a TensorBoardLogger, and what it keeps beside it.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """
    require("tensorboard", "tensorboard", "report of event files")
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    _read_run_file(path.with_name(f"{TensorBoardLogger.prefix}_run.json"), name, record)
    series: dict[str, Series] = {}
    for begin, content, is_whole in records(path):
        try:
            event = Event.FromString(content) if is_whole else None
        except DecodeError:
            event = None
        if event is None or not _is_count(event.step):
            record.problems.append(f"{name}: what begins at byte {begin} is cut or damaged, and left out.")
            break
        record.timed(event.wall_time)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                series.setdefault(value.tag, Series()).add(event.step, value.simple_value, None)
    return series


def _read_run_file(path: Path, name: str, record: Record) -> None:
    content = RunFile(path).read()
    run_name, settings = content.get("run_name"), content.get("hyperparameters")
    if isinstance(run_name, str):
        record.names.setdefault(run_name, name)
    if isinstance(settings, dict):
        record.settings = {**settings, **record.settings}


def _read_journal(path: Path, name: str, record: Record) -> dict[str, Series]:
    """The journal of a FlightRecorder, and the facts beside it.

    Raises:
        ArgumentError: it is the second one.
    """
    if record.flight is not None:
        folders = f"{record.flight.folder!r} and {os.fspath(path.parent)!r}"
        raise ArgumentError(f"report: two FlightRecorders have left a run each, in {folders}: pass one of the folders.")
    try:
        record.flight = flight = read_flight(path.parent)
    except CheckpointError as error:
        record.problems.append(str(error))
        return {}
    recorded = bool(record.settings)
    for fact, value in flight.facts.items():
        if fact in ("pure_loop", "torch", "python", "ranks"):
            record.saw(fact, value)
        elif fact != "first_batch" and not recorded:
            record.settings[fact] = value
    losses = Series()
    for line in flight.lines.values():
        losses.add(line.batch, line.loss, line.epoch)
    return {TRAIN_LOSS: losses} if flight.lines else {}


def _read_checkpoint(path: Path, name: str, record: Record) -> dict[str, Series] | None:
    """The header of a checkpoint; its tensors are not read. None: weights of another library."""
    size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    try:
        header = found_at(os.fspath(path), weights=True)
        if header is None:
            return None
        facts = describe(path)
    except (CheckpointError, OSError) as error:
        record.checkpoints.append(CheckpointEntry(name, size, error=str(error)))
        return {}
    record.checkpoints.append(CheckpointEntry(name, size, header, facts["epoch"]))
    for package, version in sorted(facts["made_by"].items()):
        record.saw(package, version)
    run_name = facts["notes"].get("run_name")
    if isinstance(run_name, str):
        record.names.setdefault(run_name, name)
    return {}
