"""The folder that a run saves to: what in it is the run's, links to the newest and the best, and what is removed."""

from __future__ import annotations

import re
from collections.abc import Callable

from pure_loop._internal.logs import Seldom, get_logger
from pure_loop._internal.names import Fields, Pattern
from pure_loop._internal.owned_files import refuse_other_run
from pure_loop.callback import Run
from pure_loop.checkpoint.files import SHARDED, SUFFIX
from pure_loop.checkpoint.finding import Found, found_at, verified
from pure_loop.checkpoint.index import INDEX, is_sharded_folder, remove
from pure_loop.checkpoint.paths import join, leftover, same_place
from pure_loop.checkpoint.retention import Names, Saved, expired, ranked
from pure_loop.checkpoint.storage import storage_of, try_folder
from pure_loop.errors import ArgumentError, CheckpointError, CheckpointNotFoundError, CheckpointWriteError
from pure_loop.state import State

__all__ = ["Pointer", "RunFolder", "is_of_run"]

_log = get_logger("pure_loop.checkpoint")


class RunFolder:
    """A folder, of whose checkpoints the last few stay, and the best few.

    Args:
        path: a folder or a URL, with fields of the run.
        names: the names of checkpoints in it.
        last, best, largest: which stay: see :func:`pure_loop.checkpoint.retention.expired`.
        newest_link: the name of a link to the newest; None: no link.
        best_link: the name of a link to the best; None: no link.
        weights: whether the run saves weights alone.
        overwrite: whether checkpoints of another run are replaced.
        beside: what else of a run lies in the folder, by a regular expression; "": nothing.

    Attributes:
        path: of the run that was settled last; before, as it was written.
    """

    def __init__(
        self,
        path: Pattern,
        names: Names,
        *,
        last: int | None,
        best: int | None,
        largest: bool,
        newest_link: str | None,
        best_link: str | None,
        weights: bool = False,
        overwrite: bool = False,
        beside: str = "",
    ) -> None:
        self.path = path.text
        self._pattern, self._names_pattern = path, names
        self._weights, self._overwrite, self._beside = weights, overwrite, beside
        self._names = names
        self._last, self._best, self._largest = last, best, largest
        self._newest_link, self._best_link = newest_link, None if best is None else best_link
        self._to_newest: Pointer | None = None
        self._to_best: Pointer | None = None
        self._saved: list[Saved] = []
        self._stamps: dict[str, object] = {}
        self._seed = 0
        self._foreign = Seldom(_log)
        # What another run has left, and is removed once there is something in its place.
        self._others: list[str] = []

    @property
    def fields(self) -> frozenset[str]:
        """The fields of a run that its path and its names have, but for counts of names."""
        return self._pattern.fields | self._names_pattern.fields_of_run

    def settle(self, fields: Fields) -> None:
        """Put in the fields of a run that starts."""
        self.path = self._pattern.of(fields)
        self._names = self._names_pattern.filled(fields)
        self._to_newest = self._pointer(self._newest_link, "latest", is_file=False)
        self._to_best = self._pointer(self._best_link, "best", is_file=True)

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
        return self._names_pattern.is_like(other._names_pattern) and same_place(self.path, other.path)

    def name_of(self, state: State, *, parts: bool) -> str:
        """The name of a checkpoint of this State: of a file, or of a folder with the parts of each rank."""
        name = self._names.of(state.timestamp)
        return name.removesuffix(SUFFIX) + SHARDED if parts else name

    def path_of(self, name: str) -> str:
        """Where the checkpoint of this name is."""
        return join(self.path, name)

    def open(self, state: State, metric: str | None, run: Run | None, writer: str) -> None:
        """Before training from a State: see that it can be written to, and which of its checkpoints are the run's.

        Raises:
            CheckpointWriteError: it can't be written to.
            ArgumentError: in the place of a link there is something else.
            RunExistsError: it holds checkpoints of another run, and they are not to be replaced.
        """
        where = storage_of(self.path)
        try_folder(self.path)
        where.sweep()
        mine, others = self._sorted(state, run)
        if others and not self._overwrite:
            can_resume = not self._weights and run is not None and run.function == "fit"
            resume = f"fit(..., autoresume={self.path!r})" if can_resume else ""
            why = "" if state.timestamp.batch == 0 else f" (this one resumes at batch {state.timestamp.batch})"
            refuse_other_run(writer, self.path, sorted(others), resume=resume, why=why)
        for pointer in (self._to_newest, self._to_best):
            if pointer is not None:
                pointer.open(self.path_of(leftover("link")))
        self._saved = [
            Saved(_name_of(item.path), item.batch, item.score if item.metric == metric else None) for item in mine
        ]
        self._seed, self._others = state.seed, others
        self._stamps = {item.name: self._stamp(item.name) for item in self._saved}

    def _sorted(self, state: State, run: Run | None) -> tuple[list[Found], list[str]]:
        """The checkpoints of the run that starts, the oldest first, and the names of what is another's."""
        now = state.timestamp.batch
        starts = now == 0 if run is None else not run.continues(now)
        from_disk = run is not None and (run.autoresume is not None or run.resumed_from is not None)
        mine: list[Found] = []
        later: list[Found] = []
        unsure: list[str] = []
        others: list[str] = []
        for name in storage_of(self.path).names():
            path = self.path_of(name)
            if self._beside and re.fullmatch(self._beside, name):
                others += [name] if starts else []
                continue
            if name.startswith(".") or not name.endswith((SUFFIX, SHARDED)) or not self._names.match(_as_file(name)):
                continue
            # It may be of a run that was killed in a save, of one that is saving now, or a copy under way.
            if name.endswith(SHARDED) and not is_sharded_folder(path):
                _log.warning(
                    "%s has no index, so it is no checkpoint; it stays until this run saves in its place. Remove it if "
                    "nothing is writing to it.",
                    path,
                )
                continue
            if starts:
                others.append(name)
                continue
            try:
                found = found_at(path, weights=self._weights)
            except (CheckpointError, OSError) as error:
                _log.warning("%s is passed over: %s", path, error)
                continue
            if found is not None and is_of_run(found, state, from_disk=from_disk):
                (mine if found.batch <= now else later).append(found)
            elif found is None or (found.seed != state.seed if found.batch <= now else _is_whole(path)):
                others.append(name)
            elif found.batch <= now:
                # Nothing that this run saves takes its place, so the clock alone is no reason to refuse.
                unsure.append(name)
        if unsure:
            _log.warning(
                "%s: %s took another time than the State at batch %d, at which this run resumes, so it may be of "
                "another run: none of the checkpoints that are there is removed.",
                self.path,
                unsure[0],
                now,
            )
            mine = []
        if later:
            _log.warning(
                "%s holds checkpoints of this run that are further on than batch %d, at which it resumes, up to %s: "
                "each stays until its batch is saved again.",
                self.path,
                now,
                _name_of(max(later, key=lambda found: found.progress).path),
            )
        return sorted(mine, key=lambda found: (found.progress, found.path)), others

    @property
    def replaces(self) -> bool:
        """Whether another run has left something that is about to be removed."""
        return bool(self._others)

    def clear(self) -> None:
        """Remove what another run has left, now that there is something in its place."""
        others, self._others = self._others, []
        kept = {saved.name for saved in self._saved}
        for name in others:
            if name not in kept:
                remove(self.path_of(name))

    def add(self, saved: Saved) -> None:
        """After a checkpoint is complete: link to it, and remove those that needn't be kept any more."""
        self._saved = [*(item for item in self._saved if item.name != saved.name), saved]
        self._stamps[saved.name] = self._stamp(saved.name)
        if self._to_newest is not None:
            self._to_newest.lead_to(saved.name)
        self.clear()
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
        except CheckpointNotFoundError:
            self._foreign.warning("%s was removed by another process or a user: does another run save there?", path)
            return False
        except (CheckpointError, OSError) as error:
            self._foreign.warning("%s isn't removed: %s", path, error)
            return False
        if result is not None and (result.seed, result.batch) == (self._seed, saved.batch):
            return True
        self._foreign.warning("%s isn't removed: another run has saved in its place", path)
        return False

    def _pointer(self, name: str | None, argument: str, *, is_file: bool) -> Pointer | None:
        if name is None:
            return None
        return Pointer(self.path_of(name), argument, lambda name: self._names.match(_as_file(name)), is_file=is_file)


