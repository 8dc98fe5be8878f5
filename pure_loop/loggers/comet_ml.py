"""Sends a run to Comet, online or as archives that are uploaded later; a resumed run continues it."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pure_loop._internal.lazy import require
from pure_loop.cadence import CadenceLike
from pure_loop.errors import ArgumentError
from pure_loop.loggers._destination import Names
from pure_loop.loggers._entry import Entry
from pure_loop.loggers._tracker import Tracker, csv_of, file_name, image_files, own_draws, variables
from pure_loop.ranges import checked

__all__ = ["CometMLLogger"]

# The loop records what Comet would record by changing torch and other packages, and more of it.
_NOT_BY_ITSELF = (
    *("log_code", "log_graph", "auto_param_logging", "auto_metric_logging", "parse_args"),
    *("auto_output_logging", "log_env_details", "log_git_metadata", "log_git_patch"),
)
_VARIABLES = {"COMET_DISABLE_AUTO_LOGGING": "1", "COMET_INTERNAL_SENTRY_DSN": ""}


@checked
class CometMLLogger(Tracker):
    """Sends numbers, hyperparameters, tables (CSV), images with masks upon them, texts and files to Comet.

    The step is how many batches had ended, and the experiment is named by ``fit(run_name=)``. A run that resumes
    continues the experiment with the key in ``<folder>/comet_run.json``, and no step is sent twice. Comet writes in a
    thread, and loses what it has not written when training is killed; so until the run is finished, everything is kept
    in ``<folder>/comet_journal.jsonl``, too, and a resumed run sends what is missing. Offline each process writes an
    archive ``<key>-*.zip`` when it ends; ``comet upload *.zip`` takes them all, as one experiment.

    Comet's package records nothing by itself: it changes torch when it is imported, unless it is imported by this
    logger, with ``COMET_DISABLE_AUTO_LOGGING`` and without its own reports of errors.

    Args:
        project: the project on Comet; None: what Comet itself is set to.
        folder: where archives and this logger's files go. It may have the fields ``{run_name}``,
            ``{start}``, ``{epoch}``, ``{batch}`` and ``{rank}``.
        workspace: of the project; None: what Comet itself is set to.
        api_key: None: that of the variable ``COMET_API_KEY`` or of Comet's own file.
        mode: ``"online"`` or ``"offline"``; None: what Comet is set to (the variable ``COMET_START_ONLINE``), or
            online.
        tags: tags of the experiment.
        options: further arguments of ``comet_ml.ExperimentConfig``, such as ``{"log_git_metadata": True}``.
        include, exclude, flush: which names are recorded, and how often they are sent: see
            :class:`pure_loop.loggers._destination.Destination`.

    Raises:
        MissingExtraError: comet_ml is not installed: ``pip install 'pure_loop[comet_ml]'``.
        ArgumentError, ArgumentTypeError: at once.
        OSError: at FIT_START, where the folder can't be written.

    >>> import pure_loop as pl
    >>> logger = CometMLLogger("digits", mode="offline", include=["train/*", "val/*"])
    """

    prefix, service = "comet", "Comet"
    own_options = ("name", "offline_directory", "tags")  # of comet_ml's ExperimentConfig

    def __init__(
        self,
        project: str | None = None,
        *,
        folder: str | os.PathLike[str] = ".",
        workspace: str | None = None,
        api_key: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        tags: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
    ) -> None:
        super().__init__(folder, tags, options, include=include, exclude=exclude, flush=flush)
        self._comet = _package()
        self._is_online = mode == "online" or (
            mode is None and self._comet.get_config("comet.start.online") is not False
        )
        if self._is_online and not (api_key or self._comet.get_config("comet.api_key")):
            raise ArgumentError(
                'CometMLLogger needs an API key: CometMLLogger(project, api_key="..."), or set the variable '
                'COMET_API_KEY; mode="offline" writes archives and needs none.'
            )
        self._settings = {"project_name": project, "workspace": workspace, "api_key": api_key}
        self._tags = list(tags)
        self._options = {**dict.fromkeys(_NOT_BY_ITSELF, False), "display_summary_level": 0, **(options or {})}
        self._experiment: Any = None

    def connect(self, run_id: str) -> None:
        config = self._comet.ExperimentConfig(
            **self._options, name=self.run_name, tags=self._tags, offline_directory=str(self.folder)
        )
        _remove_torn(self.folder, run_id)
        with variables(_VARIABLES), own_draws():
            self._experiment = self._comet.start(
                **self._settings,
                experiment_key=run_id,
                mode="get_or_create",
                online=self._is_online,
                experiment_config=config,
            )

    def received(self, run_id: str, names: set[str]) -> set[tuple[str, int]]:
        # An archive is written when a process ends, so that one which was killed has left none.
        if not names or not self._is_online:
            return set()
        experiment = self._comet.API(api_key=self._settings["api_key"]).get_experiment_by_key(run_id)
        if experiment is None:
            return set()
        return {(name, value["step"]) for name in names for value in experiment.get_metrics(name)}

    def _hand_over(self, entry: Entry) -> None:
        step, epoch = entry.moment.batch, entry.moment.epoch
        if entry.kind == "metric":
            self._experiment.log_metric(entry.name, entry.value, step=step, epoch=epoch)
        elif entry.kind == "hyperparameters":
            self._experiment.log_parameters(dict(entry.value))
        elif entry.kind == "text":
            self._experiment.log_text(entry.value, step=step, metadata={"name": entry.name})
        elif entry.kind == "table":
            self._experiment.log_asset_data(
                csv_of(entry), name=file_name(entry, ".csv"), step=step, epoch=epoch, overwrite=True
            )
        elif entry.kind == "file":
            self._experiment.log_asset(entry.value, file_name=entry.name, step=step, overwrite=True)
        else:
            for suffix, content in image_files(entry):
                name = f"{entry.name}{suffix}"
                self._experiment.log_image(
                    io.BytesIO(content), name=name, image_format="png", step=step, overwrite=True
                )

    def disconnect(self, *, failed: bool) -> None:
        with own_draws():
            self._experiment.log_other("failed", failed)
            self._experiment.end()
        self._experiment = None


def _remove_torn(folder: Path, run_id: str) -> None:
    """Remove archives that a process has begun, and was killed before it had written them: Comet can't upload them."""
    for path in folder.glob(f"{run_id}*.zip"):
        try:
            with zipfile.ZipFile(path) as archive:
                is_torn = not archive.namelist()
        except zipfile.BadZipFile:
            is_torn = True
        if is_torn:
            path.unlink()


def _package() -> Any:
    """The package, imported so that it changes no other package, and starts no thread that reports its errors.

    Raises:
        MissingExtraError: it is not installed.
    """
    with variables(_VARIABLES), own_draws():
        return require("comet_ml", "comet_ml", "CometMLLogger")
