"""Writes the result file of an MLPerf training run: ``:::MLLOG`` lines from the start to the target quality."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import attrs

from pure_loop._internal.names import Pattern
from pure_loop._internal.owned_files import naming
from pure_loop.algorithms._monitored import Monitored
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.callbacks._beside import refuse_members
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.ranges import Name, Number, checked
from pure_loop.state import State

__all__ = ["MLPerfCallback"]

SERVES = "evaluations"

_PREFIX = ":::MLLOG "
_NAME = re.compile(r"result_(\d+)\.txt")


@checked
class MLPerfCallback(Callback):
    """Writes ``result_<number>.txt`` to a folder, in the format of MLPerf Training's results.

    Lines, which the rules of MLPerf Training 5.0 describe:

    * at FIT_START: ``submission_*``, ``seed``, what ``settings`` holds, ``init_start`` (with the time at which ``fit``
      was called), ``init_stop`` and ``run_start``;
    * at the first BATCH_END ``global_batch_size``, of all ranks;
    * ``epoch_start`` and ``epoch_stop``, with ``epoch_num``, which begins with 1;
    * at evaluations of the metric's evaluator ``eval_start``, ``eval_accuracy`` (the metric) and ``eval_stop``, with
      ``epoch_num`` and ``samples_count``;
    * ``run_stop`` with the status ``success`` as soon as the metric reaches the target, and nothing after it; with
      ``aborted`` at FIT_END where it did not. Training ends where it would end:
      ``pl.algorithms.threshold_stopping(metric, target)`` ends it at the target.

    A run that resumes continues the newest file of the folder, without lines that it has already; after ``run_stop``
    nothing is added. A new run writes to the next number. Where training ends with an error there is no ``run_stop``.

    ``train_samples``, ``eval_samples`` and ``cache_clear``, which the rules require, too, are for ``settings``.

    Args:
        folder: where the file goes; it is made. It may have the fields ``{run_name}``, ``{start}`` (when ``fit`` was
            called, in whole seconds since 1970), ``{epoch}`` and ``{batch}`` (where the run starts) and ``{rank}``.
        benchmark: the name of the benchmark, such as ``"retinanet"``.
        target: the quality that has to be reached.
        metric: of what: ``"<label>/<metric>"`` of an evaluator.
        mode: whether the metric has to reach the target from above, ``"min"``, or from below, ``"max"``. None: known
            for losses, accuracies and the like.
        division: ``"open"`` or ``"closed"``.
        organization, platform: the submitter, and its system.
        status: of the system: ``"onprem"``, ``"cloud"``, ``"preview"`` or ``"research"``.
        settings: further values by key, which JSON can hold: ``{"opt_name": "adamw", "train_samples": 1170301}``.

    Raises:
        ArgumentError, ArgumentTypeError: a setting out of range; by ``fit``: there is no such metric.
        OSError: at FIT_START, where the file can't be written.

    >>> import pathlib, tempfile, torch, pure_loop as pl
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> callback = MLPerfCallback(folder, "linear", target=0.1, metric="val/loss")
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, max_duration="5ep",
    ...                       optimizer=pl.optim.sgd(lr=0.1), evaluators={"val": data}, callbacks=[callback]))
    >>> (folder / "result_0.txt").read_text()[:26]
    ':::MLLOG {"namespace": "",'
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        benchmark: Annotated[str, Name()],
        target: Annotated[float, Number()],
        metric: Annotated[str, Name(typical=("val/loss",))],
        *,
        mode: Literal["min", "max"] | None = None,
        division: Literal["open", "closed"] = "open",
        organization: Annotated[str, Name()] = "none",
        platform: Annotated[str, Name()] = "none",
        status: Literal["onprem", "cloud", "preview", "research"] = "onprem",
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._place = Pattern(folder, "MLPerfCallback folder")
        self.folder = Path(self._place.text)
        self._run: Run | None = None
        self._target = target
        self._monitored = Monitored.read("MLPerfCallback", metric, mode)
        if self._monitored.of_training:
            raise ArgumentError(
                f"MLPerfCallback(metric={metric!r}): the quality is that of an evaluation; write the evaluator's label "
                'and the metric\'s name, "val/accuracy".'
            )
        self._points = {
            "submission_benchmark": benchmark,
            "submission_division": division,
            "submission_org": organization,
            "submission_platform": platform,
            "submission_status": status,
            **_read_settings(settings),
        }
        self._called = 0
        self._file: TextIO | None = None
        # Identities of the lines that the file has.
        self._written: set[str] = set()

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: no evaluator measures the metric; or an ensemble is trained.
        """
        refuse_members(run, "MLPerfCallback", "a result is that of one; train it alone, fit(make_model(), ...).")
        self._run = run
        if run.function == "fit":
            self._monitored.bind(attrs.evolve(run, train_metrics=()))
        self._called = _now()

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        run = self._run or Run(function="drive", callbacks=())
        self.folder = Path(self._place.of(run.fields(state.timestamp, self.rank)))
        self._open(resumes=state.timestamp.batch > 0)
        for key, value in {**self._points, "seed": state.seed}.items():
            self._write("POINT_IN_TIME", key, value)
        self._write("INTERVAL_START", "init_start", at=self._called)
        self._write("INTERVAL_END", "init_stop")
        self._write("INTERVAL_START", "run_start")

    def epoch_start(self, state: State, logger: LoggerGroup) -> None:
        self._write("INTERVAL_START", "epoch_start", epoch_num=state.timestamp.epoch + 1)

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        if "global_batch_size" not in self._written:
            samples = state.timestamp.sample - state.previous_timestamp.sample
            self._write("POINT_IN_TIME", "global_batch_size", samples)

    def epoch_end(self, state: State, logger: LoggerGroup) -> None:
        self._write("INTERVAL_END", "epoch_stop", epoch_num=state.timestamp.epoch)

    def eval_start(self, state: State, logger: LoggerGroup) -> None:
        if state.evaluator == self._monitored.label:
            self._write("INTERVAL_START", "eval_start", **_place(state))

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        if state.evaluator != self._monitored.label or self._file is None:
            return
        value = self._monitored.value(state)
        self._write("POINT_IN_TIME", "eval_accuracy", value, **_place(state))
        self._write("INTERVAL_END", "eval_stop", **_place(state))
        if value == self._target or self._monitored.is_better(value, self._target):
            self._stop("success", state)

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        self._stop("aborted", state)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with naming(file.name, "MLPerfCallback"):
                file.close()

    def _stop(self, status: str, state: State) -> None:
        self._write("INTERVAL_END", "run_stop", status=status, **_place(state))
        self.close()

    def _open(self, *, resumes: bool) -> None:
        """Open the file of this run, unless it is complete."""
        self.close()
        self._written = set()
        with naming(self.folder, "MLPerfCallback"):
            self.folder.mkdir(parents=True, exist_ok=True)
        numbers = sorted(int(name[1]) for name in map(_NAME.fullmatch, os.listdir(self.folder)) if name is not None)
        newest = numbers[-1] if numbers else None
        number = newest if resumes and newest is not None else 0 if newest is None else newest + 1
        path = self.folder / f"result_{number}.txt"
        if number == newest:
            contents = _whole_lines(path)
            self._written = {_identity(content["key"], content["metadata"]) for content in contents}
            if any(content["key"] == "run_stop" for content in contents):
                return
        with naming(path, "MLPerfCallback"):
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()

    def _write(self, kind: str, key: str, value: object = None, *, at: int | None = None, **metadata: object) -> None:
        identity = _identity(key, metadata)
        if self._file is None or identity in self._written:
            return
        self._written.add(identity)
        content = {
            "namespace": "",
            "time_ms": _now() if at is None else at,
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        with naming(self._file.name, "MLPerfCallback"):
            self._file.write(f"{_PREFIX}{json.dumps(content)}\n")
            self._file.flush()


def _now() -> int:
    return time.time_ns() // 1_000_000


def _place(state: State) -> dict[str, int]:
    """Where in the run an evaluation is."""
    t = state.timestamp
    return {"epoch_num": t.epoch + (t.batch_in_epoch > 0), "samples_count": t.sample}


def _identity(key: str, metadata: Mapping[str, object]) -> str:
    """What a run writes once, and a resumed run doesn't write again."""
    return f"{key} {json.dumps(metadata, sort_keys=True)}" if metadata else key


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The contents of a file's lines; a last line that a kill has torn is removed."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    lines: Iterable[str] = data[:end].decode().splitlines()
    return [json.loads(line.removeprefix(_PREFIX)) for line in lines if line.startswith(_PREFIX)]


def _read_settings(settings: object) -> dict[str, object]:
    """
    Raises:
        ArgumentTypeError: no mapping of texts, or a value that JSON can't hold.
    """
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise ArgumentTypeError(
            f'MLPerfCallback(settings={settings!r}): write values by key, such as {{"opt_name": "adamw"}}.'
        )
    for key, value in settings.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(f"MLPerfCallback(settings=...): {key!r} is {value!r}: {error}.") from None
    return dict(settings)
