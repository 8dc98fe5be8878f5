"""The compiled batch: a script that yields the events that somebody attends to, and calls graphs in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pure_loop.compile.stages import UPDATE_BAD, update
from pure_loop.compile.stretch import Own, Stretch, Traced
from pure_loop.driver import apply, run_silently, seal
from pure_loop.errors import NonFiniteError
from pure_loop.event import Event
from pure_loop.loop import Fit, LoopStages, Script, gradients
from pure_loop.state import NON_FINITE_ADVICE, State, fresh_draft_of

__all__ = ["Compiler"]


class Compiler:
    """What a call of ``fit`` compiles, and the scripts that call it.

    Args:
        stages: the loop's.
        attended: events that somebody outside the graphs sees: the user, callbacks, loggers.
        own: gives memory that a graph may write to, for tensors that are those of a State of this loop's making: the
            same list, where nobody else can see them, or copies. None: copies, always.
    """

    def __init__(self, stages: LoopStages, attended: frozenset[Event], *, own: Own | None = None) -> None:
        self.stages = stages
        self.attended = attended
        self.own = own
        self._sees_end = Event.BATCH_END in attended
        self.step = Stretch("step", self._step, stages, own=own)

    def batch(self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]) -> Script:
        """One batch, as :func:`pure_loop.loop.batch` does it."""
        before = state.timestamp
        now = before.next_batch(*self.stages.engine.counts(samples, tokens, seconds))
        run = self.step(state, (state.previous_timestamp, before, now), (state.batch,))
        if run.report is not None and run.report.is_cpu and (report := run.report.item()):
            raise _nonfinite(state, int(report))
        draft = fresh_draft_of(state)
        for name, value in zip(self.step._names, run.durable, strict=True):
            setattr(draft, name, value)
        draft.timestamp, draft.previous_timestamp = now, before
        draft.batch = None
        if self._sees_end:
            draft.batch, draft.microbatch, draft.outputs, draft.loss, draft._grads = run.flight
            draft.__class__ = state.__class__
            return (yield Event.BATCH_END, draft)
        draft.position = Event.BATCH_END
        draft.__class__ = state.__class__
        return draft  # type: ignore[no-any-return]

    def _step(
        self, state: State, flight: tuple[Any, ...], traced: Traced
    ) -> tuple[State, Tensor | None, tuple[Any, ...]]:
        stages, handlers = traced.stages, traced.handlers
        before, now = traced.timestamps[1:3]
        draft = fresh_draft_of(state)
        (draft.batch,) = flight
        draft.__class__ = state.__class__
        state = _at(Event.BATCH_START, draft, traced)
        state = _at(Event.BEFORE_TRAIN_BATCH, state, traced)
        buffers = state.buffers
        state = run_silently(gradients(state, stages), handlers, stages)
        state = _at(Event.AFTER_TRAIN_BATCH, state, traced)
        state, report = update(stages, state, buffers, timestamp=now, previous_timestamp=before)
        if self._sees_end:
            return state, report, (state.batch, state.microbatch, state.outputs, state.loss, state._grads)
        return _at(Event.BATCH_END, state, traced), report, ()


def _at(event: Event, state: State, traced: Traced) -> State:
    """The State of an event that nobody but algorithms attends to."""
    state = seal(state, event)
    found = traced.handlers.get(event)
    return state if found is None else apply(event, state, found, traced.stages)


def _nonfinite(state: State, report: int) -> NonFiniteError:
    t = state.timestamp
    what = (
        "the gradients, or what the optimizer's step made of them, are not finite (which one can't be told from a "
        "compiled step: run the batch without compile)"
        if report == UPDATE_BAD
        else "the loss is not finite"
    )
    return NonFiniteError(
        f"batch {t.batch} (epoch {t.epoch}, batch {t.batch_in_epoch} in it): {what}. {NON_FINITE_ADVICE}"
    )


