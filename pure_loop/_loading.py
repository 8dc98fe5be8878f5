"""Where a call of ``fit`` starts from disk: ``load_path=`` and ``autoresume=``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pure_loop._start import goes_on_from
from pure_loop.cadence import Cadence
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.model import ModelDef
from pure_loop.state import State, outside_batch
from pure_loop.time import Time, TimeUnit

if TYPE_CHECKING:
    from pure_loop.checkpoint.files import Checkpoint

__all__ = [
    "loading",
    "read_start",
    "refuse_idle_savers",
    "refuse_savers",
    "savers_among",
    "saving",
    "seed_of",
]


def read_start(model_or_state: Any, load_path: Any, autoresume: Any, seed: Any = 0) -> tuple[Any, Checkpoint | None]:
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
    from pure_loop.checkpoint.files import Checkpoint, Found, newest

    if load_path is not None and isinstance(model_or_state, State):
        raise ArgumentError(
            f"load_path={load_path!r} and a State: each is a place to start from. Give the module, fit(model, ..., "
            "load_path=path), or the State alone."
        )
    checkpoint = None
    if autoresume is not None:
        if isinstance(autoresume, bool):
            raise ArgumentTypeError(
                f'autoresume={autoresume!r}: give the folder of the checkpoints, autoresume="runs/1".'
            )

        def is_of_run(found: Found) -> bool:
            if isinstance(model_or_state, State):
                return found.seed == model_or_state.seed and found.batch >= model_or_state.timestamp.batch
            return seed in (0, found.seed)

        checkpoint = newest(autoresume, goes_on_from, is_of_run)
    if checkpoint is None and load_path is not None:
        checkpoint = Checkpoint.read(load_path)
    if checkpoint is None or not isinstance(model_or_state, State):
        return model_or_state, checkpoint
    _refuse_other_run(model_or_state, checkpoint)
    if model_or_state.position is None and model_or_state.event is None:
        return model_or_state, checkpoint  # a fresh start, with INIT before the numbers are read
    return checkpoint.into(model_or_state), None


def _refuse_other_run(start: State, checkpoint: Checkpoint) -> None:
    """
    Raises:
        ArgumentError: the checkpoint is of no run that began with this State.
    """
    document = checkpoint.document
    if document is None or document.seed != start.seed or document.batch < start.timestamp.batch:
        said = "no State" if document is None else f"seed {document.seed}, batch {document.batch}"
        raise ArgumentError(
            f"autoresume: {checkpoint.path} ({said}) is not of a run that began with the State given (seed "
            f"{start.seed}, batch {start.timestamp.batch}). Give a folder of its own to each run."
        )


def seed_of(checkpoint: Checkpoint | None, seed: Any) -> Any:
    """The seed with which the run goes on.

    Raises:
        ArgumentError: another one was asked for.
    """
    document = None if checkpoint is None else checkpoint.document
    if checkpoint is None or document is None:
        return seed
    if seed not in (0, document.seed):
        raise ArgumentError(
            f"seed={seed!r}, and {checkpoint.path} has seed {document.seed}, with which it goes on. To fork it with "
            f"other random numbers write fit(pl.load({checkpoint.path!r}, model=model).replace(seed={seed!r}), ...)."
        )
    return document.seed


def loading(
    checkpoint: Checkpoint | None,
    model: ModelDef | None,
    refuse: Callable[[State], object],
    finish: Callable[[State], State],
) -> Callable[[State], State] | None:
    """What the loop does between BEFORE_LOAD and AFTER_LOAD: gives the State that was saved.

    Args:
        checkpoint: what to load; None: nothing.
        model: the model, if it is sure to be the same at BEFORE_LOAD: what doesn't fit is refused now.
        refuse: raises where training can't go on from a State.
        finish: gives a State that goes on what it lacks.

    Raises:
        ResumeError: the checkpoint is another model's.
    """
    if checkpoint is None:
        return None
    path = checkpoint.path

    def refuse_loaded(state: State) -> None:
        try:
            refuse(state)
        except ResumeError as error:
            raise ResumeError(f"{path}: {error}") from error

    if checkpoint.document is not None and model is not None:
        refuse_loaded(checkpoint.fitted(model))
    # Taken out when it is loaded: the numbers are then the loop's, which writes to them.
    waiting = [checkpoint]

    def load(state: State) -> State:
        found = waiting.pop()
        if found.document is None:
            return found.weights_into(state)
        state = found.into(state)
        refuse_loaded(state)
        return finish(outside_batch(state))

    return load


def saving(autoresume: Any, callbacks: Any) -> Any:
    """The callbacks, with a saver to the folder of ``autoresume`` if there is none among them."""
    if autoresume is None:
        return callbacks
    from pure_loop.callbacks.checkpoint_saver import CheckpointSaver
    from pure_loop.checkpoint.places import same_place

    listed = [callbacks] if callable(callbacks) or not hasattr(callbacks, "__iter__") else list(callbacks)
    savers = [each for each in listed if isinstance(each, CheckpointSaver)]
    resumed = [saver for saver in savers if same_place(saver.folder, autoresume)]
    if not resumed:
        resumed = [CheckpointSaver(autoresume)]
        listed.append(resumed[0])
    for saver in resumed:
        saver.resumes = True
    return listed


def savers_among(callbacks: Iterable[Any]) -> list[Any]:
    """The CheckpointSavers among callbacks."""
    module: Any = sys.modules.get("pure_loop.callbacks.checkpoint_saver")
    return [] if module is None else [each for each in callbacks if isinstance(each, module.CheckpointSaver)]


def refuse_savers(
    callbacks: Iterable[Any], evaluators: Iterable[BoundEvaluator], order: str, iteration_length: Time | None
) -> None:
    """
    Raises:
        ArgumentError: a saver that would never save, whose metric nobody measures, or two that would save to one file.
    """
    savers = savers_among(callbacks)
    metrics = {each.label: each.metrics for each in evaluators}
    for number, saver in enumerate(savers):
        if order == "2021":
            raise ArgumentError(
                "order='2021' has no checkpoint events, so CheckpointSaver would never save: take the current order, "
                "or save in the loop's body, pl.save(state, path), at BATCH_END or EPOCH_END."
            )
        interval = saver.interval
        if isinstance(interval, Cadence) and interval.interval.unit is TimeUnit.ITERATION and iteration_length is None:
            raise ArgumentError(
                f"CheckpointSaver(interval={str(interval.interval)!r}) counts iterations, and iteration_length is not "
                "given, so it would never save."
            )
        saver.refuse_unmeasured(metrics)
        for other in savers[:number]:
            saver.refuse_same_files(other)


def refuse_idle_savers(callbacks: Iterable[Any], function: str) -> None:
    """
    Raises:
        ArgumentError: there is a saver, and nothing that it could save.
    """
    if savers_among(callbacks):
        raise ArgumentError(
            f"{function} has no checkpoint events, so CheckpointSaver would never save: leave it out, or save what it "
            "comes to, pl.save(state, path)."
        )
