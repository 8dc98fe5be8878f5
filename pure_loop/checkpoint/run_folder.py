"""The folder that a run saves to: what in it is the run's, links to the newest and the best, and what is removed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import attrs

from pure_loop._internal.logs import Seldom, get_logger
from pure_loop._internal.names import Fields, Pattern
from pure_loop._internal.owned_files import refuse_other_run
from pure_loop.callback import Run
from pure_loop.checkpoint.files import SHARDED, SUFFIX
from pure_loop.checkpoint.finding import Found, first_whole, found_at, readable, verified
from pure_loop.checkpoint.index import INDEX, is_sharded_folder, remove
from pure_loop.checkpoint.paths import LONGEST_NAME, Names, is_name, join, leftover, same_place
from pure_loop.checkpoint.storage import storage_of, try_folder
from pure_loop.errors import ArgumentError, CheckpointError, CheckpointNotFoundError, CheckpointWriteError
from pure_loop.state import State

_log = get_logger("pure_loop.checkpoint")


@attrs.frozen
class Saved:
    """A checkpoint that is complete.

    Attributes:
        name: of the file.
        batch: how many were finished.
        score: what the metric was there; None if it wasn't measured there.
    """

    name: str
    batch: int
    score: float | None


@attrs.frozen
class Retention:
    """Which checkpoints stay.

    Attributes:
        last: how many of the newest; None: all, or with ``best`` one.
        best: how many of the best, older ones first where they are as good; None: none.
        largest: whether a larger score is better.
    """

    last: int | None = None
    best: int | None = None
    largest: bool = False

    def expired(self, saved: list[Saved]) -> list[Saved]:
        """Those that needn't be kept, of some in the order of their saves; the newest is never among them.

        Of one batch, the end of it and that of its epoch, only the later stays.

        >>> files = [Saved("a", 1, 0.1), Saved("b", 2, 0.9), Saved("c", 3, 0.5), Saved("d", 4, None)]
        >>> [file.name for file in Retention(last=1, best=1, largest=True).expired(files)]
        ['a', 'c']
        """
        last = _last_of_batches(saved)
        if self.last is None and self.best is None:
            stay = {*last}
        else:
            stay = {*last[-(self.last or 1) :], *self.ranked(saved)[: self.best or 0]}
        return [file for file in saved if file not in stay]

    def ranked(self, saved: list[Saved]) -> list[Saved]:
        """Those that have a score, the best first, and older ones first where they are as good.

        Of one batch, the end of it and that of its epoch, the later counts.

        >>> files = [Saved("a", 1, 0.1), Saved("b", 2, 0.9), Saved("c", 3, 0.9), Saved("d", 4, None)]
        >>> [file.name for file in Retention(largest=True).ranked(files)]
        ['b', 'c', 'a']
        """
        scores = [(file.score, file) for file in _last_of_batches(saved) if file.score is not None]
        scores = [(score, file) for score, file in scores if not math.isnan(score)]
        return [file for _, file in sorted(scores, key=lambda pair: -pair[0] if self.largest else pair[0])]


def _last_of_batches(saved: list[Saved]) -> list[Saved]:
    return list({file.batch: file for file in saved}.values())


@attrs.frozen
class Links:
    """The names of links to the newest and to the best checkpoint; None: no link.

    Raises:
        ArgumentError: a name that no link can have, or that another one has.
    """

    latest: str | None = None
    best: str | None = None

    def __attrs_post_init__(self) -> None:
        for argument, name in (("latest", self.latest), ("best", self.best)):
            if name is not None and (not isinstance(name, str) or not is_name(name)):
                raise ArgumentError(f'{argument}={name!r}: write the name of a link, such as "{argument}", or None.')
            ending = next((ending for ending in (SUFFIX, SHARDED) if (name or "").endswith(ending)), None)
            if ending is not None:
                raise ArgumentError(f"{argument}={name!r}: names that end with {ending!r} are those of checkpoints.")
        if self.latest is not None and self.latest == self.best:
            raise ArgumentError(f"latest={self.latest!r} and best={self.best!r}: each link needs a name of its own.")


class RunFolder:
    """A folder of checkpoints, of which the last few stay, and the best few.

    Args:
        path: a folder or a URL, with fields of the run.
        names: the names of checkpoints in it.
        retention: which of them stay.
        links: those to the newest and the best.
        weights_only: whether the run saves weights alone.
        overwrite: whether checkpoints of another run are replaced.
        beside: what else of a run lies in the folder, by a regular expression; "": nothing.

    Attributes:
        path: of the run that was settled last; before, as it was written.
    """

    def __init__(
        self,
        path: Pattern,
        names: Names,
        retention: Retention,
        links: Links,
        *,
        weights_only: bool = False,
        overwrite: bool = False,
        beside: str = "",
    ) -> None:
        self.path = path.text
        self._pattern, self._names_pattern = path, names
        self._weights_only, self._overwrite, self._beside = weights_only, overwrite, beside
        self._names, self._retention = names, retention
        self._links = links if retention.best is not None else Links(links.latest)
        self._to_newest: Pointer | None = None
        self._to_best: Pointer | None = None
        self._saved: list[Saved] = []
        self._stamps: dict[str, object] = {}
        self._seed = 0
        self._warnings = Seldom(_log)
        # What another run has left, which is removed once there is something in its place.
        self._foreign: list[str] = []

    @property
    def fields(self) -> frozenset[str]:
        """The fields of a run that its path and its names have, but for counts of names."""
        return self._pattern.fields | self._names_pattern.fields_of_run

    def settle(self, fields: Fields) -> None:
        """Put in the fields of a run that starts."""
        self.path = self._pattern.of(fields)
        self._names = self._names_pattern.filled(fields)
        self._to_newest = self._pointer(self._links.latest, "latest", is_file=False)
        self._to_best = self._pointer(self._links.best, "best", is_file=True)

    def refuse_same(self, folder: RunFolder) -> None:
        """
        Raises:
            ArgumentError: both would save to files of the same names, and remove each other's.
        """
        in_one_folder = same_place(self.path, folder.path)
        if in_one_folder and self._names_pattern.is_like(folder._names_pattern):
            raise ArgumentError(
                f"two CheckpointSavers save to {self.path} under the same names: give each a folder, or a filename "
                f"such as 'milestone-ep{{epoch}}-ba{{batch}}{SUFFIX}', of its own."
            )
        if in_one_folder and self._links.best is not None and self._links.best == folder._links.best:
            raise ArgumentError(
                f"two CheckpointSavers link to their best in {self.path} under one name: give each its own, "
                'best="best-accuracy", or best=None for no link.'
            )

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
        mine, foreign = self._sorted(state, run)
        if foreign and not self._overwrite:
            can_resume = not self._weights_only and run is not None and run.function == "fit"
            resume = f"fit(..., autoresume={self.path!r})" if can_resume else ""
            why = "" if state.timestamp.batch == 0 else f" (this one resumes at batch {state.timestamp.batch})"
            refuse_other_run(writer, self.path, sorted(foreign), resume=resume, why=why)
        for pointer in (self._to_newest, self._to_best):
            if pointer is not None:
                pointer.open(self.path_of(leftover("link")))
        self._saved = [
            Saved(_name_of(item.path), item.batch, item.score if item.metric == metric else None) for item in mine
        ]
        self._seed, self._foreign = state.seed, foreign
        self._stamps = {item.name: self._stamp(item.name) for item in self._saved}

    def _sorted(self, state: State, run: Run | None) -> tuple[list[Found], list[str]]:
        """The checkpoints of the run that starts, the oldest first, and the names of what is another's."""
        batch = state.timestamp.batch
        names = self._names_of_checkpoints()
        if batch == 0 if run is None else not run.continues(batch):
            beside = storage_of(self.path).names() if self._beside else []
            return [], names + [name for name in beside if re.fullmatch(self._beside, name)]
        from_disk = run is not None and (run.autoresume is not None or run.resumed_from is not None)
        mine: list[Found] = []
        later: list[Found] = []
        unsure: list[str] = []
        foreign: list[str] = []
        for path, item in readable(map(self.path_of, names), weights=self._weights_only):
            if item is None:
                foreign.append(_name_of(path))
            elif item.is_of_run(state, from_disk=from_disk):
                (mine if item.batch <= batch else later).append(item)
            elif item.seed != state.seed if item.batch <= batch else first_whole([item], verified, []):
                foreign.append(_name_of(path))
            elif item.batch <= batch:
                # Nothing that this run saves takes its place, so the clock alone is no reason to refuse.
                unsure.append(_name_of(path))
        if unsure:
            _log.warning(
                "%s: %s took another time than the State at batch %d, at which this run resumes, so it may be of "
                "another run: none of the checkpoints that are there is removed.",
                self.path,
                unsure[0],
                batch,
            )
            mine = []
        if later:
            _log.warning(
                "%s holds checkpoints of this run that are further on than batch %d, at which it resumes, up to %s: "
                "each stays until its batch is saved again.",
                self.path,
                batch,
                _name_of(max(later, key=lambda item: item.progress).path),
            )
        return sorted(mine, key=lambda item: (item.progress, item.path)), foreign

    def _names_of_checkpoints(self) -> list[str]:
        """The names in the folder that are those of checkpoints of a run."""
        names = []
        for name in storage_of(self.path).names():
            if name.startswith(".") or not name.endswith((SUFFIX, SHARDED)) or not self._has(name):
                continue
            if self._beside and re.fullmatch(self._beside, name):
                continue
            # It may be of a run that was killed in a save, of one that is saving now, or a copy under way.
            if name.endswith(SHARDED) and not is_sharded_folder(self.path_of(name)):
                _log.warning(
                    "%s has no index, so it is no checkpoint; it stays until this run saves in its place. Remove it if "
                    "nothing is writing to it.",
                    self.path_of(name),
                )
                continue
            names.append(name)
        return names

    @property
    def replaces(self) -> bool:
        """Whether another run has left something that is about to be removed."""
        return bool(self._foreign)

    def clear(self) -> None:
        """Remove what another run has left, now that there is something in its place."""
        foreign, self._foreign = self._foreign, []
        for name in sorted(set(foreign).difference(saved.name for saved in self._saved)):
            remove(self.path_of(name))

    def add(self, saved: Saved) -> None:
        """After a checkpoint is complete: link to it, and remove those that needn't be kept any more."""
        self._saved = [*(item for item in self._saved if item.name != saved.name), saved]
        self._stamps[saved.name] = self._stamp(saved.name)
        if self._to_newest is not None:
            self._to_newest.lead_to(saved.name)
        self.clear()
        # Before the one that was the best is removed.
        if self._to_best is not None and (ranked := self._retention.ranked(self._saved)):
            self._to_best.lead_to(ranked[0].name)
        for file in self._retention.expired(self._saved):
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
            result = found_at(path, weights=self._weights_only)
        except CheckpointNotFoundError:
            self._warnings.warning("%s was removed by another process or a user: does another run save there?", path)
            return False
        except (CheckpointError, OSError) as error:
            self._warnings.warning("%s isn't removed: %s", path, error)
            return False
        if result is not None and (result.seed, result.batch) == (self._seed, saved.batch):
            return True
        self._warnings.warning("%s isn't removed: another run has saved in its place", path)
        return False

    def _pointer(self, name: str | None, argument: str, *, is_file: bool) -> Pointer | None:
        return None if name is None else Pointer(self.path_of(name), argument, self._has, is_file=is_file)

    def _has(self, name: str) -> bool:
        """Whether the run gives its checkpoints such names: files, or folders in their places."""
        return self._names.match(name.removesuffix(SHARDED) + SUFFIX if name.endswith(SHARDED) else name)


def _name_of(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


class Pointer:
    """A name that leads to one of the checkpoints beside it.

    Args:
        path: of the link.
        argument: of ``CheckpointSaver``, for errors: ``"latest"``.
        is_checkpoint: whether a name is that of a checkpoint of the run.
        is_file: whether a file that holds the name takes the place of a link where there are none.
    """

    def __init__(self, path: str, argument: str, is_checkpoint: Callable[[str], bool], *, is_file: bool) -> None:
        self._path, self._argument = path, argument
        self._is_checkpoint, self._is_file = is_checkpoint, is_file
        self._links = False
        self._target: str | None = None

    def open(self, probe: str) -> None:
        """Try a link to nothing, before training.

        Args:
            probe: where the link is tried.

        Raises:
            ArgumentError: at the path there is something else.
        """
        self._target, self._links = None, False
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
                content = file.read(LONGEST_NAME + 2)
            return content.endswith(b"\n") and self._is_checkpoint(content.decode().removesuffix("\n"))
        except (CheckpointError, OSError, UnicodeDecodeError):
            return False
