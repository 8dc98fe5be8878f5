"""Where a rehearsal is: the phase that an error belongs to, and the errors that were found."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from pure_loop._internal.shapes_only import needs_numbers
from pure_loop.algorithm import Handler
from pure_loop.cadence import Cadence
from pure_loop.errors import ImpurityError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event
from pure_loop.loop.contract import check_returned
from pure_loop.loop.observers import Observer, refuse_return
from pure_loop.metrics import Metric
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["Place", "caught_observer", "forced_handlers", "marker", "named_metrics"]


@attrs.define
class Place:
    """The phase under way, the failures so far, and what could not be tried.

    Attributes:
        phase: the name of the computation under way.
        note: what is added to each name, such as the end of the run.
        failures: the name of a phase and its error.
        skipped: sentences about what was not tried.
        silenced: the names of callbacks that have failed, and are called no more.
        fake: whether tensors have no numbers: code that needs them is no failure, and not tried.
        stops: how many computations have ended early.
    """

    phase: str = "start"
    note: str = ""
    failures: list[tuple[str, Exception]] = attrs.field(factory=list)
    skipped: list[str] = attrs.field(factory=list)
    silenced: set[str] = attrs.field(factory=set)
    fake: bool = False
    stops: int = 0

    def fail(self, error: Exception, phase: str | None = None) -> None:
        """Note a failure, once for each error."""
        self.stops += 1
        if self.fake and needs_numbers(error):
            self.skip(f"{phase or self.phase}: it needs numbers, which tensors don't have with fake=True ({error}).")
            return
        if isinstance(error, ImpurityError):  # found after the code that it names, in whatever phase that is
            phase = "purity"
        if all(error is not known for _, known in self.failures):
            self.failures.append(((phase or self.phase) + self.note, error))

    def skip(self, sentence: str) -> None:
        """Note what is not tried, once."""
        if sentence not in self.skipped:
            self.skipped.append(sentence)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The phase inside the ``with``; after an error it stays, because the error belongs to it."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    @contextmanager
    def collecting(self, phase: str) -> Iterator[None]:
        """The same; an error is noted as a failure, and what follows the ``with`` runs."""
        before, self.phase = self.phase, phase
        try:
            yield
        except Exception as error:
            self.fail(error)
        finally:
            self.phase = before


# What is computed after each event, until the next one.
_COMPUTED_AFTER = {
    Event.INIT: "start, agreement after INIT",
    Event.BEFORE_LOAD: "load_path, numbers of the checkpoint",
    Event.BEFORE_DATALOADER: "data, batch",
    Event.BEFORE_TRAIN_BATCH: "microbatches and their weights",
    Event.BEFORE_FORWARD: "forward",
    Event.BEFORE_LOSS: "loss",
    Event.BEFORE_BACKWARD: "backward",
    Event.AFTER_BACKWARD: "gradients",
    Event.AFTER_TRAIN_BATCH: "optimizer step",
}


def marker(place: Place) -> Observer:
    """The last observer of each event: what fails next belongs to the computation that follows the event."""

    def observe(event: Event, state: State) -> None:
        if event.is_eval and state.evaluator is not None:
            what = {Event.EVAL_BEFORE_FORWARD: ", forward"}.get(event, ", metrics")
            place.phase = f"evaluator {state.evaluator!r}, first batch{what}"
            return
        number = state.timestamp.batch
        computed = _COMPUTED_AFTER.get(event)
        place.phase = f"{computed}, batch {number}" if computed else f"the loop after {event.name}, batch {number}"

    return Observer("rehearse", observe)


def caught_observer(observer: Observer, place: Place) -> Observer:
    """A callback whose first error is a failure of its own, after which it is called no more."""

    def observe(event: Event, state: State) -> None:
        if observer.name in place.silenced:
            return
        count = len(place.failures)
        with place.collecting(f"callback {observer.name} at {event.name}"):
            returned = observer.observe(event, state)
            if returned is not None:
                refuse_return(returned, observer.name, event)
        if len(place.failures) > count:
            place.silenced.add(observer.name)

    return Observer(observer.name, observe)


def forced_handlers(
    handlers: Mapping[Event, tuple[Handler, ...]], place: Place, later: tuple[Timestamp, ...]
) -> dict[Event, tuple[Handler, ...]]:
    """The handlers, each of which runs although its ``when`` may come round later only.

    Args:
        handlers: of the algorithms of the call.
        place: where their errors belong.
        later: timestamps of the run, at which a predicate of the user's that says no is evaluated again.
    """
    return {event: tuple(_forced(handler, event, place, later) for handler in some) for event, some in handlers.items()}


def _forced(handler: Handler, event: Event, place: Place, later: tuple[Timestamp, ...]) -> Handler:
    when, function = handler.when, handler.function
    phase = f"algorithm {handler.algorithm!r} at {event.name}"

    def run(state: State, *stages: Any) -> State:
        with place.during(phase):
            if when is None or isinstance(when, Cadence) or when(state):
                result: State = function(state, *stages)
                return result if result is state else check_returned(result, state, handler.algorithm, event)
            for timestamp in later:
                moved = state.replace(timestamp=timestamp, previous_timestamp=state.timestamp)
                if when(moved):
                    result = _moved_back(function(moved, *stages), state)
                    return check_returned(result, state, handler.algorithm, event)
        place.skip(f"{phase}: its when= was False at the start, in the middle and at the end of the run.")
        return state

    return attrs.evolve(handler, function=run, when=None)


def _moved_back(result: Any, state: State) -> State:
    """What a handler returned, at the time of the State that it was to be called with."""
    if not isinstance(result, State):
        return result  # type: ignore[no-any-return]  # which the driver refuses
    return result.replace(timestamp=state.timestamp, previous_timestamp=state.previous_timestamp)


def named_metrics(evaluator: BoundEvaluator, place: Place) -> BoundEvaluator:
    """The evaluator, each of whose metrics is named where it fails."""
    if evaluator.metrics is None:
        return evaluator
    metrics = tuple(_named(metric, evaluator.label, place) for metric in evaluator.metrics)
    return attrs.evolve(evaluator, metrics=metrics)


def _named(metric: Metric, label: str, place: Place) -> Metric:
    result = copy.copy(metric)
    phase = f"metric {metric.name!r} of evaluator {label!r}"

    def naming(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            with place.during(phase):
                return function(*args)

        return called

    for name in ("init", "update", "compute"):
        object.__setattr__(result, name, naming(getattr(metric, name)))
    return result
