"""The base of loggers that write somewhere: names are chosen by globs, values read in groups, one run is one record."""

from __future__ import annotations

import copy
import fnmatch
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

import attrs
from torch import Tensor

from pure_loop._internal.arguments import check_file_name, check_flag, path_text
from pure_loop._internal.closing import Closing, call_all
from pure_loop._internal.logs import get_logger
from pure_loop._internal.names import Fields, Pattern, counts_of
from pure_loop._internal.owned_files import refuse_other_run
from pure_loop._internal.recordable import check_metrics, recordable_metrics
from pure_loop._internal.suggestions import teaching
from pure_loop.cadence import Cadence, CadenceLike
from pure_loop.callback import Logger, LoggerGroup, Run
from pure_loop.callbacks._intervals import read_interval
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loggers._entry import Entry, Kind, Moment, read_tensors
from pure_loop.state import State
from pure_loop.time import Timestamp

Names = str | Iterable[str] | None


_log = get_logger("pure_loop.loggers")
_UNKNOWN = Moment()


class AtIntervals(Logger):
    """Does something at an interval.

    Args:
        interval: how often: ``"50ba"``, ``"1ep"``, ``"30s"``, a predicate of the State; 0: never.
        argument: its name, for errors.
        advice: what to write instead of None.

    Raises:
        ArgumentTypeError: the interval is None.
    """

    def __init__(self, interval: CadenceLike, argument: str, advice: str) -> None:
        self._due = read_interval(interval, type(self).__name__, advice, argument)

    def _act(self, state: State) -> None:
        """What is done where it is due."""

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        self._act_if_due(state, Event.BATCH_END)

    def epoch_end(self, state: State, logger: LoggerGroup) -> None:
        self._act_if_due(state, Event.EPOCH_END)

    def iteration_end(self, state: State, logger: LoggerGroup) -> None:
        self._act_if_due(state, Event.ITERATION_END)

    def _act_if_due(self, state: State, event: Event) -> None:
        due = self._due
        if due.at(state, event) if isinstance(due, Cadence) else due(state):
            self._act(state)


