"""Cadence: how often something happens, said in one way everywhere.

``"10ba"``, ``"1ep"``, ``"0.1dur"``, a :class:`pure_loop.Time`, ``every("10ba")``, or any
pure predicate ``State -> bool`` of your own: evaluators, algorithms and loggers take all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs

from pure_loop._internal.arguments import accepts, name_of
from pure_loop._internal.suggestions import teaching
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.time import Time, TimeLike, TimeUnit, due, passed, read_interval

__all__ = ["Cadence", "CadenceLike", "as_predicate", "every"]

Predicate: TypeAlias = Callable[[State], bool]
CadenceLike: TypeAlias = "TimeLike | Predicate"


@attrs.frozen(repr=False)
class Cadence:
    """True for States of which the last counted batch (or epoch) passed a multiple of the interval.

    It compares ``state.previous_timestamp`` with ``state.timestamp`` and nothing else, so there is
    nothing to save and it resumes exactly.
    """

    interval: Time

    def __call__(self, state: State) -> bool:
        result = passed(self.interval, state.previous_timestamp, state.timestamp)
        if result is not None:
            return result
        return due(self.interval, state.previous_timestamp, state.timestamp, counted_at(self.interval, state))

    def at(self, state: State, event: Event) -> bool:
        """Whether an evaluator with this interval is due at this event of this State."""
        return due(self.interval, state.previous_timestamp, state.timestamp, event)

    def __repr__(self) -> str:
        return f"every({self.interval.in_a_call()})"

    def __str__(self) -> str:
        return f"every {self.interval}"

    def in_a_call(self) -> str:
        return self.interval.in_a_call()


def counted_at(interval: Time, state: State) -> Event:
    """The event at which the unit of an interval is counted."""
    unit, t = interval.unit, state.timestamp
    if unit is TimeUnit.DURATION and t.max_duration is not None:
        unit = t.max_duration.unit
        if unit is TimeUnit.EPOCH and t.batches_per_epoch:
            return Event.BATCH_END
    if unit is TimeUnit.EPOCH:
        return Event.EPOCH_END
    return Event.ITERATION_END if unit is TimeUnit.ITERATION else Event.BATCH_END


@teaching
def every(interval: TimeLike) -> Cadence:
    """A predicate that is true once in every ``interval``: ``pl.algorithm(Event.BATCH_END, when=pl.every("10ba"))``.

    The number 0 means never; ``"0ba"`` is refused.

    >>> every("10ba")
    every('10ba')
    """
    return Cadence(read_interval(interval, "interval"))


def as_predicate(cadence: CadenceLike | None, name: str, units: Iterable[TimeUnit] = TimeUnit) -> Predicate | None:
    """What a user wrote as a cadence, as a predicate.

    Args:
        cadence: a text, a Time, 0 for never, or a predicate; None stays None.
        name: the argument's name, for the error.
        units: what the error offers to write it in.

    Raises:
        ArgumentTypeError: it is none of these.
        ArgumentError: it can't be read, or counts iterations where evaluation can't.
    """
    if cadence is None or isinstance(cadence, Cadence):
        return cadence
    if isinstance(cadence, str | int | Time):
        return Cadence(read_interval(cadence, name, units))
    if callable(cadence):
        if not accepts(cadence, 1):
            raise ArgumentTypeError(
                f"{name} is the function {name_of(cadence)}, which can't be called with one argument: it is called as "
                f"{name_of(cadence)}(state), and returns a bool."
            )
        return cadence
    raise ArgumentTypeError(
        f'{name}={cadence!r}: write an interval such as "10ba", "1ep" or "0.1dur", or a pure function of the State '
        "that returns a bool."
    )
