"""Where a callback writes its files: a path with fields of the run, which holds one run's files."""

from __future__ import annotations

import os

from pure_loop._internal.arguments import check_flag
from pure_loop._internal.names import COUNTS, Fields, Pattern, counts_of
from pure_loop._internal.owned_files import refuse_other_run
from pure_loop.callback import Run
from pure_loop.checkpoint.paths import join
from pure_loop.checkpoint.storage import storage_of
from pure_loop.state import State


class Place:
    """A path with fields of the run. Counts in its folders are those with which the run starts.

    Args:
        path: of a file, or of a folder and the names of files in it.
        names: of the files, if ``path`` is a folder; nothing: ``path`` is a file's.
        where: the class that writes.
        overwrite: whether files of another run are replaced.
    """

    def __init__(self, path: str | os.PathLike[str], *names: str, where: str, overwrite: bool = False) -> None:
        argument = f"{where} {'folder' if names else 'path'}"
        pattern = Pattern(path, argument)
        storage_of(pattern.text)
        folder, slash, last = (pattern.text, "", "") if names else pattern.text.rpartition("/")
        self._is_file = not names
        self._folder = Pattern(folder or slash or os.curdir, argument)
        self._names = [Pattern(name, argument) for name in names or (last,)]
        self._where, self._overwrite = where, check_flag("overwrite", overwrite, where=where)
        self._fields: Fields = {}
        self.run: Run | None = None
        self.folder = self._folder.text

    def settle(self, state: State, rank: int = 0) -> None:
        """Put in the fields of the run that starts from a State.

        Raises:
            ArgumentError: a field has no value.
        """
        run = self.run or Run(function="drive", callbacks=())
        self._fields = run.fields(state.timestamp, rank)
        self.folder = self._folder.of(self._fields)

    def refuse_others(self, state: State) -> None:
        """
        Raises:
            RunExistsError: the files of another run are there, and are not to be replaced.
        """
        run = self.run or Run(function="drive", callbacks=())
        if self._overwrite or run.continues(state.timestamp.batch):
            return
        names = [name.filled({**self._fields, **dict.fromkeys(COUNTS)}) for name in self._names]
        there = sorted(item for item in storage_of(self.folder).names() if any(name.match(item) for name in names))
        if self._is_file and not names[0].fields:
            if not there or storage_of(join(self.folder, there[0])).is_folder():
                return
            refuse_other_run(self._where, join(self.folder, there[0]))
        if there:
            refuse_other_run(self._where, self.folder, there)

    def of(self, state: State | None = None, number: int = 0) -> str:
        """The path of the file that is written now.

        Args:
            state: the source of the counts in the name; None: those with which the run starts.
            number: which of the names.
        """
        counts = {} if state is None else counts_of(state.timestamp)
        return join(self.folder, self._names[number].of({**self._fields, **counts}))
