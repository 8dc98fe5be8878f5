"""One call of ``fit``: what its script needs besides a State, and how its batches are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import attrs

from pure_loop._internal.pytree import Batch
from pure_loop.callback import LastBoundary
from pure_loop.data.source import Source
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.driver import Script
from pure_loop.stages import Stages
from pure_loop.state import State
from pure_loop.time import Time

# Of which a sum of many stays finite, and which are 30 million years.
_MOST_SECONDS = 1e15


class Stopwatch:
    """Seconds between laps, by a clock.

    Attributes:
        last: when the last lap was.

    Raises:
        ArgumentError: the clock gives NaN or infinity, at which no duration ends and which no checkpoint holds.
        ArgumentTypeError: it gives no number.
    """

    __slots__ = ("_clock", "last")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last = 0.0
        self.lap()

    def lap(self) -> float:
        """The seconds since the last lap; 0 where the clock was set back."""
        value: Any = self._clock()
        try:
            time = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentTypeError(
                f"clock returned {value!r:.60} of type {type(value).__name__}: fit(clock=...) is a function that "
                "returns seconds as a float, such as time.monotonic."
            ) from error
        if not abs(time) < _MOST_SECONDS:
            raise ArgumentError(
                f"clock returned {time}: fit(clock=...) is a function that returns seconds as a finite float below "
                f"{_MOST_SECONDS:g}, such as time.monotonic."
            )
        seconds, self.last = time - self.last, time
        return max(0.0, seconds)


class Feed(Protocol):
    """The batches of an epoch: those of a source, or some that a strategy looks at before they are taken."""

    def __next__(self) -> Batch: ...

    def close(self) -> None: ...


class Graphs(Protocol):
    """What computes batches as graphs.

    Attributes:
        observed: the events at which graphs end.
        steps: how many batches are loaded at a time.
    """

    observed: frozenset[Event]
    steps: int


class Strategy(Protocol):
    """How the batches of a call of ``fit`` are computed: :class:`Eager`, compiled, verified, of a size that is tried.

    Attributes:
        graphs: what makes graphs of batches, inside of which no stage can be looked at; None: there are none.
        uncompiled: the strategy without graphs.
    """

    @property
    def graphs(self) -> Graphs | None: ...

    @property
    def uncompiled(self) -> Strategy: ...

    def feed(self, batches: Feed) -> Feed:
        """The batches of an epoch, as :meth:`steps_ahead` takes them."""

    def steps_ahead(self, state: State, fit: Fit, batches: Feed, stopwatch: Stopwatch) -> State:
        """The State after batches that are gone through at once, before the next one is loaded."""

    def batch(self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]) -> Script:
        """The script of a batch, from the State of AFTER_DATALOADER to that of BATCH_END.

        Args:
            state: with the batch.
            fit: the call.
            samples, tokens: of this rank's part of it.
            seconds: returns the seconds since its last call.
        """

    def close(self) -> None:
        """Release what batches need."""


@attrs.frozen(kw_only=True)
class Fit:
    """One call of ``fit``: what its script needs besides a State."""

    stages: LoopStages
    source: Source
    evaluators: Sequence[BoundEvaluator]
    iteration_length: Time | None
    clock: Callable[[], float]
    fresh: bool
    meet: Callable[[State], State]
    prepare: Callable[[State], State]
    counts_tokens: bool
    # What never moves as long as no batch has tokens, for errors.
    needs_tokens: str | None = None
    order: Literal["current", "2021"] = "current"
    strategy: Strategy
    # The stages of evaluations.
    evaluating: Stages
    load: Callable[[State], State] | None = None
    # The checkpoint that it reads.
    resumed_from: str | None = None
    boundary: LastBoundary = attrs.field(factory=LastBoundary)
