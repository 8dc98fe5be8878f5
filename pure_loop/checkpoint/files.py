"""Saving a State to a file, loading one, and finding the newest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from pure_loop._calls import teaching
from pure_loop._parts import is_part
from pure_loop._start import read_device
from pure_loop._values import read_flag
from pure_loop.checkpoint import container
from pure_loop.checkpoint.document import METADATA_KEY, Document, read_document, write_document
from pure_loop.checkpoint.index import INDEX, Index, is_index, is_sharded
from pure_loop.checkpoint.places import LEFTOVER, PathLike, join, not_read, place, size_of
from pure_loop.checkpoint.tree import UnknownClassError
from pure_loop.checkpoint.weights import saved_weights, with_buffers_of, with_weights
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointError, CheckpointNotFoundError
from pure_loop.event import Event
from pure_loop.model import ModelDef
from pure_loop.state import State

__all__ = [
    "SHARDED",
    "SUFFIX",
    "Checkpoint",
    "Found",
    "describe",
    "found_at",
    "found_in",
    "in_parts",
    "latest",
    "load",
    "newest",
    "save",
    "write_state",
]

T = TypeVar("T")

SUFFIX = ".safetensors"
"""How the names of checkpoints end that :class:`pure_loop.callbacks.CheckpointSaver` writes."""

SHARDED = ".sharded"
"""How the names of those end that are folders, because every rank held a part of the State."""

_NOT_STRICT = "strict=False is for weights alone: a run goes on exactly or not at all; weights_only=True."

_log = logging.getLogger("pure_loop.checkpoint")


@teaching
def save(state: State, path: PathLike, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write a State to a file, from which :func:`load` and ``fit(load_path=...)`` go on exactly.

    What is of the batch under way (``batch``, ``outputs``, ``loss``, ``grads``) is not saved. The file is in the
    safetensors format: parameters are in it as ``params.<name>``, for any tool that reads these. It appears whole or
    not at all, and what was at the path before is there until then.

    A State in parts (of training with ``parallel="shard"``) is saved by all ranks, which call this together, to a
    folder that they share: each writes its own part, and when the last one has, an index completes it.

    Args:
        state: kept anywhere; training goes on from one of a boundary.
        path: of the file, by custom ``*.safetensors``, or of the folder, ``*.sharded``; folders that are missing are
            made. A URL such as ``"s3://bucket/run/last.safetensors"`` is opened by fsspec.
        notes: JSON to remember with it.

    Raises:
        ArgumentTypeError: the State holds a value that a checkpoint can't hold; names its place.
        CheckpointWriteError: (an OSError) it can't be written: no room, no permission; names the path.
        DistributedError: another rank couldn't write its part, or is gone; names it.

    >>> import tempfile, torch, pure_loop as pl
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = folder.name + "/start.safetensors"
    >>> pl.save(pl.State.create(torch.nn.Linear(2, 1), seed=3), path)
    >>> pl.load(path, model=torch.nn.Linear(2, 1)).seed
    3
    >>> folder.cleanup()
    """
    if not isinstance(state, State):
        raise ArgumentTypeError(f"save({type(state).__name__}, ...): what is saved is a State; the path comes second.")
    where = place(path)
    if in_parts(state):
        from pure_loop.checkpoint.meeting import Meeting  # with it comes torch.distributed
        from pure_loop.checkpoint.sharded import write

        meeting = Meeting()
        try:
            write(meeting, state, where.path, notes)
        finally:
            meeting.close()
        return
    write_state(state, where.path, notes)


def write_state(state: State, path: str, notes: Mapping[str, Any] | None = None) -> None:
    """What :func:`save` does with a State of whole tensors."""
    text, tensors = write_document(state, notes)
    with place(path).writing() as file:
        container.write(file, tensors, {METADATA_KEY: text, "format": "pt"})


