"""The loop: scripts, in which each event is one line, and the driver that runs them.

A *script* is a generator: ``state = yield EVENT, state`` yields an event and receives the State that the
algorithms return. It refers to no algorithm, callback or consumer. The *driver* (:func:`drive`)
runs a script: it applies the algorithms to the State, passes the result to the callbacks, yields it to
the consumer, and sends it back. The scripts here read as the specification in :mod:`pure_loop.order`;
:func:`pure_loop.order.expected` computes independently what they must yield.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias

from pure_loop._internal.closing import closing
from pure_loop._internal.logs import get_logger
from pure_loop._internal.pytree import Batch, PyTree
from pure_loop.data.group import END
from pure_loop.errors import DataError
from pure_loop.event import Event
from pure_loop.loop.batch import gradients
from pure_loop.loop.call import Feed, Fit, Stopwatch
from pure_loop.loop.driver import Script
from pure_loop.loop.evaluation import current, evaluations, refuse_misfits
from pure_loop.state import State, outside_batch, setter
from pure_loop.time import TimeUnit

_log = get_logger("pure_loop.fit")

# Returns the State of FIT_START, and a stopwatch that was started; None: there is nothing left to train.
BeginScript: TypeAlias = Generator[tuple[Event, State], State, tuple[State, Stopwatch | None]]
# Returns the State after an epoch's batches, and whether its data ended.
EpochScript: TypeAlias = Generator[tuple[Event, State], State, tuple[State, bool]]


class Eager:
    """Batches computed one by one, stage by stage: each event is one line."""

    graphs = None

    @property
    def uncompiled(self) -> Eager:
        return self

    def feed(self, batches: Feed) -> Feed:
        return batches

    def steps_ahead(self, state: State, fit: Fit, batches: Feed, stopwatch: Stopwatch) -> State:
        return state

    def batch(self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]) -> Script:
        stages = fit.stages
        state = yield Event.BATCH_START, state
        state = yield Event.BEFORE_TRAIN_BATCH, state
        buffers, model = state.buffers, state.model
        state = yield from gradients(state, stages)
        state = stages.engine.sync_buffers(state, buffers)
        state = yield Event.AFTER_TRAIN_BATCH, state
        before = state.timestamp
        timestamp = before.next_batch(*stages.engine.counts(samples, tokens, seconds))
        state = stages.update(state, buffers=buffers, model=model, timestamp=timestamp, previous_timestamp=before)
        if state.metrics:
            state = current(state, fit, Event.BATCH_END)
        return (yield Event.BATCH_END, state)

    def close(self) -> None:
        pass


INSIDE_EPOCH = frozenset({Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.ITERATION_END, Event.ITERATION_CHECKPOINT})


def epoch_end(state: State, fit: Fit, at: Event | None) -> Script:
    """What follows EPOCH_END."""
    if at is Event.EPOCH_END:
        state = yield from evaluations(state, fit, Event.EPOCH_END)
        state = yield Event.EPOCH_CHECKPOINT, state
    return (yield from iteration_end(state, fit, TimeUnit.EPOCH, at))


def iteration_end(state: State, fit: Fit, unit: TimeUnit, at: Event | None) -> Script:
    """The end of an iteration, if what was just counted completed it, and the start of the next."""
    length = fit.iteration_length
    if length is None:
        return state
    t = state.timestamp
    done = t.token_in_iteration if unit is TimeUnit.TOKEN else t.epoch_in_iteration
    if at not in (Event.ITERATION_END, Event.ITERATION_CHECKPOINT):
        if length.unit is not unit or done < length.value:
            return state
        state = yield Event.ITERATION_END, state.replace(timestamp=t.next_iteration(), event=None)
    if at is not Event.ITERATION_CHECKPOINT:
        state = yield Event.ITERATION_CHECKPOINT, state
    if not state.has_ended():
        state = yield Event.ITERATION_START, state
    return state


def begin(state: State, fit: Fit) -> BeginScript:
    """What comes before the first batch, up to FIT_START: a State that fits the call, loaded where it is to be.

    A script that calls it has the State in no variable meanwhile: INIT or a checkpoint may replace its tensors.
    """
    if fit.fresh:
        state = yield Event.INIT, fit.meet(state)
        state = yield Event.BEFORE_LOAD, fit.prepare(state)
        # From a checkpoint, or the State itself; the first step may write where that is.
        state = fit.stages.workspace.begins_with(state if fit.load is None else fit.load(state))
        state = yield Event.AFTER_LOAD, state
    else:
        state = fit.prepare(outside_batch(state))
    state = yield Event.FIT_START, state
    over = already_finished(state)
    if not over:
        refuse_misfits(state, fit.stages, fit.evaluators)
    stopwatch = Stopwatch(fit.clock)
    return state, None if over else stopwatch


def fit(state: State, fit: Fit) -> Script:
    """Training, from a new State or from the boundary at which a State was kept."""
    beginning = begin(state, fit)
    del state
    state, stopwatch = yield from beginning
    first = state.timestamp.batch
    if stopwatch is None:
        return (yield from end(state, fit, first))
    at = state.position  # the boundary from which training resumes
    if at in _BEFORE_FIRST_ITERATION and _begins_iteration(state, fit):
        state = yield Event.ITERATION_START, state
    if at in _AFTER_EPOCH and state.timestamp.batch_in_epoch == 0:
        state = yield from epoch_end(state, fit, at)
        at = None
    while at in INSIDE_EPOCH or not state.has_ended():
        if state.timestamp.batch_in_epoch == 0 and at is not Event.EPOCH_START:
            state = yield Event.EPOCH_START, state
        script, at = batches_of_epoch(state, fit, at, stopwatch), None
        del state  # that script alone has it, so that a step may write to it
        state, exhausted = yield from script
        if exhausted:
            state = current(next_epoch(state), fit, Event.EPOCH_END)
            state = yield Event.EPOCH_END, state
            state = yield from epoch_end(state, fit, Event.EPOCH_END)
    check_finite(state)
    state = yield from evaluations(state, fit, Event.FIT_END)
    return (yield from end(state, fit, first))


def batches_of_epoch(state: State, fit: Fit, at: Event | None, stopwatch: Stopwatch) -> EpochScript:
    """The batches of an epoch, from the boundary ``at`` on; returns the State after them, and whether the data ended.

    In a script that runs batches the State is in one variable, and in none of a script around it: what is referred to
    nowhere else may be written to by the next step.
    """
    t = state.timestamp
    data = fit.source.epoch(t.epoch, start=t.batch_in_epoch, seen=t.batch)
    with closing(fit.strategy.feed(data)) as batches:
        while True:
            if at not in INSIDE_EPOCH:
                state = fit.strategy.steps_ahead(state, fit, batches, stopwatch)
                state = yield Event.BEFORE_DATALOADER, state
                state, samples, tokens = _load(state, fit, batches, stopwatch)
                if samples is None:
                    return state, True
                state = yield Event.AFTER_DATALOADER, state
                script = fit.strategy.batch(state, fit, samples, tokens, stopwatch.lap)
                del state
                state = yield from script
                at = Event.BATCH_END
            if at is Event.BATCH_END:
                if state.event is not None:  # else a graph has left the batch
                    state = outside_batch(state)
                if fit.evaluators:
                    state = yield from evaluations(state, fit, Event.BATCH_END)
                state = yield Event.BATCH_CHECKPOINT, state
            if fit.iteration_length is not None:
                state = yield from iteration_end(state, fit, TimeUnit.TOKEN, at)
            at = None
            if state.has_ended():
                count = state.timestamp.batch_in_epoch
                if count == fit.source.length and count > t.batch_in_epoch and fit.source.uneven is None:
                    next(batches, END)  # the source raises if there is one more than its length says
                return state, count == fit.source.length


def next_epoch(state: State) -> State:
    """The State with its epoch counted."""
    check_finite(state)
    return state.replace(timestamp=state.timestamp.next_epoch(), event=None)


def end(state: State, fit: Fit, first: int) -> Script:
    """The last event, once all ranks have come to it; what was trained are the batches from the ``first`` on."""
    fit.stages.engine.barrier(state, Event.FIT_END)
    if state.timestamp.batch == first and fit.stages.engine.global_rank == 0:
        further = "state.replace(stop=False)" if state.stop else "a longer max_duration"
        text = "nothing to train: training had ended before this call, at batch %d (%s); %s trains on"
        _log.warning(text, first, state.why_ended(), further)
    return (yield Event.FIT_END, state)


_BEFORE_FIRST_ITERATION = frozenset({None, Event.AFTER_LOAD, Event.FIT_END})
_AFTER_EPOCH = frozenset({Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.ITERATION_END, Event.ITERATION_CHECKPOINT})


def check_finite(state: State) -> None:
    """Raise if a batch was not finite, at the few places where waiting for a device costs nothing that counts."""
    if state.device.type not in ("cpu", "meta"):  # where it was raised at once, and where there are no numbers
        state.check_finite()


def already_finished(state: State) -> bool:
    """Whether this duration was over before the last batch, or the stream that the State is from had ended.

    A State that an algorithm has stopped, and that has ended, stays so with any duration.
    """
    end = state.timestamp.max_duration
    if end is not None and state.previous_timestamp >= end:
        return True
    return state.has_ended() and (state.position is Event.FIT_END or state.timestamp.batch == 0)


def _begins_iteration(state: State, fit: Fit) -> bool:
    t = state.timestamp
    return fit.iteration_length is not None and t.batch_in_iteration == 0 and t.epoch_in_iteration == 0


def train_batch(
    state: State, fit: Fit, loaded: Batch, seconds: Callable[[], float], number: int | None = None
) -> tuple[Batch, int, int] | None:
    """The next batch of ``fit``'s own data, with its errors; ``number`` is the batch's, if not the State's next."""
    engine, batch = fit.stages.engine, state.timestamp.batch
    try:
        ready = engine.next_batch(state, fit.stages.task, fit.source, loaded, seconds, Event.AFTER_DATALOADER)
    except DataError as error:
        error.add_note(f"raised by batch {batch if number is None else number} of train_dataloader")
        raise
    if ready is None or ready[2] or engine.padding:
        return ready
    # What all ranks have counted is known one batch later.
    if fit.needs_tokens is not None and not state.timestamp.token and not (engine.exchanges and batch == 0):
        raise DataError(
            f"{fit.needs_tokens} counts tokens, and batch {batch} has none by the default count, so it would never "
            "move: count them with loss=pl.Task(loss=..., tokens=lambda batch: batch['input_ids'].numel()), or write "
            'it in another unit, such as "100ba".'
        )
    if fit.counts_tokens:
        raise DataError(
            f"batch {batch} has no tokens by the default count, so a duration in tokens would never end: count them "
            "with loss=pl.Task(loss=..., tokens=lambda batch: batch['input_ids'].numel())."
        )
    return ready


def _load(state: State, fit: Fit, batches: Feed, stopwatch: Stopwatch) -> tuple[State, int | None, int]:
    """The State with the next batch, its samples and its tokens; ``(state, None, 0)`` at the end of the data."""
    ready = train_batch(state, fit, next(batches, END), stopwatch.lap)
    if ready is None:
        return state, None, 0
    # The step of this batch may write to the memory of these States.
    fit.boundary.state = None
    fit.boundary.evaluated.clear()
    batch, samples, tokens = ready
    source, t = fit.source, state.timestamp
    data: PyTree = source.position and source.position(t.epoch, t.batch)
    if source.uneven is not None:
        data = fit.stages.engine.positions(data, source.position is not None)
    return _loaded[type(state)](state, batch, data), samples, tokens


_loaded = setter("batch", "data")
