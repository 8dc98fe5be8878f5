"""Sends a run to a Neptune installation, or writes it for a later upload; a resumed run continues it."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pure_loop._internal.lazy import require
from pure_loop.cadence import CadenceLike
from pure_loop.errors import ArgumentError
from pure_loop.loggers._destination import Names
from pure_loop.loggers._entry import Entry
from pure_loop.loggers._tracker import Tracker, csv_of, file_name, image_files, own_draws, variables
from pure_loop.ranges import checked

__all__ = ["NeptuneLogger"]

# What Neptune would record besides what the loop does.
_NOT_BY_ITSELF: dict[str, object] = {
    **dict.fromkeys(("capture_stdout", "capture_stderr", "capture_hardware_metrics", "capture_traceback"), False),
    "git_ref": False,
    "source_files": [],
}


@checked
class NeptuneLogger(Tracker):
    """Sends numbers, hyperparameters, tables (CSV), images with masks upon them, texts and files to Neptune 2.

    Online it sends to the Neptune installation that Neptune's own variables name.
    The step is how many batches had ended, and the run is named by ``fit(run_name=)``. A run that resumes continues
    the run with the id in ``<folder>/neptune_run.json``, and no step is sent twice. What Neptune had not written to its
    disk when training is killed is sent from ``<folder>/neptune_journal.jsonl``. Neptune's disk
    is ``<folder>/.neptune``. Offline each process leaves a folder there, which ``neptune sync`` uploads as a run of its
    own, because Neptune keeps no id in it; together they have each step once.

    A name below another one's, ``train/loss/kl`` below ``train/loss``, is ``train/loss.kl`` in Neptune, which has no
    numbers where it has folders. Numbers that are not finite, which it doesn't take, are texts below ``nonfinite/``.

    Args:
        project: ``"workspace/project"``; None: that of the variable ``NEPTUNE_PROJECT``.
        folder: where this logger's files go. It may have the fields ``{run_name}``,
            ``{start}``, ``{epoch}``, ``{batch}`` and ``{rank}``.
        api_token: None: that of the variable ``NEPTUNE_API_TOKEN``.
        mode: ``"async"`` sends as the run goes, ``"offline"`` writes folders; None: that of the variable
            ``NEPTUNE_MODE``, or ``"async"``.
        tags: tags of the run.
        options: further arguments of ``neptune.init_run``.
        include, exclude, flush: which names are recorded, and how often they are sent: see
            :class:`pure_loop.loggers._destination.Destination`.

    Raises:
        MissingExtraError: neptune is not installed: ``pip install 'pure_loop[neptune]'``.
        ArgumentError, ArgumentTypeError: at once.
        OSError: at FIT_START, where the folder can't be written.

    >>> import pure_loop as pl
    >>> logger = NeptuneLogger("team/digits", mode="offline")  # doctest: +SKIP
    """

    prefix, service = "neptune", "Neptune"
    own_options = ("custom_run_id", "name", "tags", "with_id")

    def __init__(
        self,
        project: str | None = None,
        *,
        folder: str | os.PathLike[str] = ".",
        api_token: str | None = None,
        mode: Literal["async", "offline"] | None = None,
        tags: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
    ) -> None:
        super().__init__(folder, tags, options, include=include, exclude=exclude, flush=flush)
        with warnings.catch_warnings(), own_draws():
            # Of packages that Neptune imports: an error in a program that makes errors of warnings.
            warnings.filterwarnings("ignore", "jsonschema.RefResolver is deprecated", DeprecationWarning)
            self._neptune = require("neptune", "neptune", "NeptuneLogger")
        mode = mode or ("offline" if os.environ.get("NEPTUNE_MODE") == "offline" else "async")
        if mode == "async" and not (api_token or os.environ.get("NEPTUNE_API_TOKEN")):
            raise ArgumentError(
                'NeptuneLogger needs an API token: NeptuneLogger(project, api_token="..."), or set the variable '
                'NEPTUNE_API_TOKEN; mode="offline" writes folders and needs none.'
            )
        self._settings = {"project": project, "api_token": api_token, "mode": mode, "tags": list(tags)}
        self._options = {**_NOT_BY_ITSELF, **(options or {})}
        self._service: Any = None
        self._paths: dict[str, str] = {}

    def connect(self, run_id: str) -> None:
        self._paths = {}
        with own_draws(), variables({"NEPTUNE_DATA_DIRECTORY": str(self.folder / ".neptune")}):
            self._service = self._neptune.init_run(
                **self._options, **self._settings, name=self.run_name, custom_run_id=run_id
            )

    def received(self, run_id: str, names: set[str]) -> set[tuple[str, int]]:
        """What is on Neptune's disk, from where ``neptune sync`` uploads it."""
        if not names:
            return set()
        names_by_path = {path: name for name in names for path in (self._path(name), f"nonfinite/{self._path(name)}")}
        steps: set[tuple[str, int]] = set()
        for log in (self.folder / ".neptune").glob("*/run__*/data-*.log"):
            operations = list(_operations(log))
            if not any(item["path"] == ["sys", "name"] and item.get("value") == self.run_name for item in operations):
                continue
            for item in operations:
                # Images have a path for each.
                name = names_by_path.get("/".join(item["path"])) or names_by_path.get("/".join(item["path"][:-1]))
                if name is not None and isinstance(item.get("values"), list):
                    steps |= {(name, int(value["step"])) for value in item["values"]}
        return steps

    def _hand_over(self, entry: Entry) -> None:
        path, at = self._path(entry.name), {"step": entry.moment.batch, "timestamp": entry.seconds}
        service, file = self._service, self._neptune.types.File
        if entry.kind == "metric" and math.isfinite(entry.value):
            service[path].append(entry.value, **at)
        elif entry.kind == "metric":
            service[f"nonfinite/{path}"].append(str(entry.value), **at)
        elif entry.kind == "hyperparameters":
            service["parameters"] = self._neptune.utils.stringify_unsupported(
                {name.replace("/", "."): value for name, value in entry.value.items()}
            )
        elif entry.kind == "text":
            service[path].append(entry.value, **at)
        elif entry.kind == "table":
            content = file.from_content(csv_of(entry), extension="csv")
            service[f"tables/{file_name(entry, '')}"].upload(content)
        elif entry.kind == "file":
            service[f"files/{path}"].upload(entry.value)
        else:
            for suffix, content in image_files(entry):
                key, _, index = suffix.rpartition("/")
                image = file.from_content(content, extension="png")
                service[f"{path}{key.replace('/', '.')}/{index}"].append(image, **at)

    def disconnect(self, *, failed: bool) -> None:
        with own_draws():
            self._service["sys/failed"] = failed
            self._service.stop()
        self._service = None

    def _path(self, name: str) -> str:
        """Where a name is in Neptune, which has no numbers where it has folders."""
        if name not in self._paths:
            parts = name.split("/")
            above = next((n for n in range(1, len(parts)) if "/".join(parts[:n]) in self._paths), len(parts))
            self._paths[name] = "/".join([*parts[: above - 1], ".".join(parts[above - 1 :])])
        return self._paths[name]


def _operations(log: Path) -> Iterator[Any]:
    """What a file of Neptune holds, up to where a kill has torn it."""
    for line in log.read_bytes().splitlines():
        try:
            operation = json.loads(line)["obj"]
        except (ValueError, KeyError):
            return
        if "path" in operation:
            yield operation
