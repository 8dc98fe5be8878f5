"""The compiled batch: a script that yields the observed events, and calls graphs in between."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

from torch import Tensor

from pure_loop._internal.pytree import Batch, PyTree
from pure_loop.cadence import Cadence
from pure_loop.compile.evaluation import CompiledEvaluation
from pure_loop.compile.graph import Ended, PerBatch, Traced, at
from pure_loop.compile.segment import Call, Run
from pure_loop.compile.segments import BEFORE_GRADIENTS, OF_MICROBATCHES, Segments, microbatch
from pure_loop.compile.stages import UPDATE_BAD, update
from pure_loop.data.group import END
from pure_loop.errors import NonFiniteError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.loop.batch import LoopStages, gradients
from pure_loop.loop.call import Feed, Fit, Stopwatch
from pure_loop.loop.driver import Script, run_to_end
from pure_loop.loop.evaluation import current
from pure_loop.loop.training import Eager, train_batch
from pure_loop.stages.ownership import Ownership, Request
from pure_loop.state import NON_FINITE_ADVICE, State, after_batch, with_fields
from pure_loop.time import Time, Timestamp, TimeUnit, due

_OF_A_BATCH = BEFORE_GRADIENTS | OF_MICROBATCHES | {Event.AFTER_TRAIN_BATCH}
_OF_UPDATES = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
_PER_BATCH_FIELDS = ("batch", "microbatch", "outputs", "loss", "_grads", "grad_norm")
_OF_GRADIENTS = _PER_BATCH_FIELDS[1:]

_BETWEEN = frozenset({Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_CHECKPOINT})


def _counted(fit: Fit) -> bool:
    """Whether it is known beforehand, from counts alone, after which batches something is due."""
    return all(
        isinstance(evaluator.interval, Cadence) and evaluator.interval.interval.unit is not TimeUnit.SECOND
        for evaluator in fit.evaluators
    )


class Pushback:
    """Batches of which one can be put back."""

    __slots__ = ("_batches", "_held")

    def __init__(self, batches: Feed) -> None:
        self._batches = batches
        self._held: list[Batch] = []

    def __next__(self) -> Batch:
        return self._held.pop() if self._held else next(self._batches)

    def push(self, batch: Batch) -> None:
        self._held.append(batch)

    def close(self) -> None:
        self._batches.close()


class Compiler(Segments):
    """What a call of ``fit`` compiles, and the scripts that call it.

    A batch is one graph where no event inside it is observed. Else it is divided into graphs between
    these events: the gradient of the batch (or of each microbatch), and the update.

    Args:
        stages: the loop's.
        observed: events that are observed outside the graphs: by the consumer, callbacks, loggers.
        where_possible: whether what can't be traced runs eagerly between graphs; else it is an error.
        steps: how many batches are loaded at a time; 1: the loop takes each.
        with_loss: whether evaluators measure the loss.
        ownership: gives memory that a graph may write to, for tensors that are those of a State of this loop's making:
            the same list, where they are not aliased, or copies. None: copies, always.
        interprets: whether graphs are not compiled: their operations run one after the other.
    """

    def __init__(
        self,
        stages: LoopStages,
        observed: frozenset[Event],
        *,
        where_possible: bool = False,
        steps: int = 1,
        with_loss: bool = True,
        ownership: Ownership | None = None,
        interprets: bool = False,
    ) -> None:
        super().__init__(stages, observed, where_possible=where_possible, ownership=ownership, interprets=interprets)
        self.steps = steps
        self.evaluating = CompiledEvaluation.of(
            stages, self.recorders, with_loss=with_loss, where_possible=where_possible, interprets=interprets
        )

    @property
    def graphs(self) -> Compiler:
        return self

    @property
    def uncompiled(self) -> Eager:
        return Eager()

    def batch(
        self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]
    ) -> Generator[tuple[Event | Request, State], State, State]:
        """One batch, as :class:`pure_loop.loop.training.Eager` computes it."""
        engine, before = self.stages.engine, state.timestamp
        # An input of the graphs, so that it is known before them; a batch's seconds are counted with the next batch.
        # Several ranks know what they have when they have exchanged it.
        after = before.next_batch(*engine.counts(samples, tokens, seconds)) if not engine.exchanges else before
        timestamps = (state.previous_timestamp, before, after)
        asks = self.ownership is not None and Event.BATCH_END in self.observed
        while not (self.observed & _OF_A_BATCH or self.eager):
            if asks:
                state = yield Request.COUNT_REFERENCES, state
            run = self.attempt("step", self._step, state, timestamps, (state.batch,))
            if run is not None:
                return (yield from self._end(state, fit, run, after))
        state = yield Event.BATCH_START, state
        state = yield Event.BEFORE_TRAIN_BATCH, state
        while not (self.observed & (OF_MICROBATCHES | {Event.AFTER_TRAIN_BATCH}) or self.eager):
            if asks:
                state = yield Request.COUNT_REFERENCES, state
            run = self.attempt("gradients and update", self._rest, state, timestamps, (state.batch,))
            if run is not None:
                return (yield from self._end(state, fit, run, after))
        buffers, model = state.buffers, state.model
        state = yield from self._gradients(state, timestamps[:2])
        if engine.exchanges:
            state = engine.sync_buffers(state, buffers)
            after = before.next_batch(*engine.counts(samples, tokens, seconds))
            timestamps = (*timestamps[:2], after)
        yielded = False
        while True:
            # Where all weights are 0 there is no gradient, and an optimizer counts on the host what it leaves out.
            eager = "update" in self.eager or all(gradient is None for gradient in state._grads.values())
            if not yielded and (Event.AFTER_TRAIN_BATCH in self.observed or eager):
                state = yield Event.AFTER_TRAIN_BATCH, state
                yielded = True
            if eager:
                state = self.stages.update(
                    state, buffers=buffers, model=model, timestamp=after, previous_timestamp=before
                )
                return (yield Event.BATCH_END, current(state, fit, Event.BATCH_END))
            if asks:
                state = yield Request.COUNT_REFERENCES, state
            # Values that the graph does not read go around it: a batch of another size needs no other update.
            looked_at = self.stages.handlers.keys() & (_OF_UPDATES - self.observed)
            around = {} if looked_at else {name: getattr(state, name) for name in _PER_BATCH_FIELDS[:3]}
            per_batch = (buffers, *[None if name in around else getattr(state, name) for name in _PER_BATCH_FIELDS])
            run = self.attempt("update", self._update, state, timestamps, per_batch)
            if run is not None:
                return (yield from self._end(state, fit, run, after, around))

    def _end(
        self, state: State, fit: Fit, run: Run, after: Timestamp, around: dict[str, object] | None = None
    ) -> Script:
        """The State of BATCH_END, or outside of the batch where that is not observed, from what a graph gave.

        ``around`` are per-batch values that the graph did not take.
        """
        if run.report is not None and run.report.is_cpu and (report := run.report.item()):
            raise self.nonfinite(state, int(report), state.batch)
        before = state.timestamp
        if Event.BATCH_END not in self.observed:
            state = run.put_in(state, ()) if run.names else state
            return after_batch[type(state)](state, after, before, Event.BATCH_END)
        fields = {"timestamp": after, "previous_timestamp": before, "position": Event.BATCH_END} | (around or {})
        return (yield Event.BATCH_END, current(run.put_in(state, _PER_BATCH_FIELDS, **fields), fit, Event.BATCH_END))

    def nonfinite(self, state: State, report: int, batch: Batch) -> NonFiniteError:
        """What is raised where a step has reported something."""
        from pure_loop.stages.search import origin_in_batch  # no other run needs it

        t = state.timestamp
        what = (
            "the gradients, or what the optimizer's step made of them, are not finite (which one can't be told from a "
            "compiled step: run the batch without compile)"
            if report == UPDATE_BAD
            else "the loss is not finite"
        )
        origin = None if batch is None else origin_in_batch(batch)
        if origin is not None:
            what += f": {origin.words}"
        result = NonFiniteError(
            f"batch {t.batch} (epoch {t.epoch}, batch {t.batch_in_epoch} in it): {what}. "
            f"{NON_FINITE_ADVICE if origin is None else origin.advice}"
        )
        result.index, result.batch = t.batch, batch
        if origin is not None:
            result.kind, result.name, result.rows = origin.kind, origin.name, origin.rows
        return result

    def feed(self, batches: Feed) -> Feed:
        """Batches as :meth:`steps_ahead` takes them."""
        return Pushback(batches) if self.steps > 1 else batches

    def goes_on(self, fit: Fit) -> bool:
        """Whether several batches can go through with nothing of the loop in between."""
        events = {*_OF_A_BATCH, *_BETWEEN, Event.BATCH_END}
        return bool(
            self.steps > 1
            and not self.observed & events
            and not self.eager
            and not self.stages.engine.exchanges
            and not self.stages.handlers.keys() & _BETWEEN
            and fit.iteration_length is None
            and not fit.counts_tokens
            and _counted(fit)
        )

    def steps_ahead(self, state: State, fit: Fit, batches: Feed, stopwatch: Stopwatch) -> State:
        """Batches at which the loop has nothing to do, ``steps`` of them loaded, and then gone through, at a time.

        The batch after which an evaluator is due or training ends is left to the loop, and so is one that needs another
        graph. What a loader would overwrite, or takes its time, is loaded when its turn comes.
        """
        if not self.goes_on(fit):
            return state
        assert isinstance(batches, Pushback)
        segment = self.segment("step", self._step)
        end = state.timestamp.max_duration
        assert end is not None
        count = self.steps if fit.source.batches_stay and end.unit is not TimeUnit.SECOND else 1
        while segment.repeats(state):
            previous, timestamp, data = state.previous_timestamp, state.timestamp, state.data
            calls: list[Call] = []
            call: Call | None = None
            failed: Exception | None = None
            while len(calls) < count:
                try:
                    loaded = next(batches, END)
                    position = fit.source.position and fit.source.position(timestamp.epoch, timestamp.batch)
                    ready = train_batch(state, fit, loaded, stopwatch.lap, timestamp.batch)
                except Exception as error:
                    failed = error  # its turn comes after the steps before it
                    break
                if ready is None:
                    break
                batch, samples, tokens = ready
                seconds = stopwatch.lap()
                after = timestamp.next_batch(samples, tokens, seconds)
                due_now = _loop_is_due(timestamp, after, end, fit)
                try:
                    call = None if due_now else segment.next_call((previous, timestamp, after), (batch,), call)
                except Exception:
                    # An algorithm's arithmetic failed: the loop meets that again, after the steps before it.
                    call = None
                if call is None:
                    batches.push(loaded)
                    stopwatch.last -= seconds  # the next lap has them, too
                    break
                calls.append(call)
                previous, timestamp, data = timestamp, after, position
            state, stopped = segment.again(state, calls)
            if stopped is not None:
                number, report = stopped
                previous, timestamp, _ = calls[number].env.timestamps
                raise self.nonfinite(_timed(state, timestamp, previous, data), report, calls[number].per_batch[0])
            if failed is not None:
                raise failed
            state = _timed(state, timestamp, previous, data)
            if len(calls) < count:
                break
        return state

    def _gradients(self, state: State, timestamps: tuple[Timestamp, ...]) -> Script:
        """The gradient of the batch: as one graph, one a microbatch, or eagerly where that is asked for."""
        while not (self.observed & OF_MICROBATCHES or "forward" in self.eager):
            run = self.attempt("gradients", self._gradients_alone, state, timestamps, (state.batch,))
            if run is not None:
                return run.put_in(state, _OF_GRADIENTS)
        if "forward" in self.eager and not self.stages.engine.exchanges:
            return (yield from gradients(state, self.stages))
        return (yield from gradients(state, self.stages, partial(microbatch, self, timestamps)))

    def _step(self, state: State, per_batch: PerBatch, traced: Traced) -> Ended:
        (batch,) = per_batch
        state = at(Event.BATCH_START, with_fields(state, batch=batch), traced)
        state = at(Event.BEFORE_TRAIN_BATCH, state, traced)
        return self._rest(state, (state.batch,), traced)

    def _rest(self, state: State, per_batch: PerBatch, traced: Traced) -> Ended:
        buffers = state.buffers
        return self._finish(_with_gradients(state, per_batch, traced), buffers, traced)

    def _gradients_alone(self, state: State, per_batch: PerBatch, traced: Traced) -> Ended:
        state = _with_gradients(state, per_batch, traced)
        return state, None, tuple(getattr(state, name) for name in _OF_GRADIENTS)

    def _update(self, state: State, per_batch: PerBatch, traced: Traced) -> Ended:
        buffers, *rest = per_batch
        return self._finish(with_fields(state, **dict(zip(_PER_BATCH_FIELDS, rest, strict=True))), buffers, traced)

    def _finish(self, state: State, buffers: FrozenDict[str, Tensor], traced: Traced) -> Ended:
        before, after = traced.timestamps[1:3]
        if Event.AFTER_TRAIN_BATCH not in self.observed:
            state = at(Event.AFTER_TRAIN_BATCH, state, traced)
        state, report = update(traced.stages, state, buffers, timestamp=after, previous_timestamp=before)
        if Event.BATCH_END in self.observed:
            return state, report, tuple(getattr(state, name) for name in _PER_BATCH_FIELDS)
        return at(Event.BATCH_END, state, traced), report, ()


def _with_gradients(state: State, per_batch: PerBatch, traced: Traced) -> State:
    script = gradients(with_fields(state, batch=per_batch[0]), traced.stages)
    result: State = run_to_end(script, traced.handlers, traced.stages)
    return result


def _loop_is_due(before: Timestamp, after: Timestamp, end: Time, fit: Fit) -> bool:
    """Whether training ends with the batch between these, or an evaluator is due after it."""
    if after.get(end.unit) >= end.value:
        return True
    return any(
        isinstance(item.interval, Cadence) and due(item.interval.interval, before, after, Event.BATCH_END)
        for item in fit.evaluators
    )


def _timed(state: State, timestamp: Timestamp, previous: Timestamp, data: PyTree) -> State:
    """The State with these timestamps, and this position of its data."""
    if state.timestamp is timestamp:
        return state
    return with_fields(state, timestamp=timestamp, previous_timestamp=previous, data=data)
