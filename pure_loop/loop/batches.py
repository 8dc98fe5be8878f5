"""Taking the next batch: where it is told from the end of the data, counted, and moved to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pure_loop.data.batch import beside, to_device
from pure_loop.data.source import END, Part, Source
from pure_loop.errors import DataError
from pure_loop.event import Event
from pure_loop.stages import Stages
from pure_loop.state import State, raw_params

if TYPE_CHECKING:
    from pure_loop.loop.training import Fit

__all__ = ["next_batch", "train_batch"]


def next_batch(
    state: State, stages: Stages, source: Source, loaded: Any, seconds: Callable[[], float], event: Event
) -> tuple[Any, int, int] | None:
    """The batch on the device, and its samples and tokens; None at the end of the data.

    Args:
        state: the State before it.
        stages: what counts, and what asks the other ranks.
        source: where it comes from.
        loaded: what it gave: a batch, or END.
        seconds: how long it is since this was asked last.
        event: which comes next if there is a batch.
    """
    engine, task = stages.engine, stages.task
    if engine.ranks == 1:
        if loaded is END:
            return None
        whole = beside(loaded, next(iter(raw_params(state).values())), source)
        return whole, task.samples(whole), task.tokens(whole)
    part = loaded if type(loaded) is Part else Part(loaded, loaded is not END)
    batch = part.batch
    samples, tokens = (task.samples(batch), task.tokens(batch)) if part.counts else (0, 0)
    batch = engine.next_batch(state, part, samples, tokens, seconds, event, source)
    if batch is END:
        return None
    return to_device(batch, state.device, stays=source.keeps_pinned), samples, tokens


def train_batch(
    state: State, fit: Fit, loaded: Any, seconds: Callable[[], float], number: int | None = None
) -> tuple[Any, int, int] | None:
    """The same of ``fit``'s own data, with its errors; ``number`` is the batch's, if it isn't the State's next one."""
    awaits_tokens = fit.needs_tokens is not None and not state.timestamp.token
    counts_tokens = fit.counts_tokens or awaits_tokens
    try:
        ready = next_batch(state, fit.stages, fit.source, loaded, seconds, Event.AFTER_DATALOADER)
    except DataError as error:
        error.add_note(f"raised by batch {state.timestamp.batch if number is None else number} of train_dataloader")
        raise
    if not counts_tokens or ready is None or ready[2] or fit.stages.engine.padding:
        return ready
    if awaits_tokens and (fit.stages.engine.ranks == 1 or state.timestamp.batch):  # of all ranks one batch later
        raise DataError(
            f"{fit.needs_tokens} counts tokens, and batch {state.timestamp.batch} has none by the default count, so it "
            "would never move: count them with task=pl.Task(tokens=lambda batch: batch['input_ids'].numel()), or write "
            'it in another unit, such as "100ba".'
        )
    if fit.counts_tokens:
        raise DataError(
            f"batch {state.timestamp.batch} has no tokens by the default count, so a duration in tokens would never "
            "end: count them with task=pl.Task(tokens=lambda batch: batch['input_ids'].numel())."
        )
    return ready
