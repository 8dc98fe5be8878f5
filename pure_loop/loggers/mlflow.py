"""Sends a run to MLflow; a resumed run continues it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pure_loop._internal.lazy import require
from pure_loop.cadence import CadenceLike
from pure_loop.errors import ArgumentTypeError
from pure_loop.loggers._destination import Names, has_failed
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import FolderDestination, json_safe, make_folder, mlflow_key
from pure_loop.loggers._tracker import file_name
from pure_loop.ranges import Name, checked

__all__ = ["MLFlowLogger"]

# What one call of MLflow takes.
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000


@checked
class MLFlowLogger(FolderDestination):
    """Sends numbers, hyperparameters, tables, images, texts and files to a run of MLflow.

    The step is how many batches had ended, and the run is named by ``fit(run_name=)``. Numbers are sent in batches.
    Hyperparameters are parameters; MLflow lets no parameter change, so one that a resumed run changes is the tag
    ``changed/<name>``. Tables (JSON), images (PNG), texts and files are artifacts. A run that resumes continues the run
    with the id in ``<folder>/mlflow_run.json``: it asks MLflow which steps it has, and sends none twice.

    Args:
        experiment: the name of the experiment, which is made if there is none.
        tracking_uri: where to, ``"sqlite:///mlflow.db"`` or the URL of a server; None: what MLflow itself is set to.
        folder: where this logger puts its file. It may have the fields ``{run_name}``,
            ``{start}``, ``{epoch}``, ``{batch}`` and ``{rank}``.
        tags: tags of the run, by name.
        include, exclude, flush: which names are recorded, and how often they are sent: see
            :class:`pure_loop.loggers._destination.Destination`.

    Raises:
        MissingExtraError: mlflow is not installed: ``pip install 'pure_loop[mlflow]'``.
        ArgumentError, ArgumentTypeError: at once.
        OSError: at FIT_START, where the folder can't be written.

    >>> import pure_loop as pl
    >>> logger = MLFlowLogger("digits", tracking_uri="sqlite:///mlflow.db", flush="100ba")
    """

    prefix = "mlflow"

    def __init__(
        self,
        experiment: Annotated[str, Name()] = "pure_loop",
        *,
        tracking_uri: str | None = None,
        folder: str | os.PathLike[str] = ".",
        tags: Mapping[str, str] | None = None,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
    ) -> None:
        super().__init__(folder, include=include, exclude=exclude, flush=flush)
        if tags is not None and not isinstance(tags, Mapping):
            raise ArgumentTypeError(f'MLFlowLogger tags={tags!r}: write a mapping, {{"team": "vision"}}.')
        self._entities = require("mlflow.entities", "mlflow", "MLFlowLogger")
        self._tracking = require("mlflow.tracking", "mlflow", "MLFlowLogger")
        self._experiment, self._uri, self._tags = experiment, tracking_uri, dict(tags or {})
        self._client: Any = None
        self._id = ""
        # Steps that MLflow has from the one on from which the run resumes, by name.
        self._sent: dict[str, set[int]] = {}
        self._params: dict[str, str] = {}

    def begin(self, start: Moment | None) -> None:
        make_folder(self.folder, "MLFlowLogger")
        self._client = client = self._tracking.MlflowClient(tracking_uri=self._uri)
        content = self._run_file.read()
        self._sent, self._params = {}, {}
        if content.get("run_name") == self.run_name and "id" in content:
            self._id = content["id"]
            client.update_run(self._id, status="RUNNING")
            data = client.get_run(self._id).data
            self._params = dict(data.params)
            if start is not None:
                for name in data.metrics:
                    history = client.get_metric_history(self._id, name)
                    self._sent[name] = {metric.step for metric in history if metric.step >= start.batch}
            return
        experiment = client.get_experiment_by_name(self._experiment)
        number = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        self._id = client.create_run(number, run_name=self.run_name, tags=self._tags).info.run_id
        self._run_file.write({"run_name": self.run_name, "id": self._id})

    def has(self, entry: Entry) -> bool:
        return entry.kind == "metric" and entry.moment.batch in self._sent.get(mlflow_key(entry.name), ())

    def write(self, entries: Sequence[Entry]) -> None:
        metrics = [
            self._entities.Metric(mlflow_key(e.name), float(e.value), round(e.seconds * 1000), e.moment.batch)
            for e in entries
            if e.kind == "metric"
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])
        for entry in entries:
            if entry.kind == "hyperparameters":
                self._send_hyperparameters(entry.value)
            elif entry.kind != "metric":
                self._send_artifact(entry)

    def end(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id, "FAILED" if has_failed() else "FINISHED")
            self._client = None

    def _send_hyperparameters(self, values: Mapping[str, object]) -> None:
        texts = {mlflow_key(name): str(value)[:_LONGEST_PARAM] for name, value in values.items()}
        unsent = [(name, text) for name, text in texts.items() if name not in self._params]
        for first in range(0, len(unsent), _MOST_PARAMS):
            params = [self._entities.Param(name, text) for name, text in unsent[first : first + _MOST_PARAMS]]
            self._client.log_batch(self._id, params=params)
        for name, text in texts.items():
            if self._params.setdefault(name, text) != text:
                self._client.set_tag(self._id, f"changed/{name}", text)

    def _send_artifact(self, entry: Entry) -> None:
        place = file_name(entry, "")
        if entry.kind == "table":
            columns, rows = entry.value
            # MLflow shows tables of this form.
            text = json.dumps(json_safe({"columns": columns, "data": rows}))
            self._client.log_text(self._id, text, f"tables/{place}.json")
        elif entry.kind == "text":
            self._client.log_text(self._id, entry.value, f"texts/{place}.txt")
        elif entry.kind == "file":
            folder, _, name = f"files/{entry.name}".rpartition("/")
            # MLflow names an artifact after the local file.
            with tempfile.TemporaryDirectory() as scratch:
                self._client.log_artifact(self._id, shutil.copyfile(entry.value, Path(scratch, name)), folder)
        elif entry.kind == "images":
            from pure_loop.loggers._images import write_images

            with tempfile.TemporaryDirectory() as scratch:
                for path in write_images(Path(scratch), entry):
                    self._client.log_artifact(self._id, str(path), "images")
