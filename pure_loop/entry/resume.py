"""Where a call of ``fit`` starts from disk: ``load_path=`` and ``autoresume=``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import attrs
from torch import nn

from pure_loop._internal.names import Pattern
from pure_loop.callback import Callback, CallbackLike
from pure_loop.entry.settings import listed_callbacks
from pure_loop.entry.start import can_resume_from
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.members.ensemble import Ensemble
from pure_loop.state import State, outside_batch

if TYPE_CHECKING:
    from pure_loop.checkpoint.checkpoint import Checkpoint

Path: TypeAlias = str | os.PathLike[str] | None


def read_start(
    model_or_state: nn.Module | State | Ensemble,
    load_path: Path,
    autoresume: Path,
    seed: int = 0,
    run_name: str | None = None,
) -> tuple[nn.Module | State | Ensemble, Checkpoint | None]:
    """What to start from, and the checkpoint that it takes its numbers from, if there is one.

    The newest checkpoint in ``autoresume`` goes before ``load_path``, which is where the first run started. Where the
    seed of the run is known, by a State or by ``seed``, those of other seeds are passed over.

    Raises:
        ArgumentError: there are two things to start from.
        CheckpointNotFoundError, CheckpointError: ``load_path`` is none that is whole.
        ResumeError: the State given is another model's than the newest checkpoint.
    """
    if load_path is None and autoresume is None:
        return model_or_state, None
    # Not before: a plain fit doesn't need it.
    from pure_loop.checkpoint.files import read_checkpoint
    from pure_loop.checkpoint.finding import Found, newest

    if load_path is not None and isinstance(model_or_state, State):
        raise ArgumentError(
            f"load_path={load_path!r} and a State: each is a place to start from. Give the module, fit(model, ..., "
            "load_path=path), or the State alone."
        )
    checkpoint = None
    if autoresume is not None:

        def is_of_run(result: Found) -> bool:
            if isinstance(model_or_state, State):
                return result.seed == model_or_state.seed and result.batch >= model_or_state.timestamp.batch
            return seed in (0, result.seed)

        checkpoint = newest(_found_again(autoresume, run_name), can_resume_from, is_of_run)
    if checkpoint is None and load_path is not None:
        checkpoint = read_checkpoint(load_path)
    if checkpoint is None or not isinstance(model_or_state, State):
        return model_or_state, checkpoint
    _refuse_other_run(model_or_state, checkpoint)
    if model_or_state.position is None and model_or_state.event is None:
        return model_or_state, checkpoint  # a fresh start, with INIT before the numbers are read
    return checkpoint.into(model_or_state), None


def _found_again(folder: str | os.PathLike[str], run_name: str | None) -> str:
    """The folder of ``autoresume``, which the same command has to find again.

    Raises:
        ArgumentError: it has a field that only a run has which has begun.
    """
    pattern = Pattern(folder, "autoresume")
    if pattern.fields - {"run_name"} or ("run_name" in pattern.fields and run_name is None):
        raise ArgumentError(
            f"autoresume={pattern.text!r}: the same command has to find this folder again. Of fields it can have "
            '{run_name} alone, with the name passed: fit(..., autoresume="runs/{run_name}", run_name="baseline").'
        )
    return pattern.of({"run_name": run_name})


def _refuse_other_run(start: State, checkpoint: Checkpoint) -> None:
    """
    Raises:
        ArgumentError: the checkpoint is of no run that began with this State.
    """
    document = checkpoint.document
    if document is None or document.seed != start.seed or document.batch < start.timestamp.batch:
        contents = "no State" if document is None else f"seed {document.seed}, batch {document.batch}"
        raise ArgumentError(
            f"autoresume: {checkpoint.path} ({contents}) is not of a run that began with the State passed (seed "
            f"{start.seed}, batch {start.timestamp.batch}). Give each run a folder of its own."
        )


def seed_of(checkpoint: Checkpoint | None, seed: int) -> int:
    """The seed with which the run resumes.

    Raises:
        ArgumentError: another one was asked for.
    """
    document = None if checkpoint is None else checkpoint.document
    if checkpoint is None or document is None:
        return seed
    if seed not in (0, document.seed):
        raise ArgumentError(
            f"seed={seed!r}, and {checkpoint.path} has seed {document.seed}, with which it resumes. To fork it with "
            f"other random numbers write fit(pl.load({checkpoint.path!r}, model=model).replace(seed={seed!r}), ...)."
        )
    return document.seed


def loading(
    checkpoint: Checkpoint | None,
    beginning: State | None,
    refuse: Callable[[State], object],
    finish: Callable[[State], State],
) -> Callable[[State], State] | None:
    """What the loop does between BEFORE_LOAD and AFTER_LOAD: gives the State that was saved.

    Args:
        checkpoint: what to load; None: nothing.
        beginning: the State before it is loaded, if its model and its frozen parameters are sure to be the same at
            BEFORE_LOAD: what doesn't fit is refused now.
        refuse: raises where training can't resume from a State.
        finish: gives a State that resumes what it lacks.

    Raises:
        ResumeError: the checkpoint is another model's, or has another base.
    """
    if checkpoint is None:
        return None
    path = checkpoint.path

    def refuse_loaded(state: State) -> None:
        try:
            refuse(state)
        except ResumeError as error:
            loaded = f"pl.load({path!r}, model=model, exclude=['opt_state'])"
            text = str(error).replace("state.replace(opt_state=None)", loaded)
            raise ResumeError(f"{path}: {text}") from error

    if checkpoint.document is not None and beginning is not None:
        refuse_loaded(checkpoint.fitted(beginning.model))
        if checkpoint.document.base:
            from pure_loop.checkpoint.digests import verified_base

            verified_base(checkpoint.document.base, beginning, path)
    # Taken out when it is loaded: the numbers are then the loop's, which writes to them.
    waiting = [checkpoint]

    def load(state: State) -> State:
        result = waiting.pop()
        if result.document is None:
            return result.weights_into(state)
        loaded = result.into(state)
        refuse_loaded(loaded)
        return finish(outside_batch(computed_as(loaded, state, path)))

    return load


def computed_as(loaded: State, state: State, path: object) -> State:
    """The State that was loaded; its members are computed as the call says, mapped or one after the other.

    Raises:
        ResumeError: one of them has no members, or others, or other data.
    """
    saved, members = loaded.ensemble, state.ensemble
    if saved is None and members is None:
        return loaded
    if saved is None or members is None or saved.seeds != members.seeds or _data(loaded) != _data(state):
        raise ResumeError(
            f"{path} has {_described(loaded)}, and fit was given {_described(state)}: give the ensemble as it was, or "
            "take members of its State: fit(pl.load(path, model=make_model()).members([...]), ...)."
        )
    return loaded.replace(ensemble=attrs.evolve(saved, fallback=members.fallback))


def _described(state: State) -> str:
    return "one model" if state.ensemble is None else f"an ensemble of {state.ensemble}; {_data(state)} data"


def _data(state: State) -> str:
    return "shared" if state.data_seed is not None else "own"


def saving(autoresume: Path, callbacks: Iterable[CallbackLike]) -> Iterable[CallbackLike]:
    """The callbacks, and a saver to the folder of ``autoresume`` where none of them saves to it."""
    if autoresume is None:
        return callbacks
    listed = listed_callbacks(callbacks)
    if not any(isinstance(callback, Callback) and callback.saves_to(autoresume) for callback in listed):
        from pure_loop.callbacks.checkpoint_saver import CheckpointSaver  # a plain fit doesn't need it

        listed.append(CheckpointSaver(autoresume, keep_last=2))
    return listed
