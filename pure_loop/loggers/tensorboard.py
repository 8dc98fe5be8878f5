"""Writes event files for TensorBoard; a resumed run continues them."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pure_loop._internal.closing import Closing
from pure_loop._internal.lazy import require
from pure_loop._internal.owned_files import naming
from pure_loop.cadence import CadenceLike
from pure_loop.loggers._destination import Names
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import FolderDestination, json_safe, make_folder
from pure_loop.ranges import checked

__all__ = ["TensorBoardLogger"]


@checked
class TensorBoardLogger(FolderDestination):
    """Writes scalars, images, texts, tables (as texts) and hyperparameters to event files for TensorBoard.

    The step is how many batches had ended. A run that resumes continues the record in the folder: events of steps that
    are trained again, and an event that a kill has torn, are removed from the files, and a TensorBoard that is running
    is told. A folder with event files of another run is refused, unless ``overwrite=True``. Files (``log_file``) are
    left out.

    Args:
        folder: for the event files of one run, made if it isn't there; the file ``tensorboard_run.json`` in it has the
            name of the run. It may have the fields ``{run_name}``, ``{start}`` (when ``fit`` was called, in whole
            seconds since 1970), ``{epoch}`` and ``{batch}`` (where the run starts) and ``{rank}``.
        include, exclude, flush: which names are recorded, and how often they are written: see
            :class:`pure_loop.loggers._destination.Destination`.
        overwrite: replace the record of another run.

    Raises:
        MissingExtraError: tensorboard is not installed: ``pip install 'pure_loop[tensorboard]'``.
        ArgumentError, ArgumentTypeError: at once.
        RunExistsError: (a FileExistsError) at FIT_START, before any training, where the folder is another run's.
        OSError: at FIT_START, where the folder can't be written.

    >>> import tempfile, torch, pure_loop as pl
    >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    >>> folder, data = tempfile.mkdtemp(), [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1, bias=False), data, loss=torch.nn.functional.mse_loss,
    ...                       optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep", loggers=[TensorBoardLogger(folder)]))
    >>> [(event.step, event.value) for event in EventAccumulator(folder).Reload().Scalars("train/loss")]
    [(1, 1.0), (2, 1.0), (3, 1.0)]
    """

    prefix = "tensorboard"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
        overwrite: bool = False,
    ) -> None:
        super().__init__(folder, include=include, exclude=exclude, flush=flush, overwrite=overwrite)
        require("tensorboard", "tensorboard", "TensorBoardLogger")
        self._writer: Any = None
        self._start = self._last = -1
        # Tags that the record has at the step from which the run resumes.
        self._recorded: set[str] = set()
        # Those that are not written yet: TensorBoard takes them once, and the batch size comes after the first batch.
        self._hyperparameters: dict[str, object] = {}

    @property
    def in_the_way(self) -> Sequence[str]:
        return [file.name for file in event_files(self.folder)]

    def discard(self) -> None:
        for path in (*event_files(self.folder), self._run_file.path):
            path.unlink(missing_ok=True)

    @property
    def recorded_run_name(self) -> str | None:
        return self._run_file.run_name if event_files(self.folder) else None

    def begin(self, start: Moment | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make_folder(self.folder, "TensorBoardLogger")
        if self.run_name != self.recorded_run_name:
            self._run_file.write({"run_name": self.run_name})
        self._recorded, self._start, self._last = set(), -1 if start is None else start.batch, -1
        if start is not None:
            for file in event_files(self.folder):
                tags, last = _cut(file, start.batch)
                self._recorded |= tags
                self._last = max(self._last, last)
        resumes = start is not None and bool(event_files(self.folder))
        _wait_for_later_name(self.folder)
        with naming(self.folder, "TensorBoardLogger"):
            self._writer = SummaryWriter(
                log_dir=str(self.folder), purge_step=start.batch + 1 if resumes and start is not None else None
            )

    @property
    def last_batch(self) -> int | None:
        return self._last

    def has(self, entry: Entry) -> bool:
        if entry.kind == "hyperparameters":
            recorded = self._run_file.read().get("hyperparameters", {})
            value = json_safe(entry.value)
            return all(name in recorded and recorded[name] == value[name] for name in value)
        tags = {entry.name, f"{entry.name}/0", f"{entry.name}/text_summary"}
        return entry.moment.batch == self._start and not self._recorded.isdisjoint(tags)

    def write(self, entries: Sequence[Entry]) -> None:
        with naming(self.folder, "TensorBoardLogger"):
            for entry in entries:
                if entry.kind == "hyperparameters":
                    self._hyperparameters |= entry.value
                elif entry.kind != "file":
                    getattr(self, f"_add_{entry.kind}")(entry)
            if any(entry.moment.batch > 0 for entry in entries):
                self._write_hyperparameters()
            self._writer.flush()

    def end(self) -> None:
        if self._writer is not None:
            writer = self._writer
            with naming(self.folder, "TensorBoardLogger"), Closing(writer.close):
                self._write_hyperparameters()
            self._writer = None

    def _add_metric(self, entry: Entry) -> None:
        self._writer.add_scalar(entry.name, entry.value, entry.moment.batch, walltime=entry.seconds)

    def _add_text(self, entry: Entry) -> None:
        self._writer.add_text(entry.name, entry.value, entry.moment.batch, walltime=entry.seconds)

    def _add_table(self, entry: Entry) -> None:
        columns, rows = entry.value
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines)
        self._writer.add_text(entry.name, text, entry.moment.batch, walltime=entry.seconds)

    def _add_images(self, entry: Entry) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        from pure_loop.loggers._images import layers_of, png

        values = []
        for key, layer in layers_of(entry).items():
            name = entry.name if key is None else f"{entry.name}/{key}"
            for index, image in enumerate(layer):
                height, width, channels = image.shape
                encoded = Summary.Image(
                    height=height, width=width, colorspace=channels, encoded_image_string=png(image)
                )
                values.append(Summary.Value(tag=name if len(layer) == 1 else f"{name}/{index}", image=encoded))
        summary = Summary(value=values)
        self._writer.file_writer.add_summary(summary, entry.moment.batch, walltime=entry.seconds)

    def _write_hyperparameters(self) -> None:
        if not self._hyperparameters:
            return
        from torch.utils.tensorboard.summary import hparams

        content = self._run_file.read()
        settings = {**content.get("hyperparameters", {}), **json_safe(self._hyperparameters)}
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in settings.items()
        }
        for summary in hparams(plain, {}):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)
        # Before the run file says that the event file has them.
        self._writer.flush()
        self._run_file.write({**content, "hyperparameters": settings})
        self._hyperparameters = {}


def event_files(folder: Path) -> list[Path]:
    """The event files of a folder, the oldest first."""
    return sorted(file for file in folder.glob("events.out.tfevents.*") if file.name.split(".")[3].isdigit())


def _wait_for_later_name(folder: Path) -> None:
    """Wait, for a second at most, until a new event file comes after those there are.

    TensorBoard reads files in the order of their names, which begin with the second in which they were made.
    """
    while any(int(time.time()) <= int(file.name.split(".")[3]) <= time.time() + 1 for file in event_files(folder)):
        time.sleep(0.02)


def _cut(file: Path, step: int) -> tuple[set[str], int]:
    """Remove from an event file what is of later steps, and what is torn.

    Returns:
        The tags that it has at this step, and the last step that it has.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    tags: set[str] = set()
    last = -1
    for begin, record, is_whole in records(file):
        if not is_whole or _step(record) > step:
            if begin:
                os.truncate(file, begin)
            else:
                file.unlink()
            break
        last = max(last, _step(record))
        if _step(record) == step:
            tags.update(value.tag for value in Event.FromString(record).summary.value)
    return tags, last


def records(file: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Where each record of an event file begins, what it holds, and whether it is whole.

    A record is its length in 8 bytes, their checksum in 4, the event, and its checksum in 4.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        at = 0
        while at < size:
            head = stream.read(12)
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
            is_whole = len(head) == 12 and at + 16 + length <= size
            yield at, stream.read(length) if is_whole else b"", is_whole
            stream.seek(4, os.SEEK_CUR)
            at += 16 + length


def _step(record: bytes) -> int:
    """The step of an event, without parsing the rest: field 1 is a double, and field 2 the step, if it is not 0."""
    if record[:1] != b"\x09" or record[9:10] != b"\x10":
        return 0
    step = shift = 0
    for byte in record[10:20]:
        step |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return step
