"""The loop: scripts, in which each event is one line, and the driver that runs them.

A *script* is a generator: ``state = yield EVENT, state`` yields an event and receives the State that the
algorithms return. It refers to no algorithm, callback or consumer. The *driver* (:func:`drive`)
runs a script: it applies the algorithms to the State, passes the result to the callbacks, yields it to
the consumer, and sends it back. The scripts here read as the specification in :mod:`pure_loop.order`;
:func:`pure_loop.order.expected` computes independently what they must yield.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Protocol, TypeAlias

import attrs
from torch import Tensor

from pure_loop._internal.closing import closing
from pure_loop._internal.types import Batch
from pure_loop.algorithm import Handler
from pure_loop.cadence import Cadence
from pure_loop.data.source import END, Source
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event, events_between
from pure_loop.loop.driver import drive, run_to_end
from pure_loop.loop.evaluation import Script, evaluation, refuse_misfit, without_metrics
from pure_loop.random.guards import is_users
from pure_loop.stages import Stages
from pure_loop.stages.notes import noting
from pure_loop.state import Loss, State, outside_batch, raw_loss, setter, with_fields
from pure_loop.time import Time, TimeUnit

__all__ = ["Eager", "Fit", "LoopStages", "Script", "Strategy", "fit", "gradients"]

# (state, number of the microbatch, whether it is the last, its weight)
Between: TypeAlias = Callable[[State, int, bool, float | Tensor], Script]
# Returns the State after an epoch's batches, and whether its data ended.
EpochScript: TypeAlias = Generator[tuple[Event, State], State, tuple[State, bool]]

_OF_A_MICROBATCH = events_between(Event.BEFORE_FORWARD, Event.AFTER_BACKWARD)


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
            now = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentTypeError(
                f"clock returned {value!r:.60} of type {type(value).__name__}: fit(clock=...) is a function that "
                "returns seconds as a float, such as time.monotonic."
            ) from error
        if not abs(now) < _MOST_SECONDS:
            raise ArgumentError(
                f"clock returned {now}: fit(clock=...) is a function that returns seconds as a finite float below "
                f"{_MOST_SECONDS:g}, such as time.monotonic."
            )
        seconds, self.last = now - self.last, now
        return max(0.0, seconds)


@attrs.frozen(kw_only=True)
class LoopStages(Stages):
    """The second argument of a handler that takes one: the loop's stages, algorithms included.

    ``stages.gradients(state)`` is the gradient of the whole batch at ``state.params``, computed as the loop
    computes it: microbatches, weights, precision, clipping, and the other algorithms at the events
    from BEFORE_FORWARD to AFTER_BACKWARD. Random numbers are those of this batch, so a second call
    draws the same dropout masks. Nothing is yielded, and no callback is called.
    """

    handlers: dict[Event, tuple[Handler, ...]]
    observed: frozenset[Event] = frozenset(Event)

    @property
    def harmless(self) -> bool:
        # An algorithm at these events may have replaced the targets or the loss.
        return self.task.harmless and self.handlers.keys().isdisjoint(_OF_A_MICROBATCH)

    def gradients(self, state: State) -> State:
        """``state``, of the same event, with the ``grads`` (with ``loss`` and ``grad_norm``) of its batch at its
        parameters.
        """
        if state.event in _OF_A_MICROBATCH:
            raise ArgumentError(
                f"stages.gradients was called at {state.event.name}, inside the computation that it would repeat: its "
                "handler would be called again, without an end. Call it at AFTER_TRAIN_BATCH, or at BATCH_START."
            )
        script = gradients(state.replace(grads=None, grad_norm=None), self)
        result: State = run_to_end(script, self.handlers, self)
        return with_fields(result, event=state.event)


@attrs.define
class LastBoundary:
    """The State of the last boundary, for as long as no step writes to it.

    Attributes:
        state: a ``CheckpointSaver`` puts it here at a boundary, the loop at the start of evaluations; the loop takes it
            out as soon as the next batch is loaded. None: a batch is under way, or nothing saves.
        evaluated: of evaluations since the last batch the States at EVAL_START, with the weights that were measured, by
            the labels of their evaluators, the last one last: callbacks that save them put them here.
    """

    state: State | None = None
    evaluated: dict[str, State] = attrs.field(factory=dict)


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
        """The batches of an epoch, as :meth:`ahead` takes them."""

    def ahead(self, state: State, fit: Fit, batches: Feed, stopwatch: Stopwatch) -> State:
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
    boundary: LastBoundary = attrs.field(factory=LastBoundary)


def gradients(state: State, stages: LoopStages, between: Between | None = None) -> Script:
    """The gradient of a batch, microbatch by microbatch; each weighs as many samples (or tokens) as it holds.

    ``between`` continues from the State of a microbatch's BEFORE_FORWARD to that of its AFTER_BACKWARD in another way.
    """
    engine = stages.engine
    pieces = stages.microbatches(state.batch)
    weights, count = stages.weights(pieces, state)
    losses: list[Loss] = []
    for index in range(count):
        last, weight = index == count - 1, weights.shares[index]
        buffers, model = state.buffers, state.model
        piece = pieces[min(index, len(pieces) - 1)]
        stages.place.microbatch = index
        state = yield Event.BEFORE_FORWARD, _cut[type(state)](state, piece)
        if between is not None:
            state = yield from between(state, index, last, weight)
        else:
            state = yield Event.AFTER_FORWARD, stages.forward(state, index=index, last=last)
            state = yield Event.BEFORE_LOSS, state
            state = yield Event.AFTER_LOSS, stages.loss(state, index=index)
            state = yield Event.BEFORE_BACKWARD, state
            # Not in one line: while it waited, the script would keep the graph alive in the State before.
            state = stages.backward(state, weight=weight)
        if not engine.counts_microbatch(index, len(pieces)):
            state = state.replace(buffers=buffers, model=model)
        state = yield Event.AFTER_BACKWARD, state
        losses.append(raw_loss(state))
    stages.place.microbatch = 0
    mean = engine.mean_loss(weights, losses)
    return stages.finish_gradients(state, divisor=engine.divisor(weights), loss=mean)


class Eager:
    """Batches computed one by one, stage by stage: each event is one line."""

    graphs = None

    @property
    def uncompiled(self) -> Eager:
        return self

    def feed(self, batches: Feed) -> Feed:
        return batches

    def ahead(self, state: State, fit: Fit, batches: Feed, stopwatch: Stopwatch) -> State:
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
        now = before.next_batch(*stages.engine.counts(samples, tokens, seconds))
        state = stages.update(state, buffers=buffers, model=model, timestamp=now, previous_timestamp=before)
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


def begin(state: State, fit: Fit) -> Script:
    """What comes before the first batch, up to FIT_START: a State that fits the call, loaded where it is to be."""
    if not fit.fresh:
        return (yield Event.FIT_START, fit.prepare(outside_batch(state)))
    state = yield Event.INIT, fit.meet(state)
    state = yield Event.BEFORE_LOAD, fit.prepare(state)
    # From a checkpoint, or the State itself; the first step may write where that is.
    state = fit.stages.workspace.begins_with(state if fit.load is None else fit.load(state))
    state = yield Event.AFTER_LOAD, state
    return (yield Event.FIT_START, state)


def fit(state: State, fit: Fit) -> Script:
    """Training, from a new State or from the boundary at which a State was kept."""
    state = yield from begin(state, fit)
    at = state.position  # the boundary from which training resumes
    if already_finished(state, at):
        return (yield from end(state, fit))
    refuse_misfits(state, fit.stages, fit.evaluators)
    stopwatch = Stopwatch(fit.clock)
    if at in _BEFORE_FIRST_ITERATION and _begins_iteration(state, fit):
        state = yield Event.ITERATION_START, state
    if at in _AFTER_EPOCH and state.timestamp.batch_in_epoch == 0:
        state = yield from epoch_end(state, fit, at)
        at = None
    while at in INSIDE_EPOCH or not state.has_ended():
        if state.timestamp.batch_in_epoch == 0 and at is not Event.EPOCH_START:
            state = yield Event.EPOCH_START, state
        script, at = batches_of_epoch(state, fit, at, stopwatch), None
        state = None  # type: ignore[assignment]  # that script alone has it, so that a step may write to it
        state, exhausted = yield from script
        if exhausted:
            state = current(next_epoch(state), fit, Event.EPOCH_END)
            state = yield Event.EPOCH_END, state
            state = yield from epoch_end(state, fit, Event.EPOCH_END)
    check_finite(state)
    state = yield from evaluations(state, fit, Event.FIT_END)
    return (yield from end(state, fit))


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
                state = fit.strategy.ahead(state, fit, batches, stopwatch)
                state = yield Event.BEFORE_DATALOADER, state
                state, samples, tokens = _load(state, fit, batches, stopwatch)
                if samples is None:
                    return state, True
                state = yield Event.AFTER_DATALOADER, state
                script = fit.strategy.batch(state, fit, samples, tokens, stopwatch.lap)
                state = None  # type: ignore[assignment]
                state = yield from script
                at = Event.BATCH_END
            if at is Event.BATCH_END:
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


def end(state: State, fit: Fit) -> Script:
    """The last event, once all ranks have come to it."""
    fit.stages.engine.barrier(state, Event.FIT_END)
    return (yield Event.FIT_END, state)


def refuse_misfits(state: State, stages: LoopStages, evaluators: Sequence[BoundEvaluator]) -> None:
    """Refuse metrics that do not fit what they measure, before training: hours may pass before the first evaluation.

    Each evaluator with metrics that were passed measures one microbatch of its data, on a branch that is dropped. Left
    out is data that can't be begun again, or has workers to start, and what several ranks would have to do together.
    """
    if stages.engine.exchanges:
        return
    for evaluator in evaluators:
        never = isinstance(evaluator.interval, Cadence) and not evaluator.interval.interval
        if evaluator.source.repeats and not never and not all(metric.of_loss for metric in evaluator.metrics or ()):
            script, label = evaluation(state, stages, evaluator), evaluator.label
            about = noting(lambda: f"raised by the first microbatch of evaluator {label!r}, before training")  # noqa: B023
            with closing(script), about:
                for _, shown in drive(script, stages.handlers, stages=stages, watch={Event.EVAL_AFTER_FORWARD}):
                    refuse_misfit(shown, stages, evaluator.metrics or ())
                    break


_BEFORE_FIRST_ITERATION = frozenset({None, Event.AFTER_LOAD, Event.FIT_END})
_AFTER_EPOCH = frozenset({Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.ITERATION_END, Event.ITERATION_CHECKPOINT})


def due_evaluators(state: State, fit: Fit, event: Event) -> list[BoundEvaluator]:
    """The evaluators due at BATCH_END or EPOCH_END; at FIT_END those that did not run at the last batch.

    A function that is an interval is asked about a State without the metrics of evaluators: its answer is the same
    before and after :func:`current`, and where training resumes in between.
    """
    if not all(isinstance(evaluator.interval, Cadence) for evaluator in fit.evaluators):
        if fit.stages.workspace.ownership is not None:
            fit.stages.workspace.ownership.observed = True  # a function of the user's is shown the State
        state = without_metrics(state, {evaluator.label for evaluator in fit.evaluators})
    due = []
    for evaluator in fit.evaluators:
        users = is_users(evaluator.interval)
        at = with_fields(state, event=event) if users else state
        with fit.stages.guard(at, ("interval", evaluator.label)) if users else nullcontext():
            if evaluator.due_at_end(state) if event is Event.FIT_END else evaluator.due(state, event):
                due.append(evaluator)
    return due


def current(state: State, fit: Fit, event: Event) -> State:
    """The State of BATCH_END or EPOCH_END, without metrics that are about to be measured again at this event.

    They are those of an earlier evaluation, and would be taken for those of the batch or epoch that has just ended.
    """
    if state.metrics.keys().isdisjoint([evaluator.label for evaluator in fit.evaluators]):
        return state
    return without_metrics(state, {evaluator.label for evaluator in due_evaluators(state, fit, event)})


def evaluations(state: State, fit: Fit, *events: Event) -> Script:
    """The evaluators that are due at one of these events; decided before the first one runs."""
    requested = [item for event in events for item in due_evaluators(state, fit, event)]
    due_now = [item for item in fit.evaluators if item in requested]
    if not due_now:
        return state
    state = without_metrics(state, {item.label for item in due_now})
    fit.boundary.state = state if state.event is not None else state.replace(event=state.position)
    state = yield Event.EVAL_BEFORE_ALL, state
    labels = [item.label for item in fit.evaluators]
    for evaluator in due_now:
        state = yield from evaluation(state, fit.evaluating, evaluator, labels)
    state = yield Event.EVAL_AFTER_ALL, state
    fit.boundary.state = None
    return state


def check_finite(state: State) -> None:
    """Raise if a batch was not finite, at the few places where waiting for a device costs nothing that counts."""
    if state.device.type not in ("cpu", "meta"):  # where it was raised at once, and where there are no numbers
        state.check_finite()


def already_finished(state: State, at: Event | None) -> bool:
    """Whether this duration was over before the last batch, or the stream that the State is from had ended.

    A State that an algorithm has stopped, and that has ended, stays so with any duration.
    """
    end = state.timestamp.max_duration
    if end is not None and state.previous_timestamp >= end:
        return True
    return state.has_ended() and (at is Event.FIT_END or state.timestamp.batch == 0)


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
            "move: count them with task=pl.Task(tokens=lambda batch: batch['input_ids'].numel()), or write it in "
            'another unit, such as "100ba".'
        )
    if fit.counts_tokens:
        raise DataError(
            f"batch {batch} has no tokens by the default count, so a duration in tokens would never end: count them "
            "with task=pl.Task(tokens=lambda batch: batch['input_ids'].numel())."
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
    return _loaded[type(state)](state, batch), samples, tokens


_loaded = setter("batch")
_cut = setter("microbatch", without=("outputs", "loss"))
