"""Taking the next batch: where it is told from the end of the data, counted, and moved to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pure_loop.data import beside, to_device
from pure_loop.event import Event
from pure_loop.sources import END, Padding, Source
from pure_loop.stages import Stages
from pure_loop.state import State

__all__ = ["next_batch"]


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
        whole = beside(loaded, next(iter(state.params.values())))
        return whole, task.samples(whole), task.tokens(whole)
    padding = type(loaded) is Padding
    batch = loaded.batch if padding else loaded
    counted = not padding and batch is not END
    samples, tokens = (task.samples(batch), task.tokens(batch)) if counted else (0, 0)
    batch = engine.next_batch(state, batch, samples, tokens, seconds, event, counted, source)
    return None if batch is END else (to_device(batch, state.device), samples, tokens)
