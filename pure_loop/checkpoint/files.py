"""Saving a State to a file, and loading one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from pure_loop._internal.arguments import check_flag
from pure_loop._internal.devices import read_device
from pure_loop._internal.suggestions import teaching
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.checkpoint import container
from pure_loop.checkpoint.checkpoint import NOT_STRICT, Checkpoint
from pure_loop.checkpoint.coordination import Coordinator
from pure_loop.checkpoint.digests import refuse_no_base
from pure_loop.checkpoint.document import METADATA_KEY, WEIGHTS_KEY, Document, read_document, write_document
from pure_loop.checkpoint.index import INDEX, Index, is_index, is_sharded_folder
from pure_loop.checkpoint.paths import PathLike
from pure_loop.checkpoint.selection import Rename, Selection
from pure_loop.checkpoint.storage import not_read, storage_of
from pure_loop.checkpoint.validation import Json
from pure_loop.checkpoint.weights import Weights
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointError, CheckpointNotFoundError
from pure_loop.members.ensemble import Ensemble
from pure_loop.state import State, refuse_no_state

SUFFIX = ".safetensors"
"""How the names of checkpoints end that :class:`pure_loop.callbacks.CheckpointSaver` writes."""

SHARDED = ".sharded"
"""How the names of those end that are folders, because every rank held a part of the State."""


@teaching
def save(
    state: State,
    path: PathLike,
    *,
    notes: Mapping[str, object] | None = None,
    weights_only: bool = False,
    trained_only: bool = False,
) -> None:
    """Write a State to a file, from which :func:`load` and ``fit(load_path=...)`` resume exactly.

    The fields of the current batch (``batch``, ``outputs``, ``loss``, ``grads``) are not saved. The file is in the
    safetensors format: parameters are in it as ``params.<name>``, for any tool that reads the format. Writing is
    atomic: until the file is complete, the path has the old file, if there was one.

    A sharded State (of training with ``parallel="shard"``) is saved by all ranks, which call this together, to a
    folder that they share: each writes its shards, and after the last one an index completes the folder.

    Args:
        state: of any event; training resumes from States of boundaries.
        path: of the file, by convention ``*.safetensors``, or of the folder, ``*.sharded``; missing folders are made.
            A URL such as ``"s3://bucket/run/last.safetensors"`` is opened by fsspec.
        notes: JSON to store in the file.
        weights_only: write the weights alone, by the names of ``state.module().state_dict()``, as other libraries read
            them; of a sharded State unsharded, in one file. ``pl.load(path, model=..., weights_only=True)`` reads them.
        trained_only: leave out the frozen parameters. Training resumes exactly from such a file, given the model with
            the same frozen weights; a digest of each is in the file.

    Raises:
        ArgumentTypeError: the State holds a value that a checkpoint can't hold; names its place.
        ArgumentError: with ``trained_only``, no parameter is frozen, or the State is sharded; a path that ends as those
            of ``torch.save`` do, ``.pt``, ``.pth`` or ``.pkl``.
        CheckpointWriteError: (an OSError) it can't be written: no room, no permission; names the path.
        DistributedError: another rank couldn't write its shards, or has died; names it.

    >>> import tempfile, torch, pure_loop as pl
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = folder.name + "/start.safetensors"
    >>> pl.save(pl.State.create(torch.nn.Linear(2, 1), seed=3), path)
    >>> pl.load(path, model=torch.nn.Linear(2, 1)).seed
    3
    >>> folder.cleanup()
    """
    refuse_no_state(state, "save(state, path)", "pl.State.create(module)")
    weights_only, trained_only = check_flag("weights_only", weights_only), check_flag("trained_only", trained_only)
    where, weights = storage_of(path), None
    if where.path.endswith((".pt", ".pth", ".pkl")):
        stem = where.path.rpartition(".")[0]
        raise ArgumentError(
            f"save(state, {where.path!r}): the file would be of safetensors, which torch.load can't read: write "
            f"{stem + SUFFIX!r}; for torch.load, torch.save(state.module().state_dict(), {where.path!r})."
        )
    if weights_only:
        weights = Weights.of(state, trained_only=trained_only)
    elif trained_only:
        refuse_no_base(state)
    with contextlib.closing(Coordinator()) if in_parts(state) else contextlib.nullcontext() as coordinator:
        write_state(state, where.path, notes, trained_only=trained_only, weights=weights, coordinator=coordinator)


def write_state(
    state: State,
    path: str,
    notes: Mapping[str, object] | None = None,
    *,
    trained_only: bool = False,
    weights: Weights | None = None,
    coordinator: Coordinator | None = None,
) -> None:
    """:func:`save` for arguments that are checked.

    Args:
        weights: what is written in the place of the State; None: all of it.
        coordinator: where the ranks that hold parts of the State meet; None: it is not sharded.
    """
    if weights is not None:
        weights.write(path, notes, coordinator)
        return
    if coordinator is not None:
        from pure_loop.checkpoint.sharded import write  # with it comes torch.distributed.checkpoint

        write(coordinator, state, path, notes)
        return
    text, tensors = write_document(state, notes, trained_only=trained_only)
    with storage_of(path).writing() as file:
        container.write(file, tensors, {METADATA_KEY: text, "format": "pt"})


def in_parts(state: State) -> bool:
    """Whether the State is sharded, so that ranks have to save it together."""
    return are_sharded(state.params)


@teaching
def load(
    path: PathLike,
    *,
    model: nn.Module | Ensemble,
    device: torch.device | str | None = None,
    weights_only: bool = False,
    strict: bool = True,
    exclude: str | Iterable[str] = (),
    rename: Rename | None = None,
) -> State:
    """Read a State that :func:`save` wrote, or the weights of a plain safetensors file into a fresh State.

    No file can run code: pickle is not used, only classes that the program has registered are constructed, and a file
    that is damaged, truncated or of another program is refused.

    Args:
        path: of the file, or of the folder of a sharded State, which is unsharded here; ``fit`` shards it again, over
            any number of ranks. A URL is opened by fsspec.
        model: the module with the structure of the State; of a State with members, that of one, or their
            :func:`pure_loop.ensemble`. Its values matter where the file has none: of a file that was
            saved with ``trained_only=True`` they are the frozen parameters, which are compared with their digests;
            with ``weights_only=True`` and ``strict=False``, whatever the file lacks.
        device: the device of the tensors; None: that of the model.
        weights_only: read parameters and buffers alone, into a State that has not been trained.
            ``pl.load(path, model=model, weights_only=True).module()`` is a plain module with them. Plain files of other
            libraries, with the names of ``model.state_dict()``, have nothing else, and need no ``weights_only=True``.
        strict: with weights alone, refuse names that only the file or only the model has.
        exclude: globs of names of parameters and buffers: in the model those keep its values, ``["head.*"]``, and begin
            anew when training resumes, as do algorithms whose memory holds them; names that only the file has are
            dropped. Of a State also ``"opt_state"`` and ``"algorithm_state/NAME"``, which begin anew.
        rename: names in the file, or their beginnings up to a dot, and those in the model,
            ``{"backbone.": "encoder.", "module.": ""}``, of several the longest; or a function of a name in the file
            that returns that in the model. The optimizer state and the algorithm state follow; fields of a subclass of
            State that are keyed by names don't. ``exclude`` comes after it. ``state.notes`` says what was renamed and
            excluded.

    Raises:
        ArgumentTypeError: ``model`` is no module; a wrong type of another argument.
        ArgumentError: ``exclude`` or ``rename`` match nothing, or two names become one; names what is near.
        CheckpointNotFoundError: (a FileNotFoundError) there is no such file.
        CheckpointError: (a ValueError) it is no checkpoint, damaged, truncated or of a newer format.
        ResumeError: it is of another model, or of another base; names the leaf. Or it was saved with
            ``weights_only=True``, and ``weights_only`` is False.
    """
    if not isinstance(model, nn.Module | Ensemble):
        raise ArgumentTypeError(
            f"load(path, model=...) was given a {type(model).__name__}: give the module that was trained, built as it "
            "was then; a checkpoint holds its numbers and not its code."
        )
    weights_only, strict = check_flag("weights_only", weights_only), check_flag("strict", strict)
    selection = Selection(exclude, rename)
    if not weights_only and not strict and storage_of(path).is_folder():
        raise ArgumentError(NOT_STRICT)
    home = read_device(device)
    return read_checkpoint(path).state(model, home, weights_only=weights_only, strict=strict, selection=selection)


def describe(path: PathLike) -> dict[str, Json]:
    """The description of a checkpoint, without reading its tensors.

    Returns:
        ``made_by``: versions by package; ``saved_at``: seconds since 1970; ``epoch``, ``batch``, ``event``, ``seed``:
        the position of the run; ``model``: the class of the module; ``notes``: the argument of :func:`save`.

    Raises:
        CheckpointNotFoundError, CheckpointError: there is no file, or none that can be read.

    >>> import tempfile, torch, pure_loop as pl
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pl.save(pl.State.create(torch.nn.Linear(2, 1), seed=3), folder + "/x.safetensors", notes={"why": "a test"})
    ...     said = pl.checkpoint.describe(folder + "/x.safetensors")
    >>> said["seed"], said["batch"], said["notes"]
    (3, 0, {'why': 'a test'})
    """
    where = storage_of(path)
    document = Index.read(where.path)[1] if where.is_folder() else document_of(where.path, weights=True)
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


def document_of(path: str, *, weights: bool = False) -> Document | None:
    """The description of the State in a file, without its tensors; None where there is none.

    Args:
        path: of the file.
        weights: whether that of weights counts, which ``save(weights_only=True)`` wrote.

    Raises:
        CheckpointError, OSError: it can't be read.
    """
    with storage_of(path).open() as file:
        header = container.read_header(file, path)
    document = None if is_index(header.metadata) else read_document(header.metadata, path)
    _refuse_no_digest(header, document, path)
    if document is None and header.digested:  # plain weights have none
        raise CheckpointError(f"{path} can't be read: it has a digest and no description of a State: it is damaged.")
    if document is None and weights:
        return read_document(header.metadata, path, WEIGHTS_KEY)
    return document


def read_checkpoint(path: PathLike) -> Checkpoint:
    """A checkpoint, read whole, or as far as it is read before its model is known.

    Raises:
        CheckpointNotFoundError, CheckpointError: there is none, or none that is whole.
    """
    where = storage_of(path)
    if where.is_folder():
        if is_sharded_folder(where.path):
            from pure_loop.checkpoint.sharded import ShardedCheckpoint  # with it comes torch.distributed.checkpoint

            return ShardedCheckpoint.read(where.path)
        raise CheckpointError(
            f"{where.path} is a folder: give a checkpoint in it; pl.latest_path({where.path!r}) finds the newest. (It "
            f"has no {INDEX}: if it was to be a sharded one, that was not completed.)"
        )
    try:
        with where.open() as file:
            header, tensors = container.read(file, where.path)
    except CheckpointNotFoundError:
        raise
    except OSError as error:
        raise not_read(where.path, error) from error
    document = read_document(header.metadata, where.path)
    if is_index(header.metadata):
        raise CheckpointError(f"{where.path} is one file of a sharded checkpoint: pass the folder that it is in.")
    _refuse_no_digest(header, document, where.path)
    weights = read_document(header.metadata, where.path, WEIGHTS_KEY) if document is None else None
    return Checkpoint(where.path, document, tensors, weights)


def _refuse_no_digest(header: container.Header, document: Document | None, path: str) -> None:
    if document is not None and not header.digested:
        raise CheckpointError(f"{path} can't be read: it has no digest, which would show whether it is intact.")
