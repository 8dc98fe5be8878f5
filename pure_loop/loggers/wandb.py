"""Sends a run to Weights & Biases, online or offline; a resumed run continues it."""

from __future__ import annotations

import os
import secrets
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pure_loop._internal.lazy import require
from pure_loop._internal.names import Pattern
from pure_loop.cadence import CadenceLike
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.loggers._destination import Destination, Names
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import RunFile, make_folder, read_path
from pure_loop.loggers._lines import Journal
from pure_loop.ranges import checked

__all__ = ["WandBLogger"]

# Arguments of wandb.init that the logger passes itself.
_OWN = ("dir", "entity", "group", "id", "mode", "name", "project", "reinit", "resume", "tags")


@checked
class WandBLogger(Destination):
    """Sends numbers, tables, images with masks, texts, files and hyperparameters to Weights & Biases.

    The step is how many batches had ended, and the run is named by ``fit(run_name=)``. A run that resumes continues
    the run whose id is in ``<folder>/wandb_run.json``, and no step is sent twice. The process that writes for W&B
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

    def __init__(
        self,
        project: str | None = None,
        *,
        folder: str | os.PathLike[str] = ".",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline", "disabled"] | None = None,
        options: Mapping[str, Any] | None = None,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
    ) -> None:
        place = Pattern(folder, "WandBLogger folder")
        super().__init__(include=include, exclude=exclude, flush=flush, place=place)
        self.settle(place.text)
        if isinstance(tags, str):
            raise ArgumentTypeError(f"WandBLogger tags={tags!r}: write a list, [{tags!r}].")
        own = [name for name in options or () if name in _OWN]
        if own:
            raise ArgumentError(
                f"WandBLogger options has {own[0]!r}, which the logger passes to wandb.init itself: write its own "
                "argument, or fit(run_name=) for the name."
            )
        self._wandb = require("wandb", "wandb", "WandBLogger")
        self._settings = {"project": project, "entity": entity, "group": group, "tags": list(tags), "mode": mode}
        self._options = dict(options or {})
        self._service: Any = None
        # Names that W&B has, by their steps; and the step below which it takes none.
        self._sent: dict[int, set[str]] = {}
        self._first_step = 0

    def settle(self, path: str) -> None:
        self.folder = read_path(path, "WandBLogger folder")
        self._run_file = RunFile(self.folder / "wandb_run.json")
        self._journal = Journal(self.folder / "wandb_journal.jsonl", "WandBLogger")

    @property
    def recorded_run_name(self) -> str | None:
        return self._run_file.run_name

    def begin(self, start: Moment | None) -> None:
        make_folder(self.folder, "WandBLogger")
        content = self._run_file.read()
        if content.get("run_name") != self.run_name or "id" not in content:
            content = {"run_name": self.run_name, "id": secrets.token_hex(4)}
            self._journal.discard()
            self._run_file.write(content)
        self._sent = {}
        for file in self._files(content["id"]):
            for step, name in _sent(file):
                self._sent.setdefault(step, set()).add(name)
        arguments = {"settings": self._wandb.Settings(console="off"), **self._options, **self._settings}
        arguments |= {"name": self.run_name, "id": content["id"]}
        self._service = self._wandb.init(**arguments, dir=str(self.folder), resume="allow", reinit="create_new")
        self._first_step = self._service.starting_step
        missing = [entry for entry in self._journal.open(start) if not self.has(entry) and not _is_gone(entry)]
        self._send(missing)

    def has(self, entry: Entry) -> bool:
        # A setting or a file that is sent again takes the place of itself.
        if entry.kind in ("hyperparameters", "file"):
            return False
        step = entry.moment.batch
        return step < self._first_step or entry.name in self._sent.get(step, ())

    def write(self, entries: Sequence[Entry]) -> None:
        self._journal.append(entries)
        self._send(entries)

    def end(self) -> None:
        if self._service is not None:
            error = sys.exception()
            failed = error is not None and not isinstance(error, GeneratorExit)
            self._service.finish(exit_code=int(failed))
            self._service = None
        self._journal.close(finished=True)

    def _send(self, entries: Sequence[Entry]) -> None:
        for step, group in groupby(entries, key=lambda entry: entry.moment.batch):
            row: dict[str, Any] = {}
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

    def _value(self, entry: Entry) -> Any:
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

    def _files(self, run_id: str) -> list[Path]:
        """What earlier processes wrote of the run offline."""
        return sorted(self.folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))


def _is_gone(entry: Entry) -> bool:
    return entry.kind == "file" and not Path(entry.value).exists()


def _sent(file: Path) -> Iterator[tuple[int, str]]:
    """The steps and names in a file of W&B.

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
                    yield parsed.history.step.num, (item.key or "/".join(item.nested_key)).removesuffix("/_type")
