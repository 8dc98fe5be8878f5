"""The folder that a run saves to: what in it is the run's, the link to the newest, and what is removed."""

from __future__ import annotations

import logging
from functools import partial

from pure_loop.checkpoint.files import SHARDED, SUFFIX, found_at, found_in
from pure_loop.checkpoint.index import INDEX, is_sharded, remove
from pure_loop.checkpoint.keeping import Names, Saved, superfluous
from pure_loop.checkpoint.places import join, leftover, place, same_place
from pure_loop.errors import ArgumentError, CheckpointError, CheckpointWriteError
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["RunFolder"]

_log = logging.getLogger("pure_loop.checkpoint")


class RunFolder:
    """A folder, of whose checkpoints the last few stay, and the best few.

    Args:
        path: a folder or a URL.
        names: the names of checkpoints in it.
        last, best, largest: which stay: see :func:`pure_loop.checkpoint.keeping.superfluous`.
        link: the name of a link to the newest; None: no link.
    """

    def __init__(
        self, path: str, names: Names, *, last: int | None, best: int | None, largest: bool, link: str | None
    ) -> None:
        self.path = path
        self._names = names
        self._superfluous = partial(superfluous, last=last, best=best, largest=largest)
        self._link = link
        self._links = False
        self._saved: list[Saved] = []
        self._stamps: dict[str, object] = {}
        self._seed = 0

    def alike(self, other: RunFolder) -> bool:
        """Whether both have files of the same names in one place."""
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
            ArgumentError: in the place of the link there is something else.
        """
        where = place(self.path)
        probe = place(self.path_of(leftover("probe")))
        with probe.writing() as file:
            file.write(b"?")
        probe.remove()
        where.sweep()
        self._links = self._link is not None and self._can_link(self._link)
        for name in where.names():
            # It may be of a run that was killed in a save, of one that is saving now, or a copy under way.
            if name.endswith(SHARDED) and self._names.match(_as_file(name)) and not is_sharded(self.path_of(name)):
                _log.warning(
                    "%s has no index, so it is no checkpoint; it stays until this run saves in its place. Remove it if "
                    "nothing is writing to it.",
                    self.path_of(name),
                )
        # To be deleted are only files of this pattern, and of the run that is resumed here.
        known = [
            each for each in reversed(found_in(self.path, metric)) if self._names.match(_as_file(_name_of(each.path)))
        ]
        mine = [
            Saved(_name_of(each.path), each.batch, each.score)
            for each in known
            if each.seed == state.seed and each.batch <= state.timestamp.batch
        ]
        if len(mine) < len(known):
            _log.warning(
                "%s holds checkpoints of another run, which was further on or had another seed: they stay, but for "
                "those in whose place this run saves. A folder for each run, or autoresume=, keeps them apart.",
                self.path,
            )
        self._saved, self._seed = mine, state.seed
        self._stamps = {each.name: self._stamp(each.name) for each in mine}

    def add(self, saved: Saved) -> None:
        """After a checkpoint is complete: link to it, and remove those that needn't be kept any more."""
        self._saved = [*(each for each in self._saved if each.name != saved.name), saved]
        self._stamps[saved.name] = self._stamp(saved.name)
        if self._link is not None and self._links:
            place(self.path_of(self._link)).link_to(saved.name)
        for each in self._superfluous(self._saved):
            if self._is_mine(each):
                remove(self.path_of(each.name))
            self._saved.remove(each)

    def _stamp(self, name: str) -> object:
        path = self.path_of(name)
        return place(join(path, INDEX) if name.endswith(SHARDED) else path).stamp()

    def _is_mine(self, saved: Saved) -> bool:
        """Whether the checkpoint is still that of this run, and not one that another run saved in its place."""
        path, stamp = self.path_of(saved.name), self._stamp(saved.name)
        if stamp is not None and stamp == self._stamps[saved.name]:
            return True
        try:
            found = found_at(path)
        except (CheckpointError, OSError) as error:
            _log.warning("%s isn't removed: %s", path, error)
            return False
        if found is not None and (found.seed, found.batch) == (self._seed, saved.batch):
            return True
        _log.warning("%s isn't removed: another run has saved in its place", path)
        return False

    def _can_link(self, name: str) -> bool:
        link = place(self.path_of(name))
        if link.exists() and not link.is_link():
            raise ArgumentError(
                f"latest={name!r}: {link.path} is no link, and stays as it is; give another name, or None for no link."
            )
        try:
            probe = place(self.path_of(leftover("link")))
            probe.link_to(name)
            probe.remove()
        except CheckpointWriteError as error:
            _log.warning(
                "there is no link to the newest checkpoint in %s, for it can't have links: %s", self.path, error
            )
            return False
        return True


def _name_of(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _as_file(name: str) -> str:
    """The name that a State in one file would have."""
    return name.removesuffix(SHARDED) + SUFFIX if name.endswith(SHARDED) else name
