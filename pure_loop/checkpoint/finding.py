"""Finding checkpoints in a folder: the newest one that is whole, the one to resume from, and the best by a metric."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

import attrs

from pure_loop._internal.logs import get_logger
from pure_loop._internal.suggestions import nearest, teaching
from pure_loop.checkpoint import container
from pure_loop.checkpoint.checkpoint import Checkpoint
from pure_loop.checkpoint.document import Document, read_document
from pure_loop.checkpoint.files import SHARDED, SUFFIX, document_of, read_checkpoint
from pure_loop.checkpoint.index import Index
from pure_loop.checkpoint.paths import LEFTOVER, PathLike, join
from pure_loop.checkpoint.storage import storage_of
from pure_loop.checkpoint.tree import UnknownClassError
from pure_loop.errors import ArgumentError, CheckpointError
from pure_loop.event import Event
from pure_loop.state import State

T = TypeVar("T")

_log = get_logger("pure_loop.checkpoint")


@attrs.frozen
class Found:
    """A checkpoint of a folder, by its header: what is compared before one of them is read.

    Attributes:
        path: of the file or folder.
        seed: of the run.
        batch: how many batches were finished.
        seconds: of training until then.
        event: where the State was kept.
        progress: how far the run was; of two States of a run the later one has the larger.
        metric: the name of the metric that ``score`` is of, ``"val/loss"``; None: of none.
        mode: whether the best score is the largest, ``"max"``, or the smallest, ``"min"``; None: that isn't known.
        score: what the metric was there; None if it wasn't measured there, or was no finite number.
    """

    path: str
    seed: int
    batch: int
    seconds: float
    event: Event | None
    progress: tuple[int, ...]
    metric: str | None
    mode: str | None
    score: float | None

    @classmethod
    def of(cls, path: str, document: Document) -> Found:
        metric, mode, score = map(document.notes.get, ("metric", "mode", "score"))
        return cls(
            path=path,
            seed=document.seed,
            batch=document.batch,
            seconds=document.timestamp.total_seconds,
            event=document.event,
            progress=document.progress,
            metric=metric if isinstance(metric, str) else None,
            mode=mode if mode in ("min", "max") else None,
            score=score if isinstance(metric, str) and isinstance(score, float) else None,
        )

    def is_of_run(self, state: State, *, from_disk: bool) -> bool:
        """Whether it is of the run that resumes from a State.

        A run has one seed, and of two of its States the one with more batches took longer. One that is further on was
        left by a run that was killed, if what is resumed was read from the disk; else the State in memory begins a
        fork.
        """
        timestamp = state.timestamp
        if self.seed != state.seed:
            return False
        if self.batch == timestamp.batch:
            return self.seconds == timestamp.total_seconds
        if self.batch < timestamp.batch:
            return self.seconds <= timestamp.total_seconds
        return from_disk and self.seconds >= timestamp.total_seconds


def found_at(path: str, *, weights: bool = False) -> Found | None:
    """A checkpoint by its header; None for a file of weights alone.

    Args:
        path: of the file or folder.
        weights: whether weights count that ``save(weights_only=True)`` wrote.

    Raises:
        CheckpointError, OSError: it can't be read.
    """
    document = Index.read(path)[1] if path.endswith(SHARDED) else document_of(path, weights=weights)
    return None if document is None else Found.of(path, document)


def found_in(folder: PathLike, *, weights: bool = False) -> list[Found]:
    """The checkpoints in a folder that have readable headers, the furthest on first; of equal ones by their names.

    Files of weights alone count with ``weights``.

    Their descriptions are read one at a time, and not kept: a folder may hold many, and large ones.
    """
    names = (name for name in storage_of(folder).names() if not name.endswith(LEFTOVER))
    paths = (join(folder, name) for name in names if name.endswith((SUFFIX, SHARDED)))
    result = [checkpoint for _, checkpoint in readable(paths, weights=weights) if checkpoint is not None]
    return sorted(result, key=lambda item: (item.progress, item.path), reverse=True)


def readable(paths: Iterable[str], *, weights: bool) -> Iterator[tuple[str, Found | None]]:
    """The paths of those checkpoints that have readable headers, with what :func:`found_at` gives for them."""
    for path in paths:
        try:
            checkpoint = found_at(path, weights=weights)
        except (CheckpointError, OSError) as error:
            _log.warning("%s is passed over: %s", path, error)
            continue
        yield path, checkpoint


@teaching
def latest_path(folder: PathLike) -> str | None:
    """The path of the newest checkpoint in a folder that is whole; None if there is none.

    Newest is the State that is furthest on: by its counts of batches, epochs and iterations, and where these are equal
    by its boundary; of equal States the last by name. No clock is read, neither the one by which files are dated nor
    the one at saving. From the newest on, files are read through and compared with their digests until one is whole;
    one that is damaged, cut off or contradicts itself is passed over, with a message to the log
    ``pure_loop.checkpoint``.

    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: it is a file.

    >>> latest_path("a/folder/that/is/not/there") is None
    True
    """
    refuse_file(folder)
    return first_whole(found_in(folder), verified, [])


def newest(
    folder: PathLike, goes_on: Callable[[Event | None], bool], is_of_run: Callable[[Found], bool]
) -> Checkpoint | None:
    """The newest checkpoint in a folder that is whole and was saved where training can be resumed, read.

    Args:
        folder: which one.
        goes_on: whether training can be resumed from an event.
        is_of_run: whether a checkpoint can be of the run that is resumed. Where none is, the newest is given all the
            same, for an error that says so.

    Raises:
        UnknownClassError: of those that are whole each holds a class that this program doesn't know.
    """
    refuse_file(folder)
    result = []
    for item in found_in(folder):
        if goes_on(item.event):
            result.append(item)
        else:
            _log.warning("%s is passed over: it is from %s, where training can't be resumed", item.path, item.event)
    mine = [item for item in result if is_of_run(item)]
    for item in result if mine else []:
        if item not in mine and item.progress > mine[0].progress:
            _log.warning("%s is passed over: it is of another run, with seed %s", item.path, item.seed)
    unknown: list[UnknownClassError] = []
    checkpoint = first_whole(mine or result, _read_whole, unknown)
    if checkpoint is None and unknown:
        raise unknown[0]
    if checkpoint is not None and checkpoint.document is not None:
        _log.info("resuming from %s, batch %d", checkpoint.path, checkpoint.document.batch)
    return checkpoint


def first_whole(result: Iterable[Found], read: Callable[[str], T], unknown: list[UnknownClassError]) -> T | None:
    """What ``read`` returns for the first one that it can read; errors of classes that are unknown are added."""
    for item in result:
        try:
            return read(item.path)
        except (CheckpointError, OSError) as error:
            _log.warning("%s is passed over: %s", item.path, error)
            if isinstance(error, UnknownClassError):
                unknown.append(error)
    return None


def verified(path: str) -> str:
    """The path of a checkpoint that is whole.

    Raises:
        CheckpointError, OSError: it isn't.
    """
    # A class that is unknown here may be known to the program that loads the file.
    with contextlib.suppress(UnknownClassError):
        if path.endswith(SHARDED):
            _verify_sharded(path)
        else:
            with storage_of(path).open() as file:
                header = container.verify(file, path)
            described = read_document(header.metadata, path)
            if described is not None:  # it may have become a file of weights since its header was read
                described.refuse_contradiction({entry.name: entry for entry in header.entries}, path)
    return path


def _verify_sharded(path: str) -> None:
    index, document = Index.read(path)
    index.verify(path)
    document.refuse_contradiction(index.tensors, path, complete=True)


def _read_whole(path: str) -> Checkpoint:
    if path.endswith(SHARDED):
        _verify_sharded(path)  # the tensors are read when it is known which of them are needed
    checkpoint = read_checkpoint(path)
    if checkpoint.document is not None and not path.endswith(SHARDED):
        checkpoint.document.refuse_contradiction(checkpoint.tensors, path)
    return checkpoint


def refuse_file(folder: PathLike) -> None:
    """
    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: it is a file.
    """
    where = storage_of(folder)
    if where.exists() and not where.is_folder():
        raise ArgumentError(
            f"{where.path} is a file: pass the folder that it is in; to start from this file, load_path=."
        )


@teaching
def best_path(folder: PathLike, *, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> str | None:
    """The path of the best checkpoint in a folder that is whole; None if no checkpoint has a score.

    ``CheckpointSaver(folder, keep_best=1, metric="val/loss", mode="min")`` saves the score with each State at which the
    metric was measured, and ``pl.save(state, path, notes={"metric": "val/loss", "mode": "min", "score": 0.25})`` does
    the same; weights that are saved alone count as well. Checkpoints of all runs in the folder are compared. Of several
    that are as good, the one with the fewest batches is taken. No link is followed. A checkpoint that is damaged is
    skipped, with a message to the log ``pure_loop.checkpoint``.

    Args:
        folder: a folder or a URL.
        metric: by which; None: by the only one that there is.
        mode: whether the best score is the largest, ``"max"``, or the smallest, ``"min"``; None: as it was saved.

    Raises:
        ArgumentTypeError: ``folder`` is no path.
        ArgumentError: it is a file; there are scores of several metrics and ``metric`` is None; there is no score of
            this metric; whether the largest or the smallest is the best isn't known.

    >>> best_path("a/folder/that/is/not/there") is None
    True
    """
    refuse_file(folder)
    if mode not in ("min", "max", None):
        raise ArgumentError(f'mode={mode!r}: is the best the largest, mode="max", or the smallest, mode="min"?')
    scored = [item for item in found_in(folder, weights=True) if item.score is not None]
    metrics = sorted({item.metric for item in scored if item.metric is not None})
    if not metrics:
        return None
    if metric is None and len(metrics) > 1:
        raise ArgumentError(f"{folder} has scores of {', '.join(metrics)}: say by which, metric={metrics[0]!r}.")
    if metric is not None and metric not in metrics:
        near = nearest(str(metric), metrics)
        raise ArgumentError(
            f"metric={metric!r}: no checkpoint in {folder} has its score{f'; did you mean {near!r}?' if near else ''}; "
            f"there are {', '.join(metrics)}."
        )
    chosen = [item for item in scored if metric is None or item.metric == metric]
    largest = (mode or _saved_mode(chosen)) == "max"
    # Those furthest on come first, so that of one batch the end of its epoch does.
    chosen.sort(key=lambda item: (_signed(item, largest=largest), item.batch))
    return first_whole(chosen, verified, [])


def _saved_mode(chosen: list[Found]) -> str:
    """
    Raises:
        ArgumentError: the checkpoints disagree, or don't say.
    """
    modes = {item.mode for item in chosen}
    if len(modes) > 1 or None in modes:
        answer = "do not all say" if None in modes else "say both"
        raise ArgumentError(
            f"checkpoints with a score of {chosen[0].metric} {answer} whether the best is the largest or the smallest: "
            'write mode="max" or mode="min".'
        )
    return str(modes.pop())


def _signed(item: Found, *, largest: bool) -> float:
    assert item.score is not None
    return -item.score if largest else item.score


# Earlier names, which sound like States.
latest, best = latest_path, best_path
