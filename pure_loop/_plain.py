"""Plain batches: what script and driver do with a batch, in one generator.

Between two kernels the caches hold what kernels need, and a call of a small Python function takes one to two
microseconds, as much as a hundredth of a small model's step. So batches of which nothing special is asked (one rank, no
graph, no strictness) aren't passed from the script of a batch through that of an epoch and the driver to the consumer,
and back, at each event: :func:`plain_batches` does what :func:`pure_loop.loop.batch` and
:func:`pure_loop.driver.run_script` do, in the same order, with the same stages, algorithms and callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from sys import _getframe, getrefcount
from typing import TYPE_CHECKING, Any
from weakref import ref

import attrs

from pure_loop._batches import train_batch
from pure_loop._consumer import gives_up
from pure_loop.event import Event
from pure_loop.sources import END
from pure_loop.state import State, at_event, fresh_draft_of, outside_batch_at

if TYPE_CHECKING:
    from pure_loop.loop import Fit, Stopwatch
    from pure_loop.model import ModelDef

__all__ = ["PLAIN_BATCHES", "PlainBatches", "are_unseen", "can_watch", "plain_batches"]

# A script yields it in the place of an event, with PlainBatches in the place of a State: a driver may go through them.
PLAIN_BATCHES: Any = object()


@attrs.define
class PlainBatches:
    """The batches of an epoch that come next, and the State before them.

    Attributes:
        given: the State, in a list, out of which it is taken; a driver puts the last one there.
        fit: the call of ``fit``.
        batches: where they come from.
        stopwatch: what takes their time.
        model: that of the last State.
        at: how far a driver went: None: nowhere; BATCH_END: an evaluator may be due; BATCH_CHECKPOINT: training has
            lasted as long as it was to; END: there is no further batch.
    """

    given: list[State]
    fit: Fit
    batches: Generator[Any, None, None]
    stopwatch: Stopwatch
    model: ModelDef
    at: Any = None


_set_event = vars(State)["event"].__set__

_EVENTS = (
    *(Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH),
    *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS),
    *(Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT),
)
# As plain names, which Python finds sooner than the members of a class.
BEFORE_DATALOADER, AFTER_DATALOADER, BATCH_START, BEFORE_TRAIN_BATCH = _EVENTS[:4]
BEFORE_FORWARD, AFTER_FORWARD, BEFORE_LOSS, AFTER_LOSS, BEFORE_BACKWARD, AFTER_BACKWARD = _EVENTS[4:10]
AFTER_TRAIN_BATCH, BATCH_END, BATCH_CHECKPOINT = _EVENTS[10:]

_BEFORE_UPDATE = frozenset(_EVENTS) - {BATCH_END, BATCH_CHECKPOINT}


def can_watch(watch: Collection[Event] | None) -> bool:
    """Whether plain batches can be gone through with these events watched: all, or none before the update."""
    return watch is None or are_unseen(watch)


def are_unseen(*events: Collection[Event]) -> bool:
    """Whether batches are unseen before their update by who is at these events."""
    return all(map(_BEFORE_UPDATE.isdisjoint, events))


def plain_batches(
    asked: PlainBatches,
    attached: Collection[Event],
    attend: Callable[[Event, State], State],
    watch: Collection[Event] | None,
    shown: Callable[[], State | None],
    followed: bool,
) -> Generator[tuple[Event, State], None, Callable[[], State | None]]:
    """Go through plain batches as far as a script has nothing else to do; yields what a consumer is given.

    Returns a reference to what he was given last, where not all events are watched.

    Args:
        asked: the batches. The last State is put there, however this ends.
        attached: the events at which there is an algorithm or a callback.
        attend: lets these have the State of an event, and gives the one after.
        watch: the events that the consumer is given; None: all.
        shown: a reference to the State that he was given last.
        followed: whether the one after an update is sure to take the place of the last one in his variable.
    """
    fit, batches, lap = asked.fit, asked.batches, asked.stopwatch.lap
    stages, boundary = fit.stages, fit.boundary
    task, donation = stages.task, stages.donation
    assert donation is not None
    forward_into, loss_into = stages.forward_into, stages.loss_into
    backward_into, update_draft = stages.backward_into, stages.update_draft
    # Of an event: 1 where the consumer is given it, and 2 more where something is attached to it.
    before_dataloader, after_dataloader, batch_start, before_train_batch, *of_microbatch, trained, end, checkpoint = [
        (watch is None or event in watch) + 2 * (event in attached) for event in _EVENTS
    ]
    before_forward, after_forward, before_loss, after_loss, before_backward, after_backward = of_microbatch
    by_default = stages.microbatch_size is None and task.weight is None
    state: Any = asked.given.pop()
    try:
        while True:
            if before_dataloader:
                state = at_event[state.__class__](state, BEFORE_DATALOADER)
                if before_dataloader > 1:
                    state = attend(BEFORE_DATALOADER, state)
                if before_dataloader != 2:
                    yield BEFORE_DATALOADER, state
            ready = train_batch(state, fit, next(batches, END), lap)
            if ready is None:
                asked.at = END
                return shown
            boundary.state = None
            whole, samples, tokens = ready
            cls = state.__class__
            state = fresh_draft_of(state)
            state.batch = whole
            state.event = AFTER_DATALOADER
            state.__class__ = cls
            if after_dataloader:
                if after_dataloader > 1:
                    state = attend(AFTER_DATALOADER, state)
                if after_dataloader != 2:
                    yield AFTER_DATALOADER, state
            if batch_start:
                state = at_event[state.__class__](state, BATCH_START)
                if batch_start > 1:
                    state = attend(BATCH_START, state)
                if batch_start != 2:
                    yield BATCH_START, state
            if before_train_batch:
                state = at_event[state.__class__](state, BEFORE_TRAIN_BATCH)
                if before_train_batch > 1:
                    state = attend(BEFORE_TRAIN_BATCH, state)
                if before_train_batch != 2:
                    yield BEFORE_TRAIN_BATCH, state

            unchanged = state.buffers, state.model
            weights = None
            if by_default and state.batch is whole:
                pieces, weights = [whole], stages.weights_of_whole(whole, samples)
            if weights is None:
                pieces = stages.microbatches(state.batch)
                weights, _ = stages.weights(pieces, state)
            del whole, ready
            count, losses = len(pieces), []
            for index in range(count):
                last, weight = index == count - 1, weights.shares[index]
                cls = state.__class__
                state = fresh_draft_of(state)
                state.microbatch, state.outputs, state.loss = pieces[index], None, None
                state.event = BEFORE_FORWARD
                state.__class__ = cls
                if before_forward:
                    if before_forward > 1:
                        state = attend(BEFORE_FORWARD, state)
                    if before_forward != 2:
                        yield BEFORE_FORWARD, state

                draft = fresh_draft_of(state)
                forward_into(draft, index, last)
                draft.event = AFTER_FORWARD
                draft.__class__ = state.__class__
                state = draft
                del draft
                if after_forward:
                    if after_forward > 1:
                        state = attend(AFTER_FORWARD, state)
                    if after_forward != 2:
                        yield AFTER_FORWARD, state
                if before_loss:
                    state = at_event[state.__class__](state, BEFORE_LOSS)
                    if before_loss > 1:
                        state = attend(BEFORE_LOSS, state)
                    if before_loss != 2:
                        yield BEFORE_LOSS, state

                draft = fresh_draft_of(state)
                loss_into(draft, index)
                draft.event = AFTER_LOSS
                draft.__class__ = state.__class__
                state = draft
                del draft
                if after_loss:
                    if after_loss > 1:
                        state = attend(AFTER_LOSS, state)
                    if after_loss != 2:
                        yield AFTER_LOSS, state
                if before_backward:
                    state = at_event[state.__class__](state, BEFORE_BACKWARD)
                    if before_backward > 1:
                        state = attend(BEFORE_BACKWARD, state)
                    if before_backward != 2:
                        yield BEFORE_BACKWARD, state

                draft = fresh_draft_of(state)
                backward_into(draft, weight)
                draft.event = AFTER_BACKWARD
                draft.__class__ = state.__class__
                state = draft
                del draft
                if after_backward:
                    if after_backward > 1:
                        state = attend(AFTER_BACKWARD, state)
                    if after_backward != 2:
                        yield AFTER_BACKWARD, state
                losses.append(state.loss)
            del pieces
            mean = weights.mean_of(losses)
            if (
                mean is not None
                or count > 1
                or weights.divisor != 1.0
                or stages.finishes
                or state.loss_scale is not None
            ):
                state = stages.finish_gradients(state, divisor=weights.divisor, loss=mean)
            del losses, mean
            if trained:
                if state.event is None:
                    _set_event(state, AFTER_TRAIN_BATCH)
                else:
                    state = at_event[state.__class__](state, AFTER_TRAIN_BATCH)
                if trained > 1:
                    state = attend(AFTER_TRAIN_BATCH, state)
                if trained != 2:
                    yield AFTER_TRAIN_BATCH, state

            # As in the driver, which is what has called: nothing but `state` refers to it here, and who counts.
            others = getrefcount(state) - 2
            seen = None if trained & 1 else shown()
            if seen is None:
                replaced = others == 1 and followed and gives_up(_getframe(1).f_back, state)
            else:
                replaced = getrefcount(seen) == 3 and followed and gives_up(_getframe(1).f_back, seen)
            donation.look(others, seen, replaced=replaced)
            del seen
            before = state.timestamp
            now = before.next_batch(samples, tokens, lap())
            draft = update_draft(state, unchanged)
            draft.timestamp, draft.previous_timestamp = now, before
            draft.event = draft.position = BATCH_END
            draft.__class__ = state.__class__
            state = draft
            del draft, before, unchanged
            if end:
                if end > 1:
                    state = attend(BATCH_END, state)
                if end != 2:
                    yield BATCH_END, state
                    if watch is not None:
                        shown = ref(state)
            if fit.evaluators:
                asked.at = BATCH_END
                return shown
            state = outside_batch_at[state.__class__](state, BATCH_CHECKPOINT, BATCH_CHECKPOINT)
            if checkpoint:
                if checkpoint > 1:
                    state = attend(BATCH_CHECKPOINT, state)
                if checkpoint != 2:
                    yield BATCH_CHECKPOINT, state
                    if watch is not None:
                        shown = ref(state)
            now = state.timestamp
            duration = now.max_duration
            if duration is not None and now.get(duration.unit) >= duration.value:
                asked.at = BATCH_CHECKPOINT
                return shown
    finally:
        asked.given.append(state)
        asked.model = state.model