def in_parts(state: State) -> bool:
    """Whether several ranks hold parts of the State, and have to save it together."""
    return any(map(is_part, state.params.values()))


@teaching
def load(
    path: PathLike,
    *,
    model: nn.Module,
    device: torch.device | str | None = None,
    weights_only: bool = False,
    strict: bool = True,
) -> State:
    """Read a State that :func:`save` wrote, or the weights of a plain safetensors file into a fresh State.

    No file can run code: there is no pickle on this way, classes are only those that the program has registered, and
    what is damaged, cut off or somebody else's is refused.

    Args:
        path: of the file, or of the folder of a State that was saved in parts, which becomes a whole one here; ``fit``
            splits it again, over any number of ranks. A URL is opened by fsspec.
        model: the module whose structure the State has; its numbers don't matter (with ``weights_only`` and ``strict``
            off, those that the file lacks stay).
        device: where the tensors go; None: where the model is.
        weights_only: take parameters and buffers alone, into a State that has not been trained.
            ``pl.load(path, model=model, weights_only=True).module()`` is a plain module with them. Plain files, with
            the names of ``model.state_dict()``, have nothing else.
        strict: with weights alone, refuse names that only one of the file and the model has.

    Raises:
        ArgumentTypeError: no module is given, or something else.
        CheckpointNotFoundError: (a FileNotFoundError) there is no such file.
        CheckpointError: (a ValueError) it is no checkpoint, damaged, cut off or of a newer format.
        ResumeError: it is another model's; names the leaf, and what it is on either side.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"load(path, model=...) was given a {type(model).__name__}: give the module that was trained, built as it "
            "was then; a checkpoint holds its numbers and not its code."
        )
    weights_only, strict = read_flag("weights_only", weights_only), read_flag("strict", strict)
    if not strict and not weights_only and place(path).is_folder():
        raise ArgumentError(_NOT_STRICT)
    return Checkpoint.read(path).state(model, read_device(device), weights_only=weights_only, strict=strict)


def describe(path: PathLike) -> dict[str, Any]:
    """What a checkpoint says of itself, without reading its tensors.

    Returns:
        ``made_by``: versions by package; ``saved_at``: seconds since 1970; ``epoch``, ``batch``, ``event``,
        ``seed``: where the run was; ``model``: the class of the module; ``notes``: what :func:`save` was given.

    Raises:
        CheckpointNotFoundError, CheckpointError: there is none, or none that can be read.

    >>> import tempfile, torch, pure_loop as pl
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pl.save(pl.State.create(torch.nn.Linear(2, 1), seed=3), folder + "/x.safetensors", notes={"why": "a test"})
    ...     said = pl.checkpoint.describe(folder + "/x.safetensors")
    >>> said["seed"], said["batch"], said["notes"]
    (3, 0, {'why': 'a test'})
    """
    where = place(path)
    document = Index.read(where.path)[1] if where.is_folder() else _document_of(where.path)
    if document is None:
        raise CheckpointError(f"{where.path} has weights alone: load_file of the safetensors package lists them.")
    return {
        "made_by": document.made_by,
        "saved_at": document.saved_at / 1e9,
        "epoch": document.timestamp.epoch,
        "batch": document.batch,
        "event": document.event,
        "seed": document.seed,
        "model": document.model,
        "notes": document.notes,
    }


def _document_of(path: str) -> Document | None:
    with place(path).open() as file:
        header = container.read_header(file, size_of(file), path)
    document = None if is_index(header.metadata) else read_document(header.metadata, path)
    _refuse_no_digest(header, document, path)
    if document is None and header.digested:  # plain weights have none
        raise CheckpointError(f"{path} can't be read: it has a digest and no description of a State: it is damaged.")
    return document


@attrs.frozen(eq=False)
class Checkpoint:
    """A checkpoint read whole, before there is a model to fit it to."""

    path: str
    document: Document | None
    tensors: dict[str, Tensor]

    @property
    def name(self) -> str:
        """What ranks compare: whether they have read the same one."""
        return f"{self.path}, saved at {0 if self.document is None else self.document.saved_at}"

    @classmethod
    def read(cls, path: PathLike) -> Checkpoint:
        """
        Raises:
            CheckpointNotFoundError, CheckpointError: there is none, or none that is whole.
        """
        where = place(path)
        if where.is_folder():
            if is_sharded(where.path):
                from pure_loop.checkpoint.sharded import ShardedCheckpoint  # with it comes torch.distributed

                return ShardedCheckpoint.read(where.path)
            raise CheckpointError(
                f"{where.path} is a folder: give a checkpoint in it; pl.latest({where.path!r}) finds the newest. (It "
                f"has no {INDEX}: if it was to be a sharded one, that was not completed.)"
            )
        try:
            with where.open() as file:
                header, tensors = container.read(file, size_of(file), where.path)
        except CheckpointNotFoundError:
            raise
        except OSError as error:
            raise not_read(where.path, error) from error
        document = read_document(header.metadata, where.path)
        if is_index(header.metadata):
            raise CheckpointError(f"{where.path} is a piece of a sharded checkpoint: give the folder that it lies in.")
        _refuse_no_digest(header, document, where.path)
        return cls(where.path, document, tensors)

    def state(
        self, model: nn.Module, device: torch.device | str | None, *, weights_only: bool = False, strict: bool = True
    ) -> State:
        """The State, of this model's structure."""
        fresh = State.create(model, device=device)
        if self.document is None or weights_only:
            return self.weights_into(fresh, strict=strict)
        if not strict:
            raise ArgumentError(_NOT_STRICT)
        return self.into(fresh)

    def into(self, state: State) -> State:
        """The saved State, with the model and on the device of this one."""
        if self.document is None:
            return self.weights_into(state)
        return self.document.state(state.model, self.tensors, state.device, self.path)

    def weights_into(self, state: State, *, strict: bool = True) -> State:
        """The State with the weights that were saved."""
        if self.document is not None:
            state = with_buffers_of(self.document, state, self.tensors, self.path)
        return with_weights(state, saved_weights(self.document, self.tensors, self.path), self.path, strict=strict)

    def fitted(self, model: ModelDef) -> State:
        """The saved State, with this model, in the memory of the computer.

        Raises:
            ResumeError: it was saved with another model; names the leaf.
        """
        assert self.document is not None
        return self.document.state(model, self.tensors, torch.device("cpu"), self.path)


