"""Callbacks: read-only observers of ``(event, state)``.

A callback receives the State that the algorithms returned, and can't change it. At one event callbacks
run after the algorithms, in their order, and loggers last. To record values a callback passes them to the
logger that it receives: callbacks decide what is recorded, loggers where.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeAlias

import attrs
import torch

from pure_loop._internal.arguments import check_file_name, path_text
from pure_loop._internal.closing import call_all
from pure_loop._internal.reprs import call
from pure_loop._internal.suggestions import teaching
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.metrics import Metric
from pure_loop.precision import PrecisionName
from pure_loop.state import State
from pure_loop.task import Task
from pure_loop.time import Time, Timestamp

if TYPE_CHECKING:
    from pure_loop._internal.names import Fields
    from pure_loop.data.source import Source
    from pure_loop.optim import Optimizer

__all__ = ["Callback", "CallbackLike", "LastBoundary", "Logger", "LoggerGroup", "Run"]

P = ParamSpec("P")


@attrs.define
class LastBoundary:
    """The State of the last boundary, for as long as no step writes to it.

    Attributes:
        state: a ``CheckpointSaver`` puts it here at a boundary, the loop at the start of evaluations; the loop takes it
            out as soon as the next batch is loaded. None: a batch is under way, or nothing saves.
        evaluated: of evaluations since the last batch the States at EVAL_START, with the weights that were measured, by
            the labels of their evaluators, the last one last: callbacks that save them put them here.
    """

    state: State | None = None
    evaluated: dict[str, State] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """The facts of a call, for :meth:`Callback.bind`, before its stream starts.

    Attributes:
        function: the name of the function that was called.
        callbacks: all Callback objects of the call on this rank, loggers last.
        optimizer: that of the call; None: the function takes none.
        metrics: of each evaluator, by its label; None: those that fit its outputs.
        train_metrics: those of training.
        order: of the events.
        max_duration: the duration of training; None outside ``fit``.
        iteration_length: the length of an iteration; None: there are no iterations.
        ranks: the number of processes that train together.
        task: what the model does with a batch; None outside ``fit``.
        precision: that of forward and loss, ``"fp32"``, ``"amp_bf16"``, ``"amp_fp16"`` or ``"amp_fp8"``.
        microbatch_size: the samples of a forward, at most; None: whole batches.
        algorithms: names and settings of those of ``fit``, as text.
        device: of the parameters; None outside ``fit``.
        sources: the sources of batches, those of evaluators last.
        boundary: the State of the last boundary, for callbacks that save it if a stream ends early; None outside
            ``fit``.
        at_end: functions that are called after everything else of the stream is closed; ``bind`` may append one.
        run_name: the name of the run, which all loggers use: ``fit(run_name=)``, that of the record that a resumed run
            continues, or a new one. None outside ``fit``, and on other ranks than the first where it was not passed.
        autoresume: the folder; the same command resumes from its newest checkpoint. None: there is none.
        resumed_from: the checkpoint that ``load_path`` or ``autoresume`` reads; None: the run starts from a module or
            from a State in memory.
        members: how many models an ensemble has; 0: it is one model.
        started: when the function was called, in whole seconds since 1970.
    """

    function: Literal["fit", "evaluate", "predict", "drive"]
    callbacks: tuple[Callback, ...]
    optimizer: Optimizer | None = None
    metrics: Mapping[str, Sequence[Metric] | None] = attrs.field(factory=dict)
    train_metrics: Sequence[Metric] = ()
    order: Literal["current", "2021"] = "current"
    max_duration: Time | None = None
    iteration_length: Time | None = None
    ranks: int = 1
    task: Task | None = None
    precision: PrecisionName = "fp32"
    microbatch_size: int | None = None
    algorithms: tuple[str, ...] = ()
    device: torch.device | None = None
    sources: tuple[Source, ...] = ()
    boundary: LastBoundary | None = None
    at_end: list[Callable[[], None]] = attrs.field(factory=list, repr=False)
    run_name: str | None = None
    autoresume: str | os.PathLike[str] | None = None
    resumed_from: str | None = None
    members: int = 0
    started: int = attrs.field(factory=lambda: int(time.time()))

    def fields(self, now: Timestamp, rank: int = 0) -> Fields:
        """What stands for the fields of a path such as ``"runs/{run_name}/ep{epoch}.pt"``."""
        from pure_loop._internal.names import counts_of  # a plain fit doesn't need it
        from pure_loop._internal.processes import whereabouts

        here = {"run_name": self.run_name, "rank": rank, "start": self.started, "world_size": self.ranks}
        return {**counts_of(now), **here, **whereabouts(self.ranks)}

    def continues(self, batch: int) -> bool:
        """Whether the run, which starts after so many batches, continues an earlier one, and so its files."""
        # The same command, run again with autoresume, may have been killed before its first checkpoint.
        return batch > 0 or self.autoresume is not None


class Callback:
    """The base of callbacks: override methods named after events, or ``run_event``, which then serves all.

    ``epoch_end(self, state, logger)`` runs at EPOCH_END, and so on for every event. A plain function of
    ``(event, state)`` is a callback, too. Events without a method cost nothing. A method returns nothing, and must not
    write to tensors of the State; to change training, write an algorithm.

    On several ranks a callback runs on the first one alone, unless it has the attribute ``all_ranks = True`` (a
    function may have it as well).

    >>> class Greeter(Callback):
    ...     def fit_start(self, state, logger):
    ...         print("training starts at batch", state.timestamp.batch)
    """

    all_ranks: bool = False

    rank: int = 0
    """The rank on which it runs; the loop sets it before the stream starts."""

    needs_grad_norm: bool = False
    """Whether ``fit`` computes ``state.grad_norm`` at each batch for this callback, even if no clipping needs it. It
    requires ``all_ranks = True``, because ranks with shards of the gradients compute it together."""

    each_member: bool = False
    """Whether of an ensemble a copy of it (``copy.copy``, before it is bound) sees the State of each member, one after
    the other, and what the copies record is recorded as ``fit`` records its own numbers: ``<name>/mean``,
    ``<name>/spread``, ``<name>/best`` and ``<name>/member/<number>``. Otherwise it sees the State of all members, whose
    loss and metrics have shape (members,)."""

    records: bool = False
    """Whether it only passes values to the logger. It is then shown an event at which an algorithm or another callback
    raises, too, so that the record of a run ends with the values of its last event."""

    made_with: Mapping[str, Any] | None = None
    """The arguments with which it was constructed, by name; None: not known."""

    def __repr__(self) -> str:
        return call(type(self).__name__, self.made_with or {})

    def bind(self, run: Run) -> None:
        """Called when ``fit``, ``evaluate``, ``predict`` or ``drive`` is called, before anything runs.

        Raise :class:`pure_loop.errors.ArgumentError` here if the callback can't work in such a run. One callback may be
        bound several times: ``explain`` binds it, too, and runs nothing.
        """

    def saves_to(self, folder: str | os.PathLike[str]) -> bool:
        """Whether this callback saves to ``folder`` the checkpoints from which ``fit(autoresume=folder)`` resumes.

        If no callback of the call does, ``fit`` adds a ``CheckpointSaver`` for that folder.
        """
        return False

    def run_event(self, event: Event, state: State, logger: LoggerGroup) -> None:
        """Called at every event, if overridden."""

    def close(self) -> None:
        """Called once when the stream ends, is left or raises: close files here."""


class Logger(Callback):
    """The base of loggers, destinations of recorded values: override the methods that the destination supports.

    A logger is a callback as well, so that it can flush or print at events. It may have further methods ``log_*``, such
    as ``log_audio``; a call of one by a callback reaches the loggers that have it.
    """

    @property
    def recorded_run_name(self) -> str | None:
        """The name of the run of the record at this logger's destination; None: there is no record, or no name.

        If a run resumes and ``fit`` is passed no ``run_name``, the first such name of its loggers is used.
        """
        return None

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """The settings of the run, at FIT_START; a later call adds further ones."""

    def log_metrics(self, metrics: Mapping[str, object], state: State) -> None:
        """Values by name at ``state.timestamp``: numbers, or tensors of one element that may still be on a device.

        Reading such a tensor waits for the device: read many at intervals, and call ``state.check_finite()`` then. A
        vector or a mapping that a callback records arrives as several numbers, a matrix as a table.
        """

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], state: State) -> None:
        """A table: the names of its columns, and rows with a cell for each.

        Cells are texts, numbers, or tensors of one element that may still be on a device.
        """

    def log_images(self, name: str, images: object, state: State, *, masks: object = None) -> None:
        """Images.

        Args:
            name: under which they are recorded.
            images: ``(n, height, width, channels)`` with 1, 3 or 4 channels, a tensor or array: uint8 from 0 to 255, or
                floats from 0 to 1.
            state: the one with the timestamp at which they are recorded.
            masks: classes of pixels by name, ``{"targets": (n, height, width)}``, integers from 0 to 255; a tensor or
                array alone is named ``"mask"``.
        """

    def log_text(self, name: str, text: str, state: State) -> None:
        """A text, such as a sample of a language model."""

    def log_file(self, name: str, path: str) -> None:
        """A file, and the name under which to store it, which may have folders: ``"samples/final.txt"``."""

    def flush(self) -> None:
        """Write everything that was recorded so far.

        ``CheckpointSaver`` calls it before it saves, so that what a resumed run doesn't record again is not lost.
        """


def _to_each(method: Callable[Concatenate[Logger, P], None]) -> Callable[Concatenate[LoggerGroup, P], None]:
    """A method of a group that calls that of each logger; one that raises keeps none of the others from recording."""

    @functools.wraps(method)
    def called(group: LoggerGroup, /, *args: P.args, **kwargs: P.kwargs) -> None:
        call_all(functools.partial(getattr(logger, method.__name__), *args, **kwargs) for logger in group.loggers)

    return called


class _Recorded:
    """Which callback recorded which name at the batch in progress."""

    __slots__ = ("_authors", "_batch")

    def __init__(self) -> None:
        self._batch, self._authors = -1, dict[str, str]()

    def add(self, names: Iterable[str], author: str, state: State) -> None:
        """
        Raises:
            ArgumentError: another callback has recorded a name at this batch.
        """
        batch = state.timestamp.batch
        if batch != self._batch:
            self._batch = batch
            self._authors.clear()
        for name in names:
            if self._authors.setdefault(name, author) is not author:
                own = "callback Recorder" in (author, self._authors[name])
                raise ArgumentError(
                    f"{author} records {name!r} at batch {batch}, where {self._authors[name]} has recorded it: a name "
                    "has one value at a step. Record it under another name, or leave one of the two callbacks out."
                    f"{' The Recorder is that of fit and drive with loggers.' if own else ''}"
                )


class LoggerGroup:
    """The logger that callbacks are handed: passes everything on to each logger of the run.

    A name has one value at a step: that two callbacks record it at one batch is an error.
    """

    def __init__(self, loggers: Sequence[Logger] = ()) -> None:
        self.loggers: tuple[Logger, ...] = tuple(loggers)
        self._recorded, self._author = _Recorded(), "a callback"

    def for_callback(self, name: str) -> LoggerGroup:
        """The group as a callback of this name is handed it."""
        group = LoggerGroup(self.loggers)
        group._recorded = self._recorded
        group._author = f"callback {name}"  # a text of its own: two callbacks of one class are two
        return group

    def _checked(self, name: str) -> str:
        from pure_loop._internal.names import check_name  # only where a callback records

        return check_name(name, self._author)

    log_hyperparameters = _to_each(Logger.log_hyperparameters)
    flush = _to_each(Logger.flush)

    @teaching
    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], state: State) -> None:
        """A table, as :meth:`Logger.log_table` says."""
        name = self._checked(name)
        call_all(functools.partial(logger.log_table, name, columns, rows, state) for logger in self.loggers)

    @teaching
    def log_text(self, name: str, text: str, state: State) -> None:
        """A text, as :meth:`Logger.log_text` says."""
        name = self._checked(name)
        call_all(functools.partial(logger.log_text, name, text, state) for logger in self.loggers)

    @teaching
    def log_file(self, name: str, path: str) -> None:
        """A file, and the name under which loggers store it: a relative path without ``..``.

        Raises:
            ArgumentError, ArgumentTypeError: another name, which could lead out of a logger's folder.
        """
        check_file_name(name, "log_file")
        call_all(functools.partial(logger.log_file, name, path_text(path)) for logger in self.loggers)

    @teaching
    def log_metrics(self, metrics: Mapping[str, object], state: State) -> None:
        """Values by name; a vector or a mapping becomes several numbers, and a matrix or any other value a table.

        Raises:
            ArgumentError: another callback has recorded one of the names at this batch.
        """
        from pure_loop._internal.recordable import check_metrics, recordable_metrics  # only where a callback records

        metrics = {self._checked(name): value for name, value in check_metrics(metrics, state).items()}
        numbers, tables = recordable_metrics(metrics)
        self._recorded.add([*numbers, *tables], self._author, state)

        def record(logger: Logger) -> None:
            if numbers or not tables:
                logger.log_metrics(numbers, state)
            for name, (columns, rows) in tables.items():
                logger.log_table(name, columns, rows, state)

        call_all(functools.partial(record, logger) for logger in self.loggers)

    @teaching
    def log_images(self, name: str, images: object, state: State, *, masks: object = None) -> None:
        """Images, as :meth:`Logger.log_images` says.

        Raises:
            ArgumentError: they have another number of dimensions.
        """
        shape = tuple(getattr(images, "shape", ()))
        if len(shape) not in (3, 4):
            raise ArgumentError(
                f"log_images({name!r}): images are a tensor or array of shape (n, height, width, channels), or of one "
                f"image (height, width, channels); got {f'shape {shape}' if shape else type(images).__name__}."
            )
        name = self._checked(name)
        call_all(functools.partial(logger.log_images, name, images, state, masks=masks) for logger in self.loggers)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """What some loggers can record and others can't, ``log_audio``: goes to those that have the method."""
        if not name.startswith("log_"):
            raise AttributeError(
                f'a logger has no attribute {name!r}: write logger.log_metrics({{"loss": value}}, state)', name=name
            )
        methods = [getattr(logger, name) for logger in self.loggers if hasattr(logger, name)]
        if not methods:
            known = [method for method in dir(Logger) if method.startswith("log_")]
            import difflib  # only on the way to an error

            near = difflib.get_close_matches(name, known, n=1)
            raise AttributeError(
                f"no logger of the run has a method {name!r}; "
                + (f"did you mean {near[0]}?" if near else f"all have {', '.join(known)}")
            )

        def to_those(*args: object, **kwargs: object) -> None:
            call_all(functools.partial(method, *args, **kwargs) for method in methods)

        return to_those


CallbackLike: TypeAlias = "Callback | Callable[[Event, State], None]"
