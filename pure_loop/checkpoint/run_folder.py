"""The folder that a run saves to: what in it is the run's, links to the newest and the best, and what is removed."""

from __future__ import annotations

from pure_loop._internal.logs import get_logger
from pure_loop.checkpoint.files import SHARDED, SUFFIX
from pure_loop.checkpoint.finding import found_at, found_in
from pure_loop.checkpoint.index import INDEX, is_sharded_folder, remove
from pure_loop.checkpoint.pointer import Pointer
from pure_loop.checkpoint.retention import Names, Saved, expired, ranked
from pure_loop.checkpoint.storage import join, leftover, same_place, storage_of, try_folder
from pure_loop.errors import ArgumentError, CheckpointError
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["RunFolder"]

_log = get_logger("pure_loop.checkpoint")


class RunFolder:
    """A folder, of whose checkpoints the last few stay, and the best few.

    Args:
        path: a folder or a URL.
        names: the names of checkpoints in it.
        last, best, largest: which stay: see :func:`pure_loop.checkpoint.retention.expired`.
        newest_link: the name of a link to the newest; None: no link.
        best_link: the name of a link to the best; None: no link.
        weights: whether the run saves weights alone.
    """

    def __init__(
        self,
        path: str,
        names: Names,
        *,
        last: int | None,
        best: int | None,
        largest: bool,
        newest_link: str | None,
        best_link: str | None,
        weights: bool = False,
    ) -> None:
        self.path = path
        self._weights = weights
        self._names = names
        self._last, self._best, self._largest = last, best, largest
        self._best_link = None if best is None else best_link
        self._to_newest = self._pointer(newest_link, "latest", is_file=False)
        self._to_best = self._pointer(self._best_link, "best", is_file=True)
        self._saved: list[Saved] = []
        self._stamps: dict[str, object] = {}
        self._seed = 0

    def refuse_same(self, other: RunFolder) -> None:
        """
        Raises:
            ArgumentError: both would save to files of the same names, and remove each other's.
        """
        if self._is_like(other):
            raise ArgumentError(
                f"two CheckpointSavers save to {self.path} under the same names: give each a folder, or a filename "
                f"such as 'milestone-ep{{epoch}}-ba{{batch}}{SUFFIX}', of its own."
            )
        name = self._best_link
        if name is not None and name == other._best_link and same_place(self.path, other.path):
            raise ArgumentError(
                f"two CheckpointSavers link to their best in {self.path} under one name: give each its own, "
                'best="best-accuracy", or best=None for no link.'
            )

    def _is_like(self, other: RunFolder) -> bool:
        now = Timestamp()
        matches = self._names.match(other._names.of(now)) or other._names.match(self._names.of(now))
        return matches and same_place(self.path, other.path)

    def name_of(self, state: State, *, parts: bool) -> str:
        """The name of a checkpoint of this State: of a file, or of a folder with the parts of each rank."""
        name = self._names.of(state.timestamp)
        return name.removesuffix(SUFFIX) + SHARDED if parts else name

    def path_of(self, name: str) -> str:
        """Where the checkpoint of this name is."""
        return join(self.path, name)

    def open(self, state: State, metric: str | None) -> None:
        """Before training from a State: see that it can be written to, and which of its checkpoints are the run's.

        Raises:
            CheckpointWriteError: it can't be written to.
            ArgumentError: in the place of a link there is something else.
        """
        where = storage_of(self.path)
        try_folder(self.path)
        where.sweep()
        for pointer in (self._to_newest, self._to_best):
            if pointer is not None:
                pointer.open(self.path_of(leftover("link")))
        for name in where.names():
            # It may be of a run that was killed in a save, of one that is saving now, or a copy under way.
            if (
                name.endswith(SHARDED)
                and self._names.match(_as_file(name))
                and not is_sharded_folder(self.path_of(name))
            ):
                _log.warning(
                    "%s has no index, so it is no checkpoint; it stays until this run saves in its place. Remove it if "
                    "nothing is writing to it.",
                    self.path_of(name),
                )
        # To be deleted are only files of this pattern, and of the run that is resumed here.
        there = reversed(found_in(self.path, weights=self._weights))
        known = [item for item in there if self._names.match(_as_file(_name_of(item.path)))]
        mine = [
            Saved(_name_of(item.path), item.batch, item.score if item.metric == metric else None)
            for item in known
            if item.seed == state.seed and item.batch <= state.timestamp.batch
        ]
        if len(mine) < len(known):
            _log.warning(
                "%s holds checkpoints of another run, which was further on or had another seed: they stay, but for "
                "those in whose place this run saves. A folder for each run, or autoresume=, keeps them apart.",
                self.path,
            )
        self._saved, self._seed = mine, state.seed
        self._stamps = {item.name: self._stamp(item.name) for item in mine}

    def add(self, saved: Saved) -> None:
        """After a checkpoint is complete: link to it, and remove those that needn't be kept any more."""
        self._saved = [*(item for item in self._saved if item.name != saved.name), saved]
        self._stamps[saved.name] = self._stamp(saved.name)
        if self._to_newest is not None:
            self._to_newest.lead_to(saved.name)
        best = ranked(self._saved, largest=self._largest)[:1] if self._to_best is not None else []
        # Before the one that was the best is removed.
        for file in best:
            assert self._to_best is not None
            self._to_best.lead_to(file.name)
        for file in expired(self._saved, last=self._last, best=self._best, largest=self._largest):
            if self._is_mine(file):
                remove(self.path_of(file.name))
            self._saved.remove(file)

    def _stamp(self, name: str) -> object:
        path = self.path_of(name)
        return storage_of(join(path, INDEX) if name.endswith(SHARDED) else path).stamp()

    def _is_mine(self, saved: Saved) -> bool:
        """Whether the checkpoint is still that of this run, and not one that another run saved in its place."""
        path, stamp = self.path_of(saved.name), self._stamp(saved.name)
        if stamp is not None and stamp == self._stamps[saved.name]:
            return True
        try:
            result = found_at(path, weights=self._weights)
        except (CheckpointError, OSError) as error:
            _log.warning("%s isn't removed: %s", path, error)
            return False
        if result is not None and (result.seed, result.batch) == (self._seed, saved.batch):
            return True
        _log.warning("%s isn't removed: another run has saved in its place", path)
        return False

    def _pointer(self, name: str | None, argument: str, *, is_file: bool) -> Pointer | None:
        if name is None:
            return None
        return Pointer(self.path_of(name), argument, lambda name: self._names.match(_as_file(name)), is_file=is_file)


def _name_of(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _as_file(name: str) -> str:
    """The name that a State in one file would have."""
    return name.removesuffix(SHARDED) + SUFFIX if name.endswith(SHARDED) else name