def _refuse_no_digest(header: container.Header, document: Document | None, path: str) -> None:
    if document is not None and not header.digested:
        raise CheckpointError(f"{path} can't be read: it has no digest, so nobody can tell whether it is whole.")


@attrs.frozen
class Found:
    """A checkpoint of a folder, by its header: what is compared before one of them is read.

    Attributes:
        path: of the file or folder.
        seed: of the run.
        batch: how many batches were finished.
        event: where the State was kept.
        progress: how far the run was; of two States of a run the later one has the larger.
        score: what the metric was there that was asked for; None if it wasn't measured there.
    """

    path: str
    seed: int
    batch: int
    event: Event | None
    progress: tuple[int, ...]
    score: float | None

    @classmethod
    def of(cls, path: str, document: Document, metric: str | None) -> Found:
        score = document.notes.get("score") if metric is not None and document.notes.get("metric") == metric else None
        return cls(
            path=path,
            seed=document.seed,
            batch=document.batch,
            event=document.event,
            progress=document.progress,
            score=score if isinstance(score, float) else None,
        )


def found_at(path: str, metric: str | None = None) -> Found | None:
    """A checkpoint by its header; None for a file of weights alone.

    Raises:
        CheckpointError, OSError: it can't be read.
    """
    document = Index.read(path)[1] if path.endswith(SHARDED) else _document_of(path)
    return None if document is None else Found.of(path, document, metric)


