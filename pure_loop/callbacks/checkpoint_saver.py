"""Saves checkpoints at intervals and where training ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from typing import Annotated, Literal

from pure_loop._internal.arguments import check_flag
from pure_loop._internal.logs import get_logger, warn_on_terminal
from pure_loop._internal.names import OF_RUN, Fields, Pattern
from pure_loop.cadence import Cadence, CadenceLike, as_predicate
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.callbacks._beside import refuse_members
from pure_loop.callbacks._scored import Scored
from pure_loop.checkpoint.background import StateWriter
from pure_loop.checkpoint.coordination import REQUEUE, Coordinator, StopConsensus, TimeLimit, of_first_rank, read_limit
from pure_loop.checkpoint.digests import refuse_no_base
from pure_loop.checkpoint.document import write_document
from pure_loop.checkpoint.files import SUFFIX, in_parts
from pure_loop.checkpoint.paths import Names, PathLike, same_place
from pure_loop.checkpoint.run_folder import Links, Retention, RunFolder
from pure_loop.checkpoint.selection import Contents
from pure_loop.checkpoint.signals import HeldSignals, SignalLike, any_came, signal_name
from pure_loop.checkpoint.storage import storage_of
from pure_loop.checkpoint.weights import refuse_unwritable
from pure_loop.errors import ArgumentError, ArgumentTypeError, NonFiniteError
from pure_loop.event import Event
from pure_loop.ranges import AtLeast, checked
from pure_loop.state import State
from pure_loop.time import Time, TimeUnit

__all__ = ["CheckpointSaver"]

EXPECTED_FAILURES = {"completion": "evaluate and predict have no checkpoint events, and refuse it"}

_log = get_logger("pure_loop.checkpoint")

_AT_LEAST_ONE = "a whole number of at least 1, or None: at least one checkpoint has to stay to resume from"


@checked
class CheckpointSaver(Callback):
    """Saves States to a folder at intervals and where training ends, beside training.

    A State is a value, so a thread writes it while the next steps run; two are under way at most. What goes wrong
    there is raised at the next BATCH_CHECKPOINT, EPOCH_CHECKPOINT or FIT_END. A file appears whole or not at all.
    Where the stream ends with an error while a batch is loaded (a worker died) or in an evaluation, the State of the
    last boundary is saved before the error is raised, if a batch was trained on. Of several ranks the first one saves.
    Where each holds a part of the State (``parallel="shard"``) all of them do, to a folder ``*.sharded`` in the place
    of the file; a signal to one of them stops them all, one boundary later.

    A folder has one run's checkpoints. Where it holds those of another run, training doesn't start, unless
    ``overwrite=True``. A run continues an earlier one, and its checkpoints, with ``autoresume``, or from a State or a
    ``load_path`` of which the folder holds nothing that is further on.

    Args:
        folder: where to, made if it isn't there; a URL is opened by fsspec. It may have fields such as ``{run_name}``,
            ``{start}`` (when ``fit`` was called, in whole seconds since 1970) and ``{epoch}`` (where the run starts).
        interval: how often: ``"1ep"``, ``"100ba"``, ``"30m"``, ``"0.1dur"``, or a pure function of the State; 0: only
            where training ends.
        filename: a pattern of the same fields, with the counts of the State that is saved.
        keep_last: how many of the newest stay; None: all, or with ``keep_best`` one.
        keep_best: how many stay of those at which ``metric`` was measured and best.
        metric: label of an evaluator and name, ``"val/accuracy"``.
        mode: whether the best is the largest, ``"max"``, or the smallest, ``"min"``. None: known from the metric's
            name, such as ``loss``, ``accuracy`` or ``f1``.
        latest: the name of a link to the newest file; None: no link. A remote folder has none.
        best: with ``keep_best``, the name of a link to the best file; None: no link. Where there are no links, as in a
            remote folder, it is a text file that holds the name. :func:`pure_loop.best_path` needs neither.
        weights_only: save the weights alone, as ``pl.save(..., weights_only=True)`` does: for other programs, not to
            resume from, so ``autoresume`` needs another folder. A file with a score has the weights that were measured:
            with ``ema``, ``swa`` and the like, those of the average. Others have the weights that are trained.
        trained_only: leave out frozen parameters, as ``pl.save(..., trained_only=True)`` does.
        exclude: what is left out of States, ``"opt_state"`` or ``"algorithm_state/NAME"`` (a glob): training goes on
            from such a file by ``pl.load(path, model=..., exclude=...)`` alone, with what is missing begun anew.
        overwrite: replace what another run has left in the folder under names of this pattern: it is removed as soon as
            the first State of this run is saved.
        background: write in a thread while training continues, or before it does.
        signals: names such as ``"USR1"``, or numbers. On these the State of the next boundary is saved, and then the
            signal acts: Ctrl-C raises KeyboardInterrupt, SIGTERM and others end the program. While a batch is loaded,
            and in an evaluation, the State of the last boundary is saved instead of waiting for the next one. A second
            signal acts at once, unless it follows within half a second.
        stop_before: a time limit of the job, ``"19h50m"``, counted from FIT_START. The run stops at the boundary
            after which one batch more, its evaluation and the save might exceed it. The State is saved, and the program
            ends with exit code 75 (``SystemExit(pl.checkpoint.REQUEUE)``), which asks to be run again. All ranks stop
            together.

    Raises:
        ArgumentError, ArgumentTypeError: at once.
        RunExistsError: (a FileExistsError) at FIT_START, before any training, where the folder holds another run.
        CheckpointWriteError: (an OSError) at FIT_START, before any training, where the folder can't be written to;
            later at the event that follows.

    >>> import pure_loop as pl
    >>> saver = CheckpointSaver("runs/1", interval="100ba", keep_last=2, keep_best=1, metric="val/loss", mode="min")
    """

    # The others hold signals back as well, or they would be gone before the first one has saved.
    all_ranks = True

    # What else a run leaves in the folder, by a regular expression.
    _beside = ""

    def __init__(
        self,
        folder: PathLike,
        *,
        interval: CadenceLike = "1ep",
        filename: str = f"ep{{epoch}}-ba{{batch}}{SUFFIX}",
        keep_last: Annotated[int | None, AtLeast(1, wanted=_AT_LEAST_ONE)] = None,
        keep_best: Annotated[int | None, AtLeast(1, wanted=_AT_LEAST_ONE)] = None,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        latest: str | None = "latest",
        best: str | None = "best",
        weights_only: bool = False,
        trained_only: bool = False,
        exclude: str | Iterable[str] = (),
        overwrite: bool = False,
        background: bool = True,
        signals: Iterable[SignalLike] = ("TERM", "INT"),
        stop_before: str | Time | None = None,
    ) -> None:
        storage_of(folder)
        where = Pattern(folder, "folder")
        self.folder = where.text
        due = as_predicate(interval, "interval")
        if due is None:
            raise ArgumentTypeError('interval=None: write how often to save, such as "1ep" or "100ba".')
        self.interval = due
        self._scored = Scored(keep_best, metric, mode)
        kinds = check_flag("weights_only", weights_only), check_flag("trained_only", trained_only)
        self._contents = Contents(*kinds, exclude)
        retention = Retention(keep_last, keep_best, self._scored.largest)
        options = {"weights_only": kinds[0], "overwrite": check_flag("overwrite", overwrite)}
        names, links = Names(filename, SUFFIX), Links(latest, best)
        self._folder = RunFolder(where, names, retention, links, **options, beside=self._beside)
        self._writer = StateWriter(self._folder, self._contents, beside=background)
        self._held = HeldSignals(signals)
        self._limit = read_limit(stop_before)
        # Where each rank holds a part of the State.
        self._vote: StopConsensus | None = None
        self._called: Run | None = None  # that it was bound to last
        # The State that was saved last, by its batch and its event, and where.
        self._saved: tuple[int, Event | None, str] | None = None
        self._began, self._said = 0, ""

    @property
    def place(self) -> str:
        """The folder of the run that started last, its fields put in; before, as it was written."""
        return self._folder.path

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: it would never save, by its metric not, or another saver has files of the same names.
        """
        if self._scored.metric is not None:
            refuse_members(run, "CheckpointSaver(keep_best=)", "each is best at another batch; save state.member(i).")
        self._called = run
        if run.autoresume is not None and not self._contents.is_whole and same_place(self.folder, run.autoresume):
            what = "weights_only=True" if self._contents.weights_only else f"exclude={list(self._contents.exclude)}"
            raise ArgumentError(
                f"CheckpointSaver({self.folder!r}, {what}) saves to the folder of autoresume, which resumes from whole "
                "States: give it a folder of its own."
            )
        if run.function in ("evaluate", "predict"):
            raise ArgumentError(
                f"{run.function} has no checkpoint events, so CheckpointSaver would never save: leave it out, or save "
                "the last State yourself, pl.save(state, path)."
            )
        savers = [callback for callback in run.callbacks if isinstance(callback, CheckpointSaver)]
        if self._limit is not None:
            resumes = any(saver._contents.is_whole for saver in savers)
            self._limit.refuse_endless(counts=run.function != "drive", resumes=resumes)
        if run.function == "drive":
            return
        if run.order == "2021":
            raise ArgumentError(
                "order='2021' has no checkpoint events, so CheckpointSaver would never save: take the current order, "
                "or save in the loop's body, pl.save(state, path), at BATCH_END or EPOCH_END."
            )
        interval = self.interval.interval if isinstance(self.interval, Cadence) else None
        if interval is not None and interval.unit is TimeUnit.ITERATION and run.iteration_length is None:
            raise ArgumentError(
                f"CheckpointSaver(interval={str(interval)!r}) counts iterations, and iteration_length is not "
                "given, so it would never save."
            )
        self._scored.refuse_unmeasured(run.metrics)
        savers.remove(self)  # once: the same saver may stand in the list twice
        for saver in savers:
            self._folder.refuse_same(saver._folder)
        run.at_end.append(self._closed)

    def saves_to(self, folder: PathLike) -> bool:
        """Whether a run resumes from what this saves to a folder."""
        return self._contents.is_whole and same_place(self.folder, folder)

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        is_fit = self._called is not None and self._called.function == "fit"
        self._held.run = self._called if is_fit else None
        self._folder.settle(self._fields(state))
        if self._contents.trained_only:
            refuse_no_base(state)
        self._contents.refuse_unmatched(state)
        if together := in_parts(state):
            self._vote = StopConsensus()
            self._writer.coordinator = Coordinator()
        if self.rank == 0:
            # What can't be saved is an error now, not after the first epoch.
            if self._contents.weights_only:
                refuse_unwritable(state)
            else:
                write_document(state, parts=together)
            self._folder.open(state, self._scored.metric, self._called, type(self).__name__)
        self._scored.begin({} if self._held.boundary is None else self._held.boundary.evaluated)
        self._saved, self._said, self._began = None, "", state.timestamp.batch
        self._note(state)
        if self._limit is not None:
            self._limit.begin(state, 1 if self._held.run is None else self._held.run.ranks)
        self._held.listen()

    def _fields(self, state: State) -> Fields:
        """The fields of paths: on all ranks those of the first one."""
        run = self._called
        fields = (run or Run(function="drive", callbacks=())).fields(state.timestamp)
        if run is None or run.ranks == 1 or not {*OF_RUN} & self._folder.fields:
            return fields
        return of_first_rank(fields, self.folder)

    def eval_before_all(self, state: State, logger: LoggerGroup) -> None:
        self._scored.begins(state)

    def eval_start(self, state: State, logger: LoggerGroup) -> None:
        if self._contents.weights_only:
            self._scored.evaluates(state)

    def eval_batch_end(self, state: State, logger: LoggerGroup) -> None:
        # Ranks with parts of a State save it together, at a boundary alone.
        boundary = self._held.boundary
        if boundary is None or boundary.state is None or self._held.caught is None or self._vote or self.rank:
            return
        self._stop(boundary.state, measured=False)

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        self._scored.evaluated(state)

    def batch_checkpoint(self, state: State, logger: LoggerGroup) -> None:
        self._at(state, Event.BATCH_END, logger)
        # Called on all ranks, and at each batch.
        if self._limit is not None and self._limit.is_near(state) and not state.has_ended():
            logger.flush()
            self._requeue(state, self._limit)

    def epoch_checkpoint(self, state: State, logger: LoggerGroup) -> None:
        self._at(state, Event.EPOCH_END, logger)

    def iteration_checkpoint(self, state: State, logger: LoggerGroup) -> None:
        self._at(state, Event.ITERATION_END, logger)

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        self._writer.wait()
        if self._vote is not None:
            self._held.caught = self._vote.settle() or self._held.caught

    def close(self) -> None:
        why = sys.exception()
        came = self._held.came or any_came(self._held.run)
        try:
            with closing(self._writer):
                self._rescue(why, came)
        except Exception as error:
            if came is not None:
                _log.error("%s: not saved: %s", signal_name(came), error)
            # What ended training on this rank, or on another, ended what was being saved as well.
            if self._writer.coordinator is None or why is None or isinstance(why, GeneratorExit):
                raise
            why.add_note(str(error))
        finally:
            for group in (self._writer.coordinator, self._vote):
                if group is not None:
                    group.close()
            self._writer.coordinator = self._vote = None
            if self._held.run is None:
                self._held.act()

    def _closed(self) -> None:
        """After all else of the stream is closed: let the signal act that was held back, if one was."""
        if self._called is self._held.run:
            self._called = None
        self._held.run = None
        self._held.act()

    def _rescue(self, why: BaseException | None, came: int | None) -> None:
        """Where a stream ends early: save the State of the last boundary, if no step has written to it since."""
        state = None if self._held.boundary is None else self._held.boundary.state
        if why is None and came is not None and self._saved is not None:
            self._writer.wait()
            self._say(signal_name(came), *self._saved)
        # What ended the stream may be that a State can't be saved.
        if why is None or why is self._writer.failed or isinstance(why, NonFiniteError):
            return
        if state is None or not self._saves:
            return
        # Without a signal the loop's body may be left wherever it likes; and not all ranks need come here.
        if came is None and (
            isinstance(why, GeneratorExit)
            or self._writer.coordinator is not None
            or state.timestamp.batch == self._began
        ):
            return
        name = f"{type(why).__name__}: {why}" if came is None else signal_name(came)
        if isinstance(why, SystemExit) and why.code == REQUEUE:
            name = "stop_before"  # of another saver
        self._finish(state, name, measured=False)

    def _stop(self, state: State, *, measured: bool) -> None:
        """Save the State, and let the signal act that asked for it."""
        assert self._held.caught is not None
        self._finish(state, signal_name(self._held.caught), measured=measured)
        self._held.stop()

    def _requeue(self, state: State, limit: TimeLimit) -> None:
        """Save the State, and end the program with the exit code that asks to run it again.

        Raises:
            SystemExit: on all ranks.
        """
        measured = self._scored.is_measured(state, evaluated=self._contents.weights_only)
        save = partial(self._finish, state, f"stop_before={limit.text!r}", measured=measured)
        if self._writer.coordinator is None and self._held.run is not None and self._held.run.ranks > 1:
            # The first rank that ends may have the others killed, so all wait until the file is complete.
            with closing(Coordinator()) as meeting:
                meeting.together(self.place, save)
        else:
            save()
        raise SystemExit(REQUEUE)

    def _finish(self, state: State, why: str, *, measured: bool) -> None:
        """On ranks that save: save a State, unless it is saved, and say where it is and how to resume."""
        if not self._saves:
            return
        if self._saved is None or self._saved[:2] != (state.timestamp.batch, state.event):
            self._save(state, measured=measured)
        self._writer.wait()
        assert self._saved is not None
        self._say(why, *self._saved)

    def _say(self, why: str, batch: int, event: Event | None, path: str) -> None:
        if path == self._said or self.rank:
            return
        self._said = path
        folder = None if self._called is None else self._called.autoresume
        same_command = folder is not None and self.saves_to(folder)
        warn_on_terminal(_log, self._contents.saved(why, batch, path, same_command=same_command))

    def _note(self, state: State) -> None:
        """Remember the State of a boundary until the next batch is loaded."""
        if self._held.boundary is not None:
            self._held.boundary.state = state

    def _at(self, state: State, counted: Event, logger: LoggerGroup) -> None:
        self._note(state)
        self._writer.check()
        stop = self._held.caught
        if self._vote is not None:  # all have to save the same State
            stop = self._vote.cast(self._held.caught)
            self._held.caught = self._held.caught or stop
        interval = self.interval
        is_due = interval.at(state, counted) if isinstance(interval, Cadence) else interval(state)
        measured = self._scored.is_measured(state, evaluated=self._contents.weights_only)
        if not self._saves or not (stop or is_due or state.has_ended()):
            return
        # A run that resumes from this State does not record again what was recorded before it.
        logger.flush()
        if stop:
            self._stop(state, measured=measured)
        else:
            self._save(state, measured=measured)

    @property
    def _saves(self) -> bool:
        """Whether this rank saves: the first one, and each that holds a part of the State."""
        return self.rank == 0 or self._writer.coordinator is not None

    def _save(self, state: State, *, measured: bool) -> None:
        place = state.timestamp.batch, state.event
        if self._contents.weights_only and measured:
            state = self._scored.with_measured_weights(state)
        path = self._writer.save(state, partial(self._notes, measured=measured), first=self.rank == 0)
        self._saved = *place, path

    def _notes(self, state: State, *, measured: bool) -> dict[str, object]:
        notes = self._scored.notes(state) if measured else {}
        if self._held.run is not None and self._held.run.run_name is not None:
            notes["run_name"] = self._held.run.run_name
        return notes