class Destination(AtIntervals):
    """Keeps what is recorded, and hands it to :meth:`write` in groups.

    A subclass overrides ``begin``, ``write``, ``end`` and, where something can't be taken back, ``has``.

    Args:
        include: globs of the names to record, ``"train/*"`` or ``["*/loss", "*/accuracy"]``; None: all.
        exclude: globs of names to leave out.
        flush: how often values are read from the device and written: ``"50ba"``, ``"1ep"``, ``"30s"``, a predicate of
            the State; 0: before a checkpoint and at the end only.
        place: a path with fields of the run, which are put in when its record is opened; None: there is none.
        overwrite: whether the record of another run is replaced.

    Attributes:
        run_name: the name of the run, once the record is open; None: it has none.
    """

    def __init__(
        self,
        *,
        include: Names = None,
        exclude: Names = None,
        flush: CadenceLike = "50ba",
        place: Pattern | None = None,
        overwrite: bool = False,
    ) -> None:
        super().__init__(flush, "flush", '"50ba", "1ep", or 0 for checkpoints and the end only')
        name = type(self).__name__
        self._include = read_globs(include, f"{name} include")
        self._exclude = read_globs(exclude, f"{name} exclude") or ()
        self._wanted: dict[str, bool] = {}
        self._pending: list[Entry] = []
        self._is_open = False
        self._run: Run | None = None
        self._latest = _UNKNOWN
        self._place, self._location = place, "" if place is None else place.text
        self._overwrite = check_flag("overwrite", overwrite, where=name)
        self.run_name: str | None = None

    # What a destination overrides.

    def settle(self, path: str) -> None:
        """Take a path in which the fields of the run are put in."""

    @property
    def in_the_way(self) -> Sequence[str]:
        """The names of files of a record that is there, which a run must not replace; nothing where there is none."""
        return ()

    @property
    def is_foreign(self) -> bool:
        """Whether what is there is no record of such a logger."""
        return False

    def discard(self) -> None:
        """Remove the record that is there."""

    def reserve(self) -> None:
        """Keep other processes from the record that is opened next.

        Raises:
            FileInUseError: one writes to it.
        """

    def release(self) -> None:
        """Let others write to it."""

    @property
    def last_batch(self) -> int | None:
        """Of an open record that is continued, the last batch of which it has a value; None: that isn't known."""
        return None

    def begin(self, start: Moment | None) -> None:
        """Open the record of the run ``self.run_name``: the one that is there if it has this name, else a new one.

        Args:
            start: the FIT_START from which the run begins or resumes: what the record has from there on is recorded
                again, and removed now. None: nothing is recorded again (``evaluate``, a script of the user's own).

        Raises:
            OSError: it can't be written.
        """

    def write(self, entries: Sequence[Entry]) -> None:
        """Write what was recorded, in its order; values of metrics are Python numbers."""

    def reached(self, state: State) -> None:
        """What else is done at the interval ``flush``, and at FIT_END, once everything is written."""

    def has(self, entry: Entry) -> bool:
        """Whether a record that was continued has this already."""
        return False

    def end(self) -> None:
        """Close the record; ``begin`` may open it again."""

    # What the loop and callbacks call.

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: another logger of the run writes to the same file.
        """
        file = getattr(self, "path", None)
        beside = [logger for logger in run.callbacks if isinstance(logger, Destination) and logger is not self]
        if file is not None and any(getattr(logger, "path", None) == file for logger in beside):
            raise ArgumentError(f"two loggers write to {file}: give each a file of its own, or leave one of them out.")
        self._run = run
        if run.function != "fit":  # which alone has a name for each run
            self._settle(Timestamp())

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        self._pending.append(Entry("hyperparameters", "hyperparameters", dict(hyperparameters), self._latest, _now()))

    @teaching
    def log_metrics(self, metrics: Mapping[str, object], state: State) -> None:
        metrics, tables = recordable_metrics(check_metrics(metrics, state))
        self._latest, seconds = Moment.of(state), _now()
        for name, value in metrics.items():
            if self._wants(name):
                # Without its graph, which would otherwise live as long as the entry.
                value = value.detach() if isinstance(value, Tensor) else value
                self._pending.append(Entry("metric", name, value, self._latest, seconds))
        for name, (columns, rows) in tables.items():
            self.log_table(name, columns, rows, state)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], state: State) -> None:
        self._keep("table", name, (list(columns), [list(row) for row in rows]), state)

    def log_images(self, name: str, images: object, state: State, *, masks: object = None) -> None:
        if masks is not None and not isinstance(masks, Mapping):
            masks = {"mask": masks}
        copies = {key: _copy(mask) for key, mask in (masks or {}).items()}
        self._keep("images", name, (_copy(images), copies), state)

    def log_text(self, name: str, text: str, state: State) -> None:
        self._keep("text", name, text, state)

    def log_file(self, name: str, path: str) -> None:
        check_file_name(name, f"{type(self).__name__}.log_file")
        if self._wants(name):
            self._pending.append(Entry("file", name, path_text(path), self._latest, _now()))

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        self._latest = Moment.of(state)
        # A script of the user's own may begin with batch 0 for another run: it says no name.
        self._open(self._latest if self._run is None or self._run.function == "fit" or state.timestamp.batch else None)
        self.flush()

    def _act(self, state: State) -> None:
        self.flush()
        self.reached(state)
        # After what was read is written: the record then shows the loss that was not finite.
        state.check_finite()

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        self._act(state)

    def flush(self) -> None:
        if self._run is not None and self._run.function == "fit" and not self._is_open:
            return  # FIT_START is to come, or could not open the record
        pending, self._pending = self._pending, []
        if not pending:
            return
        if not self._is_open:
            self._open(None)
        read_tensors(pending)
        unwritten = [entry for entry in pending if not self.has(entry)]
        if unwritten:
            self.write(unwritten)

    def close(self) -> None:
        with Closing(self._close):
            self.flush()

    def _close(self) -> None:
        self._pending = []
        self._run = None
        if self._is_open:
            self._is_open = False
            with Closing(self.release):
                self.end()

    def _open(self, start: Moment | None) -> None:
        """Open the record, unless it is."""
        if self._is_open:
            return
        self._settle(self._latest.timestamp)
        recorded = self.recorded_run_name
        self.run_name = (None if self._run is None else self._run.run_name) or recorded
        is_other = self.is_foreign
        if start is not None and self._run is not None and self._run.function == "fit":
            is_other = is_other or recorded != self.run_name or not self._run.continues(start.batch)
        names = self.in_the_way if is_other else ()
        if names and not self._overwrite:
            self._refuse(recorded, names)
        is_continued = not names and bool(self.in_the_way)
        self.reserve()
        try:
            if names:
                self.discard()
            self.begin(start)
        except BaseException as error:
            call_all([self.end, self.release], error, "while closing: ")
            raise
        self._is_open = True
        if is_continued and start is not None:
            self._say_what_is_cut(start)
        # What the recorder and callbacks record at FIT_START comes before it is known where that is.
        self._pending = [
            attrs.evolve(entry, moment=self._latest) if entry.moment == _UNKNOWN else entry for entry in self._pending
        ]

    def _settle(self, timestamp: Timestamp) -> None:
        if self._place is not None:
            outside: Fields = {**counts_of(timestamp), "rank": self.rank}
            self._location = self._place.of(outside if self._run is None else self._run.fields(timestamp, self.rank))
            self.settle(self._location)

    def _refuse(self, recorded: str | None, names: Sequence[str]) -> None:
        run = self._run
        why = ""
        if recorded is not None and run is not None and recorded != run.run_name:
            why = f" ({recorded!r}; this one is {run.run_name!r})"
        resume = 'fit(..., autoresume="runs/1"), which continues the record of the run that it resumes'
        refuse_other_run(type(self).__name__, self._location, names, resume=resume, why=why)

    def _say_what_is_cut(self, start: Moment) -> None:
        """Say that a record ends before the State from which a run resumes: each batch before it had a loss."""
        last = self.last_batch
        if last is not None and last < start.batch and self._wants("train/loss"):
            _log.warning(
                "%s: %s ends at batch %d, and the run resumes at batch %d: what was recorded between them is not in "
                "it. Was it cut, or restored from a copy?",
                type(self).__name__,
                self._location,
                max(last, 0),
                start.batch,
            )

    def _keep(self, kind: Kind, name: str, value: object, state: State) -> None:
        if self._wants(name):
            self._latest = Moment.of(state)
            self._pending.append(Entry(kind, name, value, self._latest, _now()))

    def _wants(self, name: str) -> bool:
        wanted = self._wanted.get(name)
        if wanted is None:
            included = self._include is None or any(fnmatch.fnmatchcase(name, glob) for glob in self._include)
            wanted = included and not any(fnmatch.fnmatchcase(name, glob) for glob in self._exclude)
            self._wanted[name] = wanted
        return wanted


def has_failed() -> bool:
    """Whether the run ends with an error as its record is closed; where the loop is left it does not."""
    error = sys.exception()
    return error is not None and not isinstance(error, GeneratorExit)


def _now() -> float:
    return round(time.time(), 3)


def _copy(value: object) -> object:
    """The value as it is now; a part of a batch is copied, so that the batch is not kept."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def read_globs(value: Names, name: str) -> tuple[str, ...] | None:
    """Globs of names of metrics, as a tuple; None: None.

    Raises:
        ArgumentTypeError: it is neither a text nor several.
        ArgumentError: there is none, or an empty one.
    """
    if value is None:
        return None
    globs = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    for glob in globs:
        if not isinstance(glob, str):
            raise ArgumentTypeError(f'{name}={value!r}: write a glob such as "train/*", or a list of them.')
        if not glob:
            raise ArgumentError(f'{name}={value!r}: an empty glob matches no name; write one such as "train/*".')
    if not globs and name.endswith("include"):
        raise ArgumentError(f"{name}=[]: nothing would be recorded; leave it out to record everything.")
    return tuple(globs)
