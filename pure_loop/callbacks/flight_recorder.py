"""Keeps what a run needs so that every event of it can be visited again: States at an interval, and a journal."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated

from torch import Tensor

from pure_loop._internal.arguments import path_text
from pure_loop._internal.closing import Closing
from pure_loop._internal.logs import get_logger
from pure_loop._internal.owned_files import naming, refuse_other_run, release, reserve
from pure_loop.cadence import CadenceLike
from pure_loop.callback import LoggerGroup, Run
from pure_loop.callbacks._intervals import is_due, read_interval
from pure_loop.callbacks.checkpoint_saver import CheckpointSaver
from pure_loop.checkpoint.digests import digest_of, digest_of_batch
from pure_loop.checkpoint.files import SUFFIX, in_parts, save
from pure_loop.checkpoint.flight import (
    ENDED,
    JOURNAL,
    RUN,
    ends_in_a_line,
    facts_of,
    journal_loss,
    line_of,
    read_facts,
    settings_of,
    write_facts,
)
from pure_loop.errors import ArgumentError, CheckpointError, NonFiniteError
from pure_loop.event import Event
from pure_loop.ranges import AtLeast, checked
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["FlightRecorder"]

_log = get_logger("pure_loop.checkpoint")

EXPECTED_FAILURES = {"completion": "evaluate and predict have no checkpoint events, and refuse it"}


@checked
class FlightRecorder(CheckpointSaver):
    """Keeps States at an interval, and a line of a journal for each batch, for :func:`pure_loop.rewind`.

    The folder has the States, ``start-ba0.safetensors`` of FIT_START and ``ba100.safetensors``; ``journal.jsonl``:
    batch, epoch, loss, seconds and, where it is due, a digest of the parameters; and ``run.json``: the versions and
    settings of the run. A run that resumes adds to them, and a line that a killed run did not finish is left out.
    States are written in a thread while training continues. Of several ranks the first one records.

    Args:
        folder: where to; one run's. It may have the fields of ``CheckpointSaver``'s: ``"flights/{run_name}"``.
        keep: how often a State is kept: ``"100ba"``, ``"1ep"``; the first one always is. From it the events up to the
            next one are computed again.
        digest: how often the journal has a digest of all parameters, which are read for it; 0: never.
        in_memory: how many of the last States ``recorder.states`` has, at BATCH_CHECKPOINT; their memory is not written
            to by the steps after them.
        keep_last: how many of the newest States stay in the folder, besides those of FIT_START; None: all.
        overwrite: remove what another run has recorded in the folder, at FIT_START.

    Raises:
        ArgumentError, ArgumentTypeError: at once; at FIT_START for parameters in shards.
        RunExistsError: (a FileExistsError) at FIT_START, before any training, where the folder holds another run.
        CheckpointWriteError: (an OSError) at FIT_START, before any training, where the folder can't be written to.

    >>> import tempfile, torch, pure_loop as pl
    >>> folder = tempfile.mkdtemp()
    >>> net, data = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.zeros(4, 1))] * 6
    >>> recipe = pl.Recipe(data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> state = recipe.run(net, callbacks=[FlightRecorder(folder, keep="5ba")])
    >>> event, state = next(recipe.rewind(net, folder, "8ba", "after_loss"))
    >>> event.name, state.timestamp.batch
    ('AFTER_LOSS', 8)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: CadenceLike = "100ba",
        digest: CadenceLike = "10ba",
        in_memory: Annotated[int, AtLeast(0)] = 0,
        keep_last: Annotated[int | None, AtLeast(1)] = None,
        overwrite: bool = False,
    ) -> None:
        if "://" in path_text(folder, "FlightRecorder folder"):
            raise ArgumentError(
                f"FlightRecorder({os.fspath(folder)!r}): its journal is a local file; give a local folder."
            )
        super().__init__(
            folder,
            interval=keep,
            filename=f"ba{{batch}}{SUFFIX}",
            keep_last=keep_last,
            latest=None,
            overwrite=overwrite,
            signals=(),
        )
        self._digest = read_interval(digest, "FlightRecorder digest")
        self.states: deque[State] = deque(maxlen=in_memory)
        self._journal: FileIO | None = None
        self._waiting: list[tuple[Timestamp, str | None, Tensor, float]] = []
        self._settings: dict[str, object] = {}
        self._facts: dict[str, object] | None = None
        self._handled: BaseException | None = None
        self._last = 0.0

    _beside = rf"start-ba[0-9]+\{SUFFIX}|{re.escape(JOURNAL)}|{re.escape(RUN)}"

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: a run of ``evaluate``, ``predict`` or of the order of 2021; or another
                saver of this folder.
        """
        super().bind(run)
        self._settings = settings_of(run)

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        if in_parts(state):
            raise ArgumentError(
                "FlightRecorder keeps whole States, and with parallel='shard' each rank has a shard of them: record "
                "with parallel='replicate', or save sharded States by a CheckpointSaver."
            )
        super().fit_start(state, logger)
        # A run in an `except` of another one has the error of that around it.
        self._handled = sys.exception()
        self.states.clear()
        self._waiting.clear()
        if self.rank:
            return
        facts_there = self._facts_there(state)
        self._folder.clear()
        # Of another name than those of which ``keep_last`` removes the oldest.
        save(state, os.path.join(self.place, f"start-ba{state.timestamp.batch}{SUFFIX}"))
        # What the run's first batch was stays known, also where a command is run again that has nothing left to do.
        facts = {name: value for name, value in facts_there.items() if name == "first_batch"}
        self._facts = {**facts_of(state), **self._settings, **facts}
        self._write_facts()
        path = Path(self.place, JOURNAL)
        reserve(path, "FlightRecorder")
        with naming(path, "FlightRecorder"):
            self._journal = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        if not ends_in_a_line(os.fspath(path)):
            self._append(b"\n")  # of a line that a killed run did not finish
        self._last = time.perf_counter()

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        if self._journal is None:
            return
        if self._facts is not None and "first_batch" not in self._facts:
            self._facts["first_batch"] = [state.timestamp.batch, digest_of_batch(state.batch)]
            self._write_facts()
        seconds = time.perf_counter()
        passed, self._last = seconds - self._last, seconds
        digest = digest_of(state.params) if is_due(self._digest, state, Event.BATCH_END) else None
        self._waiting.append((state.timestamp, digest, journal_loss(state), passed))
        # Numbers of a device are waited for where its parameters are read anyway.
        if digest is not None or state.device.type == "cpu" or len(self._waiting) >= 100:
            self._write_lines()

    def batch_checkpoint(self, state: State, logger: LoggerGroup) -> None:
        super().batch_checkpoint(state, logger)
        if self.states.maxlen:
            self.states.append(state)

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        super().fit_end(state, logger)
        if self._journal is not None:
            self._write_lines()
            self._append(ENDED.encode())

    def close(self) -> None:
        why = sys.exception()
        if why is not self._handled and isinstance(why, NonFiniteError) and why.index is not None and not self.rank:
            why.add_note(
                f'To look at the batch: event, state = next(recipe.rewind(model, {self.place!r}, "{why.index}ba", '
                '"batch_start")), where recipe = pl.Recipe(train_dataloader, ...) has the arguments of this run.'
            )
        with Closing(self._close_journal):
            super().close()

    def _close_journal(self) -> None:
        journal, self._handled = self._journal, None
        if journal is not None:
            with Closing(journal.close, lambda: release(Path(self.place, JOURNAL))):
                self._write_lines()
            self._journal = None

    def _facts_there(self, state: State) -> Mapping[str, object]:
        """The facts of the run that is continued; nothing where one begins, or they can't be read.

        Raises:
            RunExistsError: they are another run's.
        """
        if self._folder.replaces:
            return {}
        try:
            facts = read_facts(self.place)
        except CheckpointError as error:
            _log.warning("FlightRecorder writes it anew: %s", error)
            return {}
        if facts.get("seed", state.seed) != state.seed:
            why = f" (with seed {facts['seed']}; this one has {state.seed})"
            refuse_other_run("FlightRecorder", self.place, [JOURNAL, RUN], why=why)
        return facts

    def _write_facts(self) -> None:
        with naming(os.path.join(self.place, RUN), "FlightRecorder"):
            write_facts(self.place, self._facts or {})

    def _write_lines(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            lines = [line_of(at, float(loss), seconds, digest) + "\n" for at, digest, loss, seconds in waiting]
            self._append("".join(lines).encode())

    def _append(self, lines: bytes) -> None:
        """Add whole lines, in one call of the system unless the disk is full."""
        assert self._journal is not None
        with naming(Path(self.place, JOURNAL), "FlightRecorder"):
            while lines:
                lines = lines[self._journal.write(lines) :]
