"""Writes which tensors a CUDA device allocated, and where in the code, for torch's memory viewer."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import torch

from pure_loop._internal.owned_files import naming
from pure_loop._internal.torch_private import dump_memory_snapshot, record_memory_history
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.callbacks._place import Place
from pure_loop.errors import ArgumentError
from pure_loop.ranges import Duration, checked
from pure_loop.state import State
from pure_loop.time import Time, Timestamp

__all__ = ["MemorySnapshot"]

NEEDS_DEVICE = "cuda"

# How many events a history holds, about 100 MB of a file.
_MOST_EVENTS = 100_000


@checked
class MemorySnapshot(Callback):
    """Records the history of a CUDA device's memory for some batches, and writes it to a file.

    Drop the file, ``<folder>/memory-rank0-ba5.pickle``, on https://pytorch.org/memory_viz: it shows each allocation
    over time with the line of code that made it. The file goes to loggers, too (``log_file``). On several ranks each
    writes its own.

    With ``on_oom=True`` the history is recorded as long as training lasts, its last 100,000 allocations, and written to
    ``<folder>/memory-rank0-oom.pickle`` where an out-of-memory error ends the stream. Recording takes some microseconds
    an allocation.

    Args:
        folder: a local folder, made if it isn't there. It may have the fields ``{run_name}``, ``{start}`` (when ``fit``
            was called, in whole seconds since 1970), ``{epoch}`` and ``{batch}`` (where the run starts) and ``{rank}``;
            on several ranks ``{run_name}`` needs ``fit(run_name=)``.
        start: how much of this call's training passes before the recording begins.
        length: how long it lasts; it is written at the BATCH_END that follows, or at FIT_END.
        on_oom: whether the history is written where memory ran out.
        overwrite: replace the files of another run.

    Raises:
        ArgumentTypeError, ArgumentError: a time that can't be read; from ``fit``: the model is not on a CUDA device.
        RunExistsError: (a FileExistsError) at FIT_START, before any training: another run has files there.
        RuntimeError: this torch records no history of memory.
        OSError: at FIT_START: the folder can't be made.

    >>> snapshot = MemorySnapshot("runs/memory", start="10ba", length="2ba")
    """

    all_ranks = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        start: Annotated[str | Time, Duration(clock=True)] = "2ba",
        length: Annotated[str | Time, Duration(clock=True)] = "3ba",
        on_oom: bool = True,
        overwrite: bool = False,
    ) -> None:
        files = ("memory-rank{rank}-ba{batch}.pickle", "memory-rank{rank}-oom.pickle")
        self._place = Place(folder, *files, where="MemorySnapshot", overwrite=overwrite)
        self._start, self._length, self._on_oom = Time.parse(start), Time.parse(length), on_oom
        self._records = False
        self._device: torch.device | None = None
        # Where this call's training began, and where the window did; None: before it, and after it.
        self._waits_since: Timestamp | None = None
        self._window_since: Timestamp | None = None

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: the model is not on a CUDA device.
        """
        self._place.run = run
        if run.function == "fit" and run.device is not None and run.device.type != NEEDS_DEVICE:
            raise ArgumentError(
                f"MemorySnapshot records the history of a CUDA device's memory, and the model is on {run.device}, "
                "which has none: leave it out; MemoryMonitor records how much memory is used there."
            )

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        """
        Raises:
            RuntimeError: this torch records no history of memory.
            OSError: the folder can't be made.
        """
        self._place.settle(state, self.rank)
        self._place.refuse_others(state)
        Path(self._place.folder).mkdir(parents=True, exist_ok=True)
        self._device = state.device
        self._waits_since, self._window_since = state.timestamp, None
        if self._on_oom:
            self._record(on=True)

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        timestamp = state.timestamp
        if self._waits_since is not None and _passed(self._start, self._waits_since, timestamp):
            self._waits_since, self._window_since = None, timestamp
            self._record(on=True)
        elif self._window_since is not None and _passed(self._length, self._window_since, timestamp):
            self._finish(state, logger)

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        if self._window_since is not None:
            self._finish(state, logger)

    def close(self) -> None:
        try:
            if self._on_oom and self._records and isinstance(sys.exception(), torch.OutOfMemoryError):
                self._write(Path(self._place.of(number=1)))
        finally:
            self._record(on=False)
            self._waits_since = self._window_since = None

    def _finish(self, state: State, logger: LoggerGroup) -> None:
        """Write what the window recorded."""
        self._window_since = None
        path = Path(self._place.of(state))
        self._write(path)
        logger.log_file(path.stem, os.fspath(path))
        if not self._on_oom:
            self._record(on=False)

    def _record(self, *, on: bool) -> None:
        if on is self._records:
            return
        if record_memory_history is None:
            raise RuntimeError(
                "this version of torch records no history of memory: torch.cuda.memory has no _record_memory_history."
            )
        if on:
            record_memory_history(max_entries=_MOST_EVENTS, device=self._device)
        else:
            record_memory_history(enabled=None, device=self._device)
        self._records = on

    def _write(self, path: Path) -> None:
        if dump_memory_snapshot is None:
            raise RuntimeError(
                "this version of torch writes no history of memory: torch.cuda.memory has no _dump_snapshot."
            )
        part = path.with_suffix(".part")
        with naming(path, "MemorySnapshot"):
            dump_memory_snapshot(os.fspath(part))
            part.replace(path)


def _passed(length: Time, since: Timestamp, timestamp: Timestamp) -> bool:
    return timestamp.get(length.unit) - since.get(length.unit) >= length.value
