"""Saving checkpoints while training goes on."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pure_loop._values import read_flag
from pure_loop.cadence import Cadence, CadenceLike, as_predicate
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.checkpoint.background import Background
from pure_loop.checkpoint.document import write_document
from pure_loop.checkpoint.files import SUFFIX, in_parts, write_state
from pure_loop.checkpoint.keeping import Names, Saved, is_name
from pure_loop.checkpoint.places import PathLike, place
from pure_loop.checkpoint.run_folder import RunFolder
from pure_loop.checkpoint.signals import HeldSignals, any_came
from pure_loop.checkpoint.snapshot import snapshot, streams_of
from pure_loop.donation import protect
from pure_loop.errors import ArgumentError, ArgumentTypeError, NonFiniteError
from pure_loop.event import Event
from pure_loop.loop import Fit, reached
from pure_loop.metrics import DEFAULT_NAMES, Metric
from pure_loop.state import State

if TYPE_CHECKING:
    from pure_loop.checkpoint.meeting import Meeting, Vote

__all__ = ["CheckpointSaver"]

_log = logging.getLogger("pure_loop.checkpoint")


class CheckpointSaver(Callback):
    """Saves States to a folder at intervals and where training ends, beside training.

    A State is a value, so a thread writes it while the next steps run; two are under way at most. What goes wrong there
    is raised at the next BATCH_CHECKPOINT, EPOCH_CHECKPOINT or FIT_END. A file appears whole or not at all. Where the
    stream ends with an error while a batch is loaded (a worker died) or in an evaluation, the State of the last
    boundary is saved before the error is raised, if a batch was trained on. Of several
    ranks the first one saves. Where each holds a part of the State (``parallel="shard"``) all of them do, to a folder
    ``*.sharded`` in the place of the file; a signal to one of them stops them all, one boundary later.

    Args:
        folder: where to, made if it isn't there; a URL is opened by fsspec.
        interval: how often: ``"1ep"``, ``"100ba"``, ``"30m"``, ``"0.1dur"``, or a pure function of the State; 0: only
            where training ends.
        filename: a pattern of counts of the timestamp: ``epoch``, ``batch``, ``sample``, ``token``, ``iteration``.
        keep_last: how many of the newest stay; None: all, or with ``keep_best`` one.
        keep_best: how many stay of those at which ``metric`` was measured and best.
        metric: label of an evaluator and name, ``"val/accuracy"``.
        mode: whether the best is the largest, ``"max"``, or the smallest, ``"min"``.
        latest: the name of a link to the newest file; None: no link. A remote folder has none.
        background: write beside training, or before it goes on.
        signals: on these the State of the next boundary is saved, and then the signal acts: Ctrl-C raises
            KeyboardInterrupt, SIGTERM ends the program. While a batch is loaded, and in an evaluation, the State of the
            last boundary is saved instead of waiting for the next one. A second signal acts at once, unless it follows
            within half a second.

    Raises:
        ArgumentError, ArgumentTypeError: at once.
        CheckpointWriteError: (an OSError) at FIT_START, before any training, where the folder can't be written to;
            later at the event that follows.

    >>> import pure_loop as pl
    >>> saver = CheckpointSaver("runs/1", interval="100ba", keep_last=2, keep_best=1, metric="val/loss", mode="min")
    """

    # The others hold signals back as well, or they would be gone before the first one has saved.
    all_ranks = True

    resumes: bool = False
    """Whether ``autoresume`` of the same call reads this folder."""

    def __init__(
        self,
        folder: PathLike,
        *,
        interval: CadenceLike = "1ep",
        filename: str = f"ep{{epoch}}-ba{{batch}}{SUFFIX}",
        keep_last: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        latest: str | None = "latest",
        background: bool = True,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        place(folder)
        self.folder = os.fspath(folder)
        due = as_predicate(interval, "interval")
        if due is None:
            raise ArgumentTypeError('interval=None: write how often to save, such as "1ep" or "100ba".')
        self.interval = due
        names = Names(filename, SUFFIX)
        last, best = _count(keep_last, "keep_last"), _count(keep_best, "keep_best")
        self._metric = _read_metric(keep_best, metric, mode)
        if latest is not None and (not isinstance(latest, str) or not is_name(latest)):
            raise ArgumentError(f'latest={latest!r}: the name of a link in the folder, such as "latest", or None.')
        if latest is not None and latest.endswith(SUFFIX):
            raise ArgumentError(f"latest={latest!r}: names that end with {SUFFIX!r} are those of checkpoints.")
        self._label, _, self._measure = str(self._metric).partition("/")
        self._folder = RunFolder(self.folder, names, last=last, best=best, largest=mode == "max", link=latest)
        self._background = read_flag("background", background)
        self._held = HeldSignals(signals)
        self._writer = Background()
        # At which batch the metric was measured.
        self._measured: int | None = None
        # Where each rank holds a part of the State.
        self._meeting: Meeting | None = None
        self._vote: Vote | None = None
        self._fit: Fit | None = None
        self._began = 0
        # The State that was saved last, by its batch and its event, and where.
        self._saved: tuple[int, Event | None, str] | None = None
        self._said = ""

    def serve(self, fit: Fit) -> None:
        """Before the stream begins: save the State of the last boundary of this call of ``fit``, too."""
        self._fit = self._held.fit = fit

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        together = in_parts(state)
        if together:
            from pure_loop.checkpoint.meeting import Meeting, Vote  # with it comes torch.distributed

            self._vote = Vote()
            self._meeting = Meeting()
        if self.rank == 0:
            write_document(state, parts=together)  # what can't be saved is an error now, not after the first epoch
            self._folder.open(state, self._metric)
        self._measured = self._saved = None
        self._said = ""
        self._began = state.timestamp.batch
        self._note(state)
        self._held.listen()

    def eval_batch_end(self, state: State, logger: LoggerGroup) -> None:
        # Ranks with parts of a State save it together, at a boundary alone.
        boundary = None if self._fit is None else self._fit.boundary.state
        if boundary is None or self._held.caught is None or self._vote is not None or self.rank:
            return
        self._stop(boundary, measured=False)

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        if self._metric is not None and state.evaluator == self._label:
            self._measured = state.timestamp.batch
            self._refuse_metric(self._metric, [f"{self._label}/{name}" for name in state.metrics[self._label]])

    def refuse_unmeasured(self, evaluators: Mapping[str, Sequence[Metric] | None]) -> None:
        """Refuse a metric that is sure not to be measured.

        Args:
            evaluators: the metrics of each by its label; None: those that fit its outputs.

        Raises:
            ArgumentError: says which there are.
        """
        if self._metric is None:
            return
        if self._label not in evaluators:
            raise ArgumentError(
                f"metric={self._metric!r}: there is no evaluator {self._label!r} in evaluators=; there are "
                f"{', '.join(evaluators) or 'none'}."
            )
        metrics = evaluators[self._label]
        names = DEFAULT_NAMES if metrics is None else [metric.name for metric in metrics]
        self._refuse_metric(self._metric, [f"{self._label}/{name}" for name in names])

    def refuse_same_files(self, other: CheckpointSaver) -> None:
        """
        Raises:
            ArgumentError: both would save to files of the same names, and remove each other's.
        """
        if self._folder.alike(other._folder):
            raise ArgumentError(
                f"two CheckpointSavers save to {self.folder} under the same names: give each a folder, or a filename "
                f"such as 'milestone-ep{{epoch}}-ba{{batch}}{SUFFIX}', of its own."
            )

    def _refuse_metric(self, metric: str, measured: Sequence[str]) -> None:
        if metric not in measured:
            raise ArgumentError(f"metric={metric!r} is not measured; there are {', '.join(measured)}.")

    def batch_checkpoint(self, state: State, logger: LoggerGroup) -> None:
        self._at(state, Event.BATCH_END)

    def epoch_checkpoint(self, state: State, logger: LoggerGroup) -> None:
        self._at(state, Event.EPOCH_END)

    def iteration_checkpoint(self, state: State, logger: LoggerGroup) -> None:
        self._at(state, Event.ITERATION_END)

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        self._writer.wait()
        if self._vote is not None:
            self._held.caught = self._vote.settle() or self._held.caught

    def close(self) -> None:
        why = sys.exception()
        came = self._held.came or any_came(self._fit)
        try:
            try:
                self._rescue(why, came)
            finally:
                self._writer.finish()
        except Exception as error:
            if came is not None:
                _log.error("%s: not saved: %s", signal.Signals(came).name, error)
            # What ended training on this rank, or on another, ended what was being saved as well.
            if self._meeting is None or why is None or isinstance(why, GeneratorExit):
                raise
            why.add_note(str(error))
        finally:
            for group in (self._meeting, self._vote):
                if group is not None:
                    group.close()
            self._meeting = self._vote = None
            if self._fit is None:
                self._held.act()

    def closed(self) -> None:
        """After all else of the stream is closed: let the signal act that was held back, if one was."""
        self._fit = self._held.fit = None
        self._held.act()

    def _rescue(self, why: BaseException | None, came: int | None) -> None:
        """Where a stream ends early: save the State of the last boundary, if no step has written to it since."""
        state = None if self._fit is None else self._fit.boundary.state
        if why is None and came is not None and self._saved is not None:
            self._writer.wait()
            self._say(signal.Signals(came).name, *self._saved)
        if state is None or why is None or isinstance(why, NonFiniteError) or (self.rank and self._meeting is None):
            return
        if why is self._writer.failed:
            return  # what ended the stream is that a State can't be saved
        # Without a signal the loop's body may be left wherever it likes; and not all ranks need come here.
        if came is None and (
            isinstance(why, GeneratorExit) or self._meeting is not None or state.timestamp.batch == self._began
        ):
            return
        name = f"{type(why).__name__}: {why}" if came is None else signal.Signals(came).name
        self._finish(state, name, measured=False)

    def _stop(self, state: State, *, measured: bool) -> None:
        """Save the State, and let the signal act that asked for it."""
        assert self._held.caught is not None
        self._finish(state, signal.Signals(self._held.caught).name, measured=measured)
        self._held.stop()

    def _finish(self, state: State, why: str, *, measured: bool) -> None:
        """Save a State, unless it is saved, and say where it is and how to resume."""
        if self._saved is None or self._saved[:2] != (state.timestamp.batch, state.event):
            self._save(state, measured=measured)
        self._writer.wait()
        assert self._saved is not None
        self._say(why, *self._saved)

    def _say(self, why: str, batch: int, event: Event | None, path: str) -> None:
        if path == self._said:
            return
        self._said = path
        how = "the same command resumes from it" if self.resumes else "resume it with fit(..., load_path=...)"
        _log.warning("%s: the State of batch %d is saved in %s: %s", why, batch, path, how)

    def _note(self, state: State) -> None:
        """Remember the State of a boundary until the next batch is loaded."""
        if self._fit is not None:
            self._fit.boundary.state = state

    def _at(self, state: State, counted: Event) -> None:
        self._note(state)
        self._writer.check()
        if self._vote is not None:
            # All have to save the same State.
            stop = self._vote.cast(self._held.caught)
            self._held.caught = self._held.caught or stop
            asked = stop is not None
        else:
            asked = self._held.caught is not None
        due = self.interval
        now = due.at(state, counted) if isinstance(due, Cadence) else due(state)
        saves = self.rank == 0 or self._meeting is not None
        measured = self._measured == state.timestamp.batch
        if saves and asked:
            self._stop(state, measured=measured)
        elif saves and (now or reached(state)):
            self._save(state, measured=measured)

    def _save(self, state: State, *, measured: bool) -> None:
        meeting, folder = self._meeting, self._folder
        name = folder.name_of(state, parts=meeting is not None)
        path = folder.path_of(name)
        self._saved = state.timestamp.batch, state.event, path
        # Taken out of it by the job, so that the State is nobody's as soon as it is copied.
        waiting = [(state, protect(state))]
        streams = streams_of(state)

        def job() -> None:
            state, release = waiting.pop()
            try:
                if self._background:
                    kept, state = state, snapshot(state)
                    if state is not kept:
                        release()
                    del kept
                notes: dict[str, Any] = {}
                with streams:
                    if measured:
                        score = float(state.metrics[self._label][self._measure])
                        # NaN and infinity are never the best, and JSON doesn't have them.
                        notes = {"metric": self._metric, "score": score if math.isfinite(score) else None}
                    if meeting is None:
                        write_state(state, path, notes)
                    else:
                        from pure_loop.checkpoint.sharded import write

                        write(meeting, state, path, notes)
                if self.rank == 0:
                    folder.add(Saved(name, state.timestamp.batch, notes.get("score")))
            except Exception as error:
                error.add_note(f"raised while {path} was saved")
                raise
            finally:
                release()

        self._writer.submit(job)
        if not self._background:
            self._writer.wait()


def _count(given: Any, name: str) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int):
        raise ArgumentTypeError(f"{name}={given!r}: give a whole number, or None.")
    if given < 1:
        raise ArgumentError(f"{name}={given}: at least one checkpoint has to stay, or there is nothing to go on from.")
    return given


def _read_metric(best: int | None, metric: Any, mode: Any) -> str | None:
    if best is None:
        if metric is not None or mode is not None:
            raise ArgumentError(f"metric={metric!r} and mode={mode!r} say which are best: keep_best=1 keeps the best.")
        return None
    if not isinstance(metric, str) or not all(metric.partition("/")):
        raise ArgumentError(
            f'metric={metric!r}: for keep_best give the label of an evaluator and the name of a metric, "val/accuracy".'
        )
    if mode not in ("min", "max"):
        raise ArgumentError(f'mode={mode!r}: is the best {metric} the largest, mode="max", or the smallest, "min"?')
    return metric
