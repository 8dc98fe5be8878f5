"""The loop itself, run on a few batches: the first ones of a run, one of each evaluator, and the last ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from pure_loop._internal.closing import closing
from pure_loop._internal.pytree import Batch
from pure_loop.cadence import Cadence
from pure_loop.callback import Callback, LastBoundary, Logger
from pure_loop.data.group import END
from pure_loop.data.source import Batches, Source
from pure_loop.entry.assembly import Assembly
from pure_loop.entry.deterministic import stream_of
from pure_loop.errors import DataError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event
from pure_loop.hooks import Handler, Observer
from pure_loop.loop.call import Fit
from pure_loop.loop.driver import Script, drive
from pure_loop.loop.evaluation import evaluation
from pure_loop.loop.order_2021 import script_of
from pure_loop.loop.strict import Strict
from pure_loop.observer import bind_callbacks, observers
from pure_loop.recorder import Recorder
from pure_loop.rehearsal.measures import Length
from pure_loop.rehearsal.report import Place
from pure_loop.rehearsal.standins import (
    callback_standins,
    caught_observer,
    forced_handlers,
    logger_standin,
    marker,
    named_metrics,
)
from pure_loop.stages.nonfinite import total_loss
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State
from pure_loop.time import Time, due


class Held(Source):
    """One batch, given several times as an epoch, in the place of a dataloader.

    Args:
        batch: what the dataloader gave.
        times: how many batches are left of an epoch, at most.
        length: what the dataloader says of the length of its epochs.
    """

    def __init__(self, batch: Batch, times: int, length: int | None, stream: str) -> None:
        super().__init__(None, 0, stream, None, None)
        self._batch, self._times = batch, times
        self.length = self.loader_length = length

    def epoch(self, epoch: int, start: int = 0, seen: int = 0) -> Batches:
        times = self._times if self.length is None else min(self._times, max(self.length - start, 0))
        for _ in range(times):
            yield self._batch

    def _batches(self, epoch: int, start: int, seen: int) -> Batches:
        return self.epoch(epoch, start, seen)


def first_batch(source: Source) -> Batch:
    """The first batch of the first epoch; the source is closed.

    Raises:
        DataError: there is none.
    """
    try:
        with closing(source.epoch(0)) as batches:
            batch = next(batches, END)
    finally:
        source.close()
    if batch is END:
        raise DataError("the dataloader gave no batch")
    return batch


# How many batches are trained on in a pass: the second step shows that shapes stay as they are.
_STEPS = 2

Pairs = Generator[tuple[Event, State], None, Any]


def is_never(evaluator: BoundEvaluator) -> bool:
    """Whether an evaluator never runs."""
    return isinstance(evaluator.interval, Cadence) and not evaluator.interval.interval


@attrs.define
class Passes:
    """Passes of the loop over held batches, with stand-ins for callbacks and loggers.

    Attributes:
        assembly: the call of ``fit``.
        place: where errors belong.
        length: of the run.
        batch: the first batch of training.
        folder: for what stand-ins write.
        call_callbacks: whether callbacks are called.
        first: the State at the BEFORE_FORWARD of the first batch; None before it.
        boundary: the last State at a boundary from which training resumes.
        losses: of the steps.
        checkpoint: the State that was loaded from the checkpoint at which the run starts.
    """

    assembly: Assembly
    place: Place
    length: Length
    batch: Batch
    folder: Path
    call_callbacks: bool = True
    first: State | None = None
    boundary: State | None = None
    losses: list[Tensor] = attrs.field(factory=list)
    checkpoint: State | None = None

    def start(self) -> State | None:
        """INIT, loading and FIT_START alone: the State that evaluators are tried on."""
        fit, handlers = self._fit(())
        pairs = self._run(script_of(self.assembly.plan.state, fit), handlers, {}, (), fit)
        with closing(pairs):
            for event, state in pairs:
                if event is Event.FIT_START:
                    self.length = attrs.evolve(self.length, start=state.timestamp)
                    return state
        return None

    def evaluate(self, state: State, evaluator: BoundEvaluator, batch: Batch) -> State:
        """One evaluator on its first batch."""
        fit, handlers = self._fit(())
        script = evaluation(state, fit.stages, self._held(evaluator, batch))
        pairs = self._run((script, None), handlers, {}, (), fit)
        with closing(pairs):
            for _, after in pairs:
                state = after
        return state

    def train(self, evaluators: Sequence[tuple[BoundEvaluator, Batch]], *, to_end: bool) -> None:
        """The first batches of the run, to the end of an epoch that has no more; sets ``first`` and ``boundary``.

        Args:
            evaluators: each with its first batch.
            to_end: whether callbacks are called, and what comes after the second step. If not, an evaluator has failed.
        """
        fit, handlers = self._fit([self._held(*pair) for pair in evaluators])
        observed, closers, fit = self._observers(fit, called=to_end and self.call_callbacks)
        pairs = self._run(script_of(self.assembly.plan.state, fit), handlers, observed, closers, fit)
        end = Event.EPOCH_CHECKPOINT if fit.order == "current" else Event.EPOCH_END
        with closing(pairs):
            for event, state in pairs:
                if event is Event.BEFORE_FORWARD and self.first is None:
                    self.first = state
                if event is Event.BATCH_END:
                    self.losses.append(total_loss(state.loss))
                if event is Event.BATCH_END or event is Event.BATCH_CHECKPOINT:
                    self.boundary = state
                stepped = len(self.losses) >= _STEPS
                if stepped and (event is end or not to_end):
                    return

    def finish(self, state: State, evaluators: Sequence[tuple[BoundEvaluator, Batch]]) -> str:
        """The last batches of the run, resumed from this State: to FIT_END, with the counts of the end of the run."""
        fit, handlers = self._fit([self._held(*pair) for pair in evaluators])
        fit = attrs.evolve(fit, fresh=False, load=None)
        observed, closers, fit = self._observers(fit, called=self.call_callbacks)
        if self.length.batches is None:  # the end may be far away
            stop = Handler("rehearse", lambda state: state.replace(stop=True), None, False)
            handlers[Event.EPOCH_END] = (*handlers.get(Event.EPOCH_END, ()), stop)
        start, described = self._late(state)
        pairs = self._run(script_of(start, fit), handlers, observed, closers, fit)
        with closing(pairs):
            for _ in pairs:
                pass
        return described

    def _late(self, state: State) -> tuple[State, str]:
        """The State, as if the last batches were to come."""
        total, t = self.length.batches, state.timestamp
        state = state.replace(stop=False)
        if total is None or total - _STEPS <= t.batch:
            return state, f"from batch {t.batch}"
        start = self.length.at(total - _STEPS)
        before = self.length.at(total - _STEPS - 1)
        position = Event.BATCH_CHECKPOINT if start.batch_in_epoch else Event.EPOCH_CHECKPOINT
        if self.assembly.fit.order == "2021":
            position = Event.BATCH_END if start.batch_in_epoch else Event.EPOCH_END
        moved = state.replace(timestamp=start, previous_timestamp=before, position=position, event=position)
        return moved, f"from {start}"

    def _held(self, evaluator: BoundEvaluator, batch: Batch) -> BoundEvaluator:
        source = Held(batch, 1, evaluator.source.length, f"eval/{evaluator.label}")
        return attrs.evolve(named_metrics(evaluator, self.place), source=source, interval=self._due(evaluator))

    def _due(self, evaluator: BoundEvaluator) -> Callable[[State], bool]:
        """When it runs: as in the run, and at EPOCH_END if it runs in the first epoch, which is cut to two batches."""
        start, per_epoch, interval = self.length.start, self.length.per_epoch, evaluator.interval
        soon = True
        if isinstance(interval, Cadence) and per_epoch is not None:
            end = self.length.at((start.epoch + 1) * per_epoch)
            soon = due(interval.interval, start, end, Event.BATCH_END)

        def is_due(state: State) -> bool:
            event = state.event
            return event is not None and (evaluator.due(state, event) or (soon and event is Event.EPOCH_END))

        return is_due

    def _fit(self, evaluators: Sequence[BoundEvaluator]) -> tuple[Fit, dict[Event, tuple[Handler, ...]]]:
        """What the script needs, and its handlers."""
        fit = self.assembly.fit
        later = tuple(self.length.moments().values())[1:]
        handlers = forced_handlers(fit.stages.handlers, self.place, later)
        iteration = None if fit.iteration_length is None else Time(1, fit.iteration_length.unit)
        stages = attrs.evolve(fit.stages, handlers=handlers, workspace=Workspace(), observed=frozenset(Event))
        changed = attrs.evolve(
            fit,
            stages=stages,
            source=Held(self.batch, _STEPS, fit.source.length, "train"),
            evaluators=evaluators,
            iteration_length=iteration,
            strategy=fit.strategy.uncompiled,
            evaluating=stages,
            load=None if fit.load is None else self._loaded,
            boundary=LastBoundary(),
        )
        return changed, handlers

    def _loaded(self, state: State) -> State:
        """The State of the checkpoint, which the call gives once."""
        if self.checkpoint is None:
            assert self.assembly.fit.load is not None
            self.checkpoint = self.assembly.fit.load(state)
        return self.checkpoint

    def _observers(
        self, fit: Fit, *, called: bool
    ) -> tuple[dict[Event, tuple[Observer, ...]], list[Callable[[], None]], Fit]:
        """The stand-ins of callbacks and loggers by event, bound, and what closes them."""
        if not called:
            return {}, [], fit
        assembly, place = self.assembly, self.place
        listed = _given(assembly.plan.settings.callbacks, assembly.run.callbacks)
        callbacks = callback_standins(listed, self.folder, place)
        loggers = logger_standin(assembly.plan.logger.loggers, place)
        recorder = next((item for item in assembly.run.callbacks if isinstance(item, Recorder)), None)
        table, objects, _ = observers(callbacks, loggers, recorder)
        run = attrs.evolve(
            assembly.run, callbacks=objects, boundary=fit.boundary, at_end=[], sources=(), autoresume=None
        )
        bind_callbacks(run)

        def closer(callback: Callback) -> Callable[[], None]:
            def close() -> None:
                with place.collecting(f"callback {type(callback).__name__}, close"):
                    callback.close()

            return close

        caught = {event: tuple(caught_observer(item, place) for item in some) for event, some in table.items()}
        return caught, [*map(closer, objects), *run.at_end], fit

    def _run(
        self,
        run: tuple[Script, Collection[Event] | None],
        handlers: Mapping[Event, tuple[Handler, ...]],
        observed: Mapping[Event, tuple[Observer, ...]],
        closers: Sequence[Callable[[], None]],
        fit: Fit,
    ) -> Pairs:
        """The stream of a script and its events; ``place`` has the name of the computation that raises an error."""
        last = marker(self.place)
        table = {event: (*observed.get(event, ()), last) for event in Event}
        script, events = run
        strict = None if self.place.fake else Strict()
        pairs = drive(script, handlers, table, stages=fit.stages, strict=strict, events=events, closing=closers)
        return stream_of(pairs, self.assembly.plan.settings.deterministic)


def _given(callbacks: object, bound: Sequence[Callback]) -> list[object]:
    """The callbacks of a call, functions among them, and those that the call has added; without loggers."""
    listed: Iterable[object] = callbacks if isinstance(callbacks, list | tuple) else (callbacks,)
    own = [item for item in listed if not isinstance(item, Logger)]
    added = [item for item in bound if not isinstance(item, Logger | Recorder)]
    return [*own, *(item for item in added if all(item is not callback for callback in own))]
