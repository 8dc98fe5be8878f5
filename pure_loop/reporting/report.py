"""``pl.report``: what a run has recorded, as one HTML file."""

from __future__ import annotations

import os
from pathlib import Path

from pure_loop._internal.arguments import is_path, path_text, refusal
from pure_loop._internal.suggestions import nearest, teaching
from pure_loop.callback import Logger
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.loggers._destination import Destination
from pure_loop.loggers._files import make_folder, read_file_path, replace_file
from pure_loop.loggers.csv_file import CSVLogger
from pure_loop.loggers.in_memory import InMemoryLogger
from pure_loop.loggers.json_lines import JSONLinesLogger
from pure_loop.loggers.tensorboard import TensorBoardLogger, event_files
from pure_loop.reporting.page import Samples, page
from pure_loop.reporting.reading import of_files, of_folder, of_memory
from pure_loop.reporting.record import Record

READABLE = (InMemoryLogger, JSONLinesLogger, CSVLogger, TensorBoardLogger)
_READ = "an InMemoryLogger, a JSONLinesLogger, a CSVLogger or a TensorBoardLogger"


@teaching
def report(
    folder_or_logger: str | os.PathLike[str] | Logger,
    path: str | os.PathLike[str] | None = None,
    *,
    inspection: Samples | None = None,
) -> Path:
    """Write what a run has recorded to one HTML file, which needs no server and no network, and runs nothing.

    The file has the curves of all numbers, a table of epochs, the best of each metric, the batches with the worst
    losses, the checkpoints, the settings and the versions; in light and dark, on any width, and on paper. Of many
    numbers a curve shows the mean and the range at each place, so that the file stays small: less than 200 kB for most
    runs. Tables, texts, images and files that were recorded are left out.

    Of a folder, and of the folders directly in it, are read: files of ``JSONLinesLogger`` and ``CSVLogger``, event
    files of ``TensorBoardLogger``, the headers of checkpoints, and what a ``FlightRecorder`` has left. Where several
    have the numbers of one name, the first of them is drawn. What is torn or damaged is left out, and the file says so.
    Nothing that is read can run code, and nothing but the file is written: a run that goes on isn't disturbed.

    Args:
        folder_or_logger: a local folder with the record of one run; or a logger that keeps a record, alone: an
            InMemoryLogger, a JSONLinesLogger, a CSVLogger or a TensorBoardLogger.
        path: of the HTML file, which is replaced; None: ``report.html`` in the folder, in that of the logger's file,
            and for an InMemoryLogger in the working directory.
        inspection: what :func:`pure_loop.inspect` returned of a batch, whose worst samples are listed.

    Returns:
        The path of the file.

    Raises:
        ArgumentTypeError: neither a folder nor a logger, or a logger that keeps no record that can be read.
        ArgumentError: there is no such folder, it has no record or those of several runs; a logger that has nothing.
        MissingExtraError: there are event files, and tensorboard is not installed.
        FileWriteError, OSError: the file can't be written.

    >>> import pathlib, tempfile, torch, pure_loop as pl
    >>> folder, data = pathlib.Path(tempfile.mkdtemp()), [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                       optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep",
    ...                       loggers=[pl.loggers.JSONLinesLogger(folder / "metrics.jsonl")]))
    >>> pl.report(folder).name
    'report.html'
    """
    if not (inspection is None or hasattr(inspection, "tables")):
        raise refusal("inspection", inspection, "what pl.inspect(state, ...) returns", "report")
    if isinstance(folder_or_logger, Logger):
        record, place, name = _of_logger(folder_or_logger)
    elif is_path(folder_or_logger):
        place = _folder(path_text(folder_or_logger, "report folder_or_logger"))
        record, name = of_folder(place), place.resolve().name
        if record.is_empty():
            _refuse_empty(place)
    else:
        kind = type(folder_or_logger).__name__
        raise ArgumentTypeError(
            f"report: folder_or_logger is {kind}: pass the folder of a run, such as 'runs/1', or {_READ}."
        )
    file = place / "report.html" if path is None else read_file_path(path, "report path", "report.html")
    record.fold_members()
    make_folder(file.parent, "report")
    replace_file(file, page(record, name, inspection), "report")
    return file


def _of_logger(logger: Logger) -> tuple[Record, Path, str]:
    """The record of a logger, the folder of its files, and what a run is called that has no name.

    Raises:
        ArgumentTypeError: it keeps none that can be read.
        ArgumentError: it has recorded nothing.
    """
    kind = type(logger).__name__
    if isinstance(logger, Destination):
        logger.flush()
    match logger:
        case InMemoryLogger():
            record, place, name = of_memory(logger), Path(), "run"
        case JSONLinesLogger() | CSVLogger():
            place, name = logger.path.parent, logger.path.stem
            record = of_files(place, [logger.path] if logger.path.is_file() else [])
        case TensorBoardLogger():
            place, name = logger.folder, logger.folder.name
            record = of_files(place, event_files(place))
        case _:
            raise ArgumentTypeError(
                f"report: a {kind} keeps no record that can be read: pass the folder of the run, or {_READ}."
            )
    if record.is_empty():
        raise ArgumentError(
            f"report: this {kind} has recorded nothing: pass it to the run, fit(..., loggers=[logger]), and then here."
        )
    return record, place, name


def _folder(text: str) -> Path:
    """
    Raises:
        ArgumentError: it is no folder on this machine.
    """
    place = Path(text)
    if "://" in text:
        raise ArgumentError(f"report: {text!r} is a URL, and a report is of files of this machine: copy the folder.")
    if place.is_file():
        raise ArgumentError(
            f"report: {text!r} is a file: pass its folder, {os.fspath(place.parent)!r}, or the logger that wrote it."
        )
    if not text or not place.is_dir():
        beside = [path.name for path in place.parent.iterdir() if path.is_dir()] if place.parent.is_dir() else []
        near = nearest(place.name, beside)
        hint = f"; did you mean {os.fspath(place.parent / near)!r}?" if near else "."
        raise ArgumentError(f"report: there is no folder {text!r}{hint}")
    return place


def _refuse_empty(place: Path) -> None:
    names = sorted(path.name for path in place.iterdir())
    listing = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "nothing"
    file = os.fspath(place / "metrics.jsonl")
    raise ArgumentError(
        f"report: {os.fspath(place)!r} has no record of a run, but {listing}. Looked for, here and in the folders in "
        "it: files of JSONLinesLogger and CSVLogger, event files of TensorBoardLogger, checkpoints (*.safetensors, "
        "*.sharded), and the journal.jsonl of a FlightRecorder. Record a run with fit(..., "
        f"loggers=[pl.loggers.JSONLinesLogger({file!r})])."
    )
