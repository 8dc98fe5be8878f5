"""The order of the older documents: fewer events, and an epoch that is cut short ends with EPOCH_END, too.

An evaluation comes before the EPOCH_END or FIT_END at which it is due, and there are no iterations.
"""

from __future__ import annotations

from collections.abc import Collection

from pure_loop.event import Event, events_between
from pure_loop.loop import training
from pure_loop.loop.call import Fit
from pure_loop.loop.driver import Script
from pure_loop.loop.evaluation import evaluations
from pure_loop.state import State

# Others of the script are passed over.
EVENTS_2021 = frozenset(
    {
        *(Event.INIT, Event.FIT_START, Event.EPOCH_START, Event.AFTER_DATALOADER, Event.EPOCH_END, Event.FIT_END),
        *events_between(Event.BATCH_START, Event.BATCH_END),
        *events_between(Event.EVAL_START, Event.EVAL_END),
    }
)


def script_of(state: State, fit: Fit) -> tuple[Script, Collection[Event] | None]:
    """The script of a call of ``fit`` from a State on, and the events of the call's order; None: it has all."""
    if fit.order == "2021":
        return fit_2021(state, fit), EVENTS_2021
    return training.fit(state, fit), None


def fit_2021(state: State, fit: Fit) -> Script:
    """Training as :func:`pure_loop.loop.training.fit` does it, in the order of 2021."""
    beginning = training.begin(state, fit)
    del state
    state, stopwatch = yield from beginning
    first = state.timestamp.batch
    if stopwatch is None:
        return (yield from training.end(state, fit, first))
    at = state.position
    while at in training.INSIDE_EPOCH or not state.has_ended():
        if state.timestamp.batch_in_epoch == 0 and at is not Event.EPOCH_START:
            state = yield Event.EPOCH_START, state
        script, at = training.batches_of_epoch(state, fit, at, stopwatch), None
        del state
        state, _ = yield from script
        state = training.next_epoch(state)
        ended = [Event.EPOCH_END, Event.FIT_END] if state.has_ended() else [Event.EPOCH_END]
        state = yield from evaluations(state, fit, *ended)
        state = yield Event.EPOCH_END, state
    training.check_finite(state)
    return (yield from training.end(state, fit, first))