def found_in(folder: PathLike, metric: str | None = None) -> list[Found]:
    """The checkpoints in a folder whose headers can be read, the furthest on first; of equal ones by their names.

    Their descriptions are read one at a time, and not kept: a folder may hold many, and large ones.
    """
    where = place(folder)
    found = []
    for name in where.names():
        if name.endswith(LEFTOVER) or not name.endswith((SUFFIX, SHARDED)):
            continue
        path = join(folder, name)
        try:
            one = found_at(path, metric)
        except (CheckpointError, OSError) as error:
            _log.warning("%s is passed over: %s", path, error)
            continue
        if one is not None:
            found.append(one)
    return sorted(found, key=lambda each: (each.progress, each.path), reverse=True)


@teaching
def latest(folder: PathLike) -> str | None:
    """The path of the newest checkpoint in a folder that is whole; None if there is none.

    Newest is the State that is furthest on: by its counts of batches, epochs and iterations, and where these are equal
    by its boundary; of equal States the last by name. No clock is asked, neither the one by which files are dated nor
    the one at saving. Each file is read through and compared with its digest; one that is damaged, cut off or
    contradicts itself is passed over, with a message to the log ``pure_loop.checkpoint``.

    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: it is a file.

    >>> latest("a/folder/that/is/not/there") is None
    True
    """
    _refuse_file(folder)
    return _first_whole(found_in(folder), _verified, [])


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
    _refuse_file(folder)
    found = []
    for each in found_in(folder):
        if goes_on(each.event):
            found.append(each)
        else:
            _log.warning("%s is passed over: it is from %s, where training can't be resumed", each.path, each.event)
    mine = [each for each in found if is_of_run(each)]
    for each in found if mine else []:
        if each not in mine and each.progress > mine[0].progress:
            _log.warning("%s is passed over: it is of another run, with seed %s", each.path, each.seed)
    unknown: list[UnknownClassError] = []
    checkpoint = _first_whole(mine or found, _read_whole, unknown)
    if checkpoint is None and unknown:
        raise unknown[0]
    if checkpoint is not None and checkpoint.document is not None:
        _log.info("resuming from %s, batch %d", checkpoint.path, checkpoint.document.batch)
    return checkpoint


def _first_whole(found: Iterable[Found], read: Callable[[str], T], unknown: list[UnknownClassError]) -> T | None:
    for each in found:
        try:
            return read(each.path)
        except (CheckpointError, OSError) as error:
            _log.warning("%s is passed over: %s", each.path, error)
            if isinstance(error, UnknownClassError):
                unknown.append(error)
    return None


def _verified(path: str) -> str:
    # A class that is unknown here may be known to the program that loads the file.
    with contextlib.suppress(UnknownClassError):
        if path.endswith(SHARDED):
            index, document = Index.read(path)
            index.verify(path)
            document.refuse_contradiction(index.tensors, path, complete=True)
        else:
            with place(path).open() as file:
                header = container.verify(file, size_of(file), path)
            described = read_document(header.metadata, path)
            if described is not None:  # it may have become a file of weights since its header was read
                described.refuse_contradiction({entry.name: entry for entry in header.entries}, path)
    return path


def _read_whole(path: str) -> Checkpoint:
    if path.endswith(SHARDED):
        # The tensors are read when it is known which of them are needed.
        index, document = Index.read(path)
        index.verify(path)
        document.refuse_contradiction(index.tensors, path, complete=True)
        return Checkpoint.read(path)
    checkpoint = Checkpoint.read(path)
    if checkpoint.document is not None:
        checkpoint.document.refuse_contradiction(checkpoint.tensors, path)
    return checkpoint


def _refuse_file(folder: PathLike) -> None:
    where = place(folder)
    if where.exists() and not where.is_folder():
        raise ArgumentError(
            f"{where.path} is a file: give the folder that it lies in; to start from this very file, load_path=."
        )
