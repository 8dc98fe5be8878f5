"""Sends a run to Weights & Biases, online or offline; a resumed run continues it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pure_loop._internal.lazy import require
from pure_loop.cadence import CadenceLike
from pure_loop.loggers._destination import Names
from pure_loop.loggers._entry import Entry
from pure_loop.loggers._tracker import Tracker
from pure_loop.ranges import checked

__all__ = ["WandBLogger"]


@checked
class WandBLogger(Tracker):
    """Sends numbers, tables, images with masks, texts, files and hyperparameters to Weights & Biases.

    The step is how many batches had ended, and the run is named by ``fit(run_name=)``. A run that resumes continues
    the run with the id in ``<folder>/wandb_run.json``, and no step is sent twice. The process that writes for W&B
    loses what it has not written when training is killed; so until the run is finished, everything is
    kept in ``<folder>/wandb_journal.jsonl``, too, and a resumed run sends what is missing. Offline each process
    writes a folder ``wandb/offline-run-*`` of its own with the id of the run; ``wandb sync`` takes them all.

    Args:
        project: the project on W&B; None: what W&B itself is set to.
        folder: where W&B puts its folder ``wandb``, and this logger its files. It may have the fields ``{run_name}``,
            ``{start}``, ``{epoch}``, ``{batch}`` and ``{rank}``.
        entity: the user or team; None: what W&B itself is set to.
        group: the group of the run.
        tags: tags of the run.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; None: what W&B is set to (the variable ``WANDB_MODE``).
        options: further arguments of ``wandb.init``. The console is not captured, unless they ask for it.
        include, exclude, flush: which names are recorded, and how often they are sent: see
            :class:`pure_loop.loggers._destination.Destination`.

    Raises:
        MissingExtraError: wandb is not installed: ``pip install 'pure_loop[wandb]'``.
        ArgumentError, ArgumentTypeError: at once.
        OSError: at FIT_START, where the folder can't be written.

    >>> import pure_loop as pl
    >>> logger = WandBLogger("digits", mode="offline", include=["train/*", "val/*"])
    """

    prefix, service = "wandb", "wandb.init"
    own_options = ("dir", "entity", "group", "id", "mode", "name", "project", "reinit", "resume", "tags")
    id_bytes = 4

    def __init__(
        self,
        project: str | None = None,
        *,
        folder: str | os.PathLike[str] = ".",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline", "disabled"] | None = None,
        options: Mapping[str, object] | None = None,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
    ) -> None:
        super().__init__(folder, tags, options, include=include, exclude=exclude, flush=flush)
        self._wandb = require("wandb", "wandb", "WandBLogger")
        self._settings = {"project": project, "entity": entity, "group": group, "tags": list(tags), "mode": mode}
        self._options = dict(options or {})
        self._service: Any = None
        self._offline: set[tuple[str, int]] = set()
        # The step below which W&B takes none.
        self._first_step = 0

    def connect(self, run_id: str) -> None:
        # What processes that were killed wrote of the run offline. W&B writes the end of a finished one after `finish`
        # has returned; what that had sent is in the file of the run.
        files = sorted(self.folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
        self._offline = {pair for file in files for pair in _sent(file)}
        arguments = {"settings": self._wandb.Settings(console="off"), **self._options, **self._settings}
        arguments |= {"name": self.run_name, "id": run_id}
        self._service = self._wandb.init(**arguments, dir=str(self.folder), resume="allow", reinit="create_new")
        self._first_step = self._service.starting_step

    def received(self, run_id: str, names: set[str]) -> set[tuple[str, int]]:
        return self._offline

    def has_step(self, name: str, step: int) -> bool:
        return step < self._first_step or super().has_step(name, step)

    def pass_on(self, entries: Sequence[Entry]) -> None:
        for step, group in groupby(self.counted_entries(entries), key=lambda entry: entry.moment.batch):
            row: dict[str, object] = {}
            for entry in group:
                if entry.kind == "hyperparameters":
                    self._service.config.update(dict(entry.value), allow_val_change=True)
                elif entry.kind == "file":
                    path = Path(entry.value).absolute()
                    self._service.save(str(path), base_path=str(path.parent), policy="now")
                else:
                    row.setdefault(entry.name, self._value(entry))
            if row:
                self._service.log(row, step=step)

    def disconnect(self, *, failed: bool) -> None:
        self._service.finish(exit_code=int(failed))
        self._service = None

    def _value(self, entry: Entry) -> object:
        if entry.kind == "table":
            columns, rows = entry.value
            return self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        if entry.kind == "text":
            import html

            return self._wandb.Html(f"<pre>{html.escape(entry.value)}</pre>")
        if entry.kind == "images":
            from pure_loop.loggers._images import as_masks, as_pixels

            images, masks = entry.value
            pixels = as_pixels(images, entry.name)
            classes = as_masks(masks, pixels, entry.name)
            return [
                self._wandb.Image(
                    image.squeeze(-1) if image.shape[-1] == 1 else image,
                    masks={key: {"mask_data": mask[index]} for key, mask in classes.items()} or None,
                )
                for index, image in enumerate(pixels)
            ]
        return entry.value


def _sent(file: Path) -> Iterator[tuple[str, int]]:
    """The names and steps in a file of W&B.

    After 7 bytes of head it has blocks of 32 KiB, and in these pieces of records: the checksum in 4 bytes, the length
    in 2, and a kind: 1 is a whole record, 2 the first piece of one, 3 one in between and 4 the last. A block ends with
    less than 7 bytes that mean nothing. What a kill has torn ends the file.
    """
    records = require("wandb.proto.wandb_internal_pb2", "wandb", "WandBLogger")
    raw, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        rest = 32768 - at % 32768
        if rest < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        at += 7
        if not 1 <= kind <= 4 or at + length > len(raw):
            return
        record += raw[at : at + length]
        at += length
        if kind in (1, 4):
            parsed = records.Record.FromString(record)
            record = b""
            if parsed.WhichOneof("record_type") == "history":
                for item in parsed.history.item:
                    # Tables, images and texts have several keys, one of them for their type.
                    name = item.key or "/".join(item.nested_key)
                    yield name.removesuffix("/_type"), parsed.history.step.num