def is_of_run(found: Found, state: State, *, from_disk: bool) -> bool:
    """Whether a checkpoint is of the run that resumes from a State.

    A run has one seed, and of two of its States the one with more batches took longer. One that is further on was left
    by a run that was killed, if what is resumed was read from the disk; else the State in memory begins a fork.
    """
    now = state.timestamp
    if found.seed != state.seed:
        return False
    if found.batch == now.batch:
        return found.seconds == now.total_seconds
    if found.batch < now.batch:
        return found.seconds <= now.total_seconds
    return from_disk and found.seconds >= now.total_seconds


def _is_whole(path: str) -> bool:
    try:
        verified(path)
    except (CheckpointError, OSError) as error:
        _log.warning("%s is passed over: %s", path, error)
        return False
    return True


def _name_of(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _as_file(name: str) -> str:
    """The name that a State in one file would have."""
    return name.removesuffix(SHARDED) + SUFFIX if name.endswith(SHARDED) else name


# No name of a file is longer, in bytes.
_LONGEST = 255


class Pointer:
    """A name that leads to one of the checkpoints beside it.

    Args:
        path: of the link.
        argument: of ``CheckpointSaver``, for errors: ``"latest"``.
        is_checkpoint: whether a name is that of a checkpoint of the run.
        is_file: whether a file that holds the name takes the place of a link where there are none.
    """

    def __init__(self, path: str, argument: str, is_checkpoint: Callable[[str], bool], *, is_file: bool) -> None:
        self._path = path
        self._argument = argument
        self._is_checkpoint = is_checkpoint
        self._is_file = is_file
        self._links = False
        self._target: str | None = None

    def open(self, probe: str) -> None:
        """Try a link to nothing, before training.

        Args:
            probe: where the link is tried.

        Raises:
            ArgumentError: at the path there is something else.
        """
        self._target = None
        where = storage_of(self._path)
        if where.exists() and not where.is_link() and not self._is_own_file():
            raise ArgumentError(
                f"{self._argument}={_name_of(self._path)!r}: {where.path} is no link, and stays as it is; give another "
                "name, or None for no link."
            )
        link = storage_of(probe)
        try:
            link.link_to(_name_of(self._path))
            self._links = link.is_link()
            link.remove()
        except CheckpointWriteError as error:
            self._links = False
            if not self._is_file:
                _log.warning("there is no link %s, for its folder can't have links: %s", self._path, error)

    def lead_to(self, name: str) -> None:
        """Lead to a checkpoint from now on.

        Raises:
            CheckpointWriteError: the link or the file can't be written.
        """
        if name == self._target:
            return
        if self._links:
            storage_of(self._path).link_to(name)
        elif self._is_file:
            with storage_of(self._path).writing() as file:
                file.write(f"{name}\n".encode())
        self._target = name

    def _is_own_file(self) -> bool:
        if not self._is_file:
            return False
        try:
            with storage_of(self._path).open() as file:
                content = file.read(_LONGEST + 2)
            return content.endswith(b"\n") and self._is_checkpoint(content.decode().removesuffix("\n"))
        except (CheckpointError, OSError, UnicodeDecodeError):
            return False
