"""Intervals of callbacks: whether a record is due at an event, and whether the batch under way is one to measure."""

from __future__ import annotations

from pure_loop.cadence import Cadence, CadenceLike, Predicate, as_predicate
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.time import Time, Timestamp, TimeUnit, due


def read_interval(
    interval: CadenceLike,
    where: str,
    advice: str = 'an interval such as "10ba" or "1ep"; 0 means never',
    argument: str = "interval",
) -> Predicate:
    """What a user wrote as ``interval=``, as a predicate.

    Args:
        interval: a text, a Time, 0 for never, or a predicate.
        where: the callback's name, for the error.
        advice: what to write instead of None.
        argument: its name.

    Raises:
        ArgumentTypeError, ArgumentError: it is None, or can't be read.
    """
    predicate = as_predicate(interval, f"{where} {argument}")
    if predicate is None:
        raise ArgumentTypeError(f"{where}({argument}=None): write {advice}.")
    return predicate


def is_due(interval: Predicate, state: State, event: Event) -> bool:
    """Whether a record is due at BATCH_END or EPOCH_END; a predicate of the user's own is called at BATCH_END alone."""
    if isinstance(interval, Cadence):
        return interval.at(state, event)
    return event is Event.BATCH_END and bool(interval(state))


def measures_batch(interval: Predicate, state: State) -> bool:
    """Whether the batch under way is one to measure, before it is counted: a function of the State alone.

    In batches (``"10ba"``, ``"0.1dur"``) it is the batch that completes a multiple: the 10th, the 20th. How many
    samples and seconds a batch takes isn't known before its end, so in other units it is the first batch after the
    multiple. A predicate is passed the State with this batch counted, with as many samples as the batch before.
    """
    timestamp, previous = state.timestamp, state.previous_timestamp
    if not isinstance(interval, Cadence):
        return bool(interval(state.count_batch(timestamp.sample - previous.sample, timestamp.token - previous.token)))
    if _counts_batches(interval.interval, timestamp):
        return due(interval.interval, timestamp, timestamp.next_batch(0), Event.BATCH_END)
    return interval(state)


def _counts_batches(interval: Time, timestamp: Timestamp) -> bool:
    unit, end = interval.unit, timestamp.max_duration
    if unit is not TimeUnit.DURATION or end is None:
        return unit is TimeUnit.BATCH
    return end.unit is TimeUnit.BATCH or (end.unit is TimeUnit.EPOCH and bool(timestamp.batches_per_epoch))
