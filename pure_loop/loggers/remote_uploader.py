"""Uploads files to a remote folder beside training, with retries."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pure_loop._internal.arguments import check_file_name, check_flag, is_path, path_text
from pure_loop._internal.logs import get_logger
from pure_loop._internal.names import FIELDS, Fields, Pattern
from pure_loop._internal.owned_files import refuse_other_run
from pure_loop._internal.processes import in_child
from pure_loop._text import without_secrets
from pure_loop.cadence import CadenceLike
from pure_loop.callback import LoggerGroup, Run
from pure_loop.checkpoint.paths import join
from pure_loop.checkpoint.storage import storage_of
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.loggers._destination import AtIntervals
from pure_loop.ranges import Above, AtLeast, Name, checked
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["RemoteUploader"]

_log = get_logger("pure_loop.loggers")
# What stands for the fields of a URL outside of a run.
_OUTSIDE: Fields = {**dict.fromkeys(FIELDS, 0), "run_name": "run"}


@checked
class RemoteUploader(AtIntervals):
    """Uploads the files that are recorded (``log_file``), and files of other loggers at an interval, in a thread.

    A file appears under its name whole or not at all, where the file system can rename. An upload that fails is tried
    again; what is missing in the end is an error that names it, when the stream closes. A file has to stay until it is
    uploaded; of one that is recorded again under its name before that, only the newer one is uploaded.

    Args:
        url: the folder, ``"s3://bucket/runs/{run_name}"`` or any URL that fsspec opens (S3 needs s3fs besides);
            ``{run_name}`` stands for the name of the run, ``{start}`` for when ``fit`` was called, in whole seconds
            since 1970; ``{epoch}`` and ``{batch}`` say where the run starts, and ``{rank}`` is 0.
        files: local files to upload at each ``interval`` and when everything else of the stream is closed, under their
            names: those of a ``JSONLinesLogger``, for example. One that isn't there yet is left out.
        interval: how often ``files`` are uploaded; 0: at the end only.
        retries: how often an upload is tried again.
        wait: seconds before the second try; before each further one twice as many.
        timeout: seconds that closing the stream waits for uploads.
        overwrite: replace those of ``files`` that another run has uploaded.

    Raises:
        RunExistsError: (a FileExistsError) at FIT_START, before any training, where another run has uploaded ``files``.
        MissingExtraError: fsspec, or its package for this URL, is not installed: ``pip install 'pure_loop[remote]'``.
        ArgumentError, ArgumentTypeError: at once.
        OSError: when the stream closes, for files that could not be uploaded.

    >>> import pathlib, tempfile, fsspec, pure_loop as pl
    >>> path = pathlib.Path(tempfile.mkdtemp(), "notes.txt")
    >>> size = path.write_text("written")
    >>> uploader = RemoteUploader("memory://runs/1")
    >>> uploader.log_file("notes.txt", str(path))
    >>> uploader.close()
    >>> fsspec.filesystem("memory").cat("/runs/1/notes.txt")
    b'written'
    """

    def __init__(
        self,
        url: Annotated[str, Name()],
        *,
        files: Iterable[str | os.PathLike[str]] = (),
        interval: CadenceLike = "1ep",
        retries: Annotated[int, AtLeast(0)] = 3,
        wait: Annotated[float, AtLeast(0)] = 1.0,
        timeout: Annotated[float, Above(0)] = 600.0,
        overwrite: bool = False,
    ) -> None:
        super().__init__(interval, "interval", '"1ep", or 0 for the end only')
        listed = [files] if is_path(files) else list(files)
        for file in listed:
            if not is_path(file) or not os.fspath(file):
                raise ArgumentTypeError(f"RemoteUploader files={files!r}: write a list of paths.")
        names = [Path(file).name for file in listed]
        if len(set(names)) < len(names):
            raise ArgumentError(f"RemoteUploader files={files!r}: two files of one name would replace each other.")
        self._place = Pattern(url, "RemoteUploader url")
        self._overwrite = check_flag("overwrite", overwrite, where="RemoteUploader")
        self._fields: Fields = {**_OUTSIDE, "start": int(time.time())}
        storage_of(self._target)  # what can't be opened is refused now
        self._files = [Path(path_text(file)) for file in listed]
        self._retries, self._wait, self._timeout = retries, wait, timeout
        self._run: Run | None = None
        # Names and paths that are to be uploaded, the oldest first, guarded by the condition.
        self._waiting: dict[str, str] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = self._gives_up = False
        # What could not be uploaded: why, by name.
        self._failed: dict[str, str] = {}
        in_child(self._forget)

    def _forget(self) -> None:
        """In a forked child: what waits is the parent's to upload."""
        self._waiting, self._failed = {}, {}
        self._changed, self._thread = threading.Condition(), None

    def bind(self, run: Run) -> None:
        self._run = run
        self._fields = {name: value for name, value in run.fields(Timestamp()).items() if value is not None}
        # Files of other loggers are complete once these are closed.
        run.at_end.append(self._finish)

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        """
        Raises:
            RunExistsError: files of another run are there under these names, and are not to be replaced.
        """
        run = self._run
        if run is None or run.function != "fit":
            return
        self._fields = run.fields(state.timestamp)
        if self._overwrite or not self._files or run.continues(state.timestamp.batch):
            return
        try:
            there = set(storage_of(self._target).names())
        except Exception as error:  # of any file system; an upload says what is wrong, and is tried again
            _log.warning("RemoteUploader: %s can't be listed: %s", self._target, error)
            return
        names = [file.name for file in self._files if file.name in there]
        if names:
            refuse_other_run("RemoteUploader", self._target, names)

    def log_file(self, name: str, path: str) -> None:
        """Upload a file in the background.

        Raises:
            ArgumentError, ArgumentTypeError: a name that leads out of the folder of the URL.
            FileNotFoundError: there is none.
        """
        check_file_name(name, "RemoteUploader.log_file")
        path = path_text(path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"RemoteUploader: there is no file {path} to upload as {name!r}.")
        with self._changed:
            self._waiting.pop(name, None)
            self._waiting[name] = path
            self._failed.pop(name, None)
            if self._thread is None:
                self._is_closing = self._gives_up = False
                self._thread = threading.Thread(target=self._upload_all, name="RemoteUploader", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _act(self, state: State) -> None:
        self._queue_files()

    def close(self) -> None:
        if self._run is None:  # in no stream
            self._finish()

    def _queue_files(self) -> None:
        for file in self._files:
            if file.is_file():
                self.log_file(file.name, str(file))

    def _finish(self) -> None:
        """Wait for all uploads.

        Raises:
            OSError: some files are missing; says which and why. Where training raised, that is a note of its error.
        """
        self._queue_files()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._timeout)
        with self._changed:
            self._gives_up = True
            late = dict.fromkeys(self._waiting, f"not uploaded within {self._timeout:g} seconds")
            missing = {**self._failed, **late}
            self._waiting, self._failed = {}, {}
        url, self._run = self._target, None
        if missing:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            text = without_secrets(f"RemoteUploader: {len(missing)} of the files are not at {url}. {reasons}")
            error = sys.exception()
            if error is None or isinstance(error, GeneratorExit):
                raise OSError(text)
            error.add_note(text)

    @property
    def _target(self) -> str:
        return self._place.of({**_OUTSIDE, **self._fields})

    def _upload_all(self) -> None:
        """What the thread does: upload what waits, until the stream closes and nothing is left."""
        target = self._target
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if self._gives_up or not self._waiting:
                    return
                name, path = next(iter(self._waiting.items()))
            reason = self._upload(join(target, name), path)
            with self._changed:
                if self._waiting.get(name) == path:
                    del self._waiting[name]
                if reason is not None:
                    self._failed[name] = reason

    def _upload(self, url: str, path: str) -> str | None:
        """Why a file could not be uploaded; None: it is."""
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(self._wait * 2 ** (attempt - 1))
            if self._gives_up:
                break
            try:
                with open(path, "rb") as source, storage_of(url).writing() as target:
                    shutil.copyfileobj(source, target)
                return None
            except Exception as error:  # of any file system
                cause = error.__cause__ or error
                reason = f"{type(cause).__name__}: {cause}"
        tries = f" ({self._retries + 1} tries)" if self._retries else ""
        return f"{reason}{tries}"
