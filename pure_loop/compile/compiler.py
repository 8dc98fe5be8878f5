"""The compiled batch: a script that yields the events that somebody attends to, and calls graphs in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from pure_loop._batches import train_batch
from pure_loop.cadence import Cadence
from pure_loop.compile.evaluation import CompiledEvaluation
from pure_loop.compile.microbatch import INSIDE, Piece, microbatch
from pure_loop.compile.numbers import Env
from pure_loop.compile.program import Ended, Flight, at, put_in
from pure_loop.compile.replay import Recorders
from pure_loop.compile.stages import UPDATE_BAD, Untraceable, update
from pure_loop.compile.stretch import Own, Program, Run, Stretch, Traced
from pure_loop.donation import ABOUT_TO_WRITE, Owned
from pure_loop.driver import run_silently
from pure_loop.errors import NonFiniteError
from pure_loop.event import Event
from pure_loop.loop import Fit, LoopStages, Script, gradients
from pure_loop.sources import END
from pure_loop.state import NON_FINITE_ADVICE, State, fresh_draft_of, holding
from pure_loop.time import Time, Timestamp, TimeUnit, due

__all__ = ["Compiler"]

_BEFORE_GRADIENTS = frozenset({Event.BATCH_START, Event.BEFORE_TRAIN_BATCH})
_AROUND_MICROBATCH = frozenset({Event.BEFORE_FORWARD, Event.AFTER_BACKWARD})
_OF_MICROBATCHES = _AROUND_MICROBATCH | INSIDE
_OF_A_BATCH = _BEFORE_GRADIENTS | _OF_MICROBATCHES | {Event.AFTER_TRAIN_BATCH}
_OF_UPDATES = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
_AROUND_EXCHANGES = _BEFORE_GRADIENTS | _AROUND_MICROBATCH
_IN_FLIGHT = ("batch", "microbatch", "outputs", "loss", "_grads", "grad_norm")
_OF_GRADIENTS = _IN_FLIGHT[1:]

# The stretches that end with an update.
_UPDATING = frozenset({"step", "gradients and update", "update"})
_BETWEEN = frozenset({Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_CHECKPOINT})


def _calling_stages(stages: LoopStages) -> frozenset[Event]:
    """The events outside microbatches whose algorithms ask for the stages: for a gradient of all ranks, it may be."""
    return frozenset(
        event for event, listed in stages.handlers.items() if any(handler.takes_stages for handler in listed)
    ).difference(_OF_MICROBATCHES)


def _counted(fit: Fit) -> bool:
    """Whether it is known beforehand, from counts alone, after which batches something is due."""
    return all(
        isinstance(each.interval, Cadence) and each.interval.interval.unit is not TimeUnit.SECOND
        for each in fit.evaluators
    )


class Pushback:
    """Batches of which one can be put back."""

    __slots__ = ("_batches", "_held")

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._held: list[Any] = []

    def __next__(self) -> Any:
        return self._held.pop() if self._held else next(self._batches)

    def push(self, batch: Any) -> None:
        self._held.append(batch)

    def close(self) -> None:
        self._batches.close()


class Compiler:
    """What a call of ``fit`` compiles, and the scripts that call it.

    A batch is one graph where nobody attends to anything inside it. Where somebody does, it falls into graphs between
    these events: the gradient of the batch (or of each microbatch), and the update.

    Args:
        stages: the loop's.
        attended: events that somebody outside the graphs sees: the user, callbacks, loggers.
        where_possible: whether what can't be traced runs eagerly between graphs; else it is an error.
        steps: how many batches are loaded at a time; 1: the loop takes each.
        with_loss: whether evaluators measure the loss.
        own: gives memory that a graph may write to, for tensors that are those of a State of this loop's making: the
            same list, where nobody else can see them, or copies. None: copies, always.
        shown: whether ``own`` would copy.
    """

    def __init__(
        self,
        stages: LoopStages,
        attended: frozenset[Event],
        *,
        where_possible: bool = False,
        steps: int = 1,
        with_loss: bool = True,
        own: Own | None = None,
        shown: Callable[[], bool] | None = None,
    ) -> None:
        self.stages = stages
        # What ranks exchange is no part of a graph: the batch ends before, and what follows begins anew.
        together = stages.engine.ranks > 1
        self.attended = attended | _AROUND_EXCHANGES | _calling_stages(stages) if together else attended
        self.alone = attrs.evolve(stages, engine=stages.engine.alone()) if together else stages
        self.eager: set[str] = set()
        if stages.engine.in_parts:
            # What works on parts runs eagerly: the optimizer, whose kernels are as fast, and algorithms, which may need
            # more than this rank's.
            self.eager.add("update")
            self.attended |= frozenset(stages.handlers)
        self.where_possible = where_possible
        self.steps = steps
        self.own = own
        self.shown = shown
        self.recorders = Recorders()
        self.evaluating = CompiledEvaluation.of(
            stages, self.recorders, with_loss=with_loss, where_possible=where_possible
        )
        self.pieces: dict[Any, Piece] = {}
        self._stretches: dict[Any, Stretch] = {}

    def stretch(self, name: str, program: Program, *, connected: bool = False) -> Stretch:
        """The stretch of this name, as far as the events attended to now let it reach."""
        key = name, self.attended
        found = self._stretches.get(key)
        if found is None:
            brief = name not in _UPDATING
            # Who has a State is counted once an update, and others write to little of it.
            own = None if brief else self.own
            found = self._stretches[key] = Stretch(
                name,
                program,
                self.alone,
                self.recorders,
                own=own,
                shown=self.shown,
                left_out=self.stages.engine.in_parts,
                brief=brief,
                connected=connected,
            )
        return found

    def close(self) -> None:
        """Let go of what was compiled, which refers to this in turn, and on a GPU holds the memory of recordings."""
        self._stretches.clear()
        self.pieces.clear()

    def leave_out(self, error: Untraceable) -> None:
        """From here on, run this part eagerly; or raise the error."""
        kind, event = error.part
        if not self.where_possible or event in self.attended or kind in self.eager:
            raise error.for_users() from error.__cause__
        error.let_go()
        if event is not None:
            self.attended |= {event}
        else:
            self.eager.add(kind)

    def attempt(
        self,
        name: str,
        program: Program,
        state: State,
        timestamps: tuple[Timestamp, ...],
        flight: Flight,
        index: int = 0,
        *,
        connected: bool = False,
    ) -> Run | None:
        """Call the stretch of this name; None: a part of it can't be traced, and is left out from here on."""
        try:
            return self.stretch(name, program, connected=connected)(state, timestamps, flight, index)
        except Untraceable as error:
            self.leave_out(error)
            return None

    def batch(self, owned: Owned, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]) -> Script:
        """One batch, as :func:`pure_loop.loop.fit` does it."""
        state = owned.take()
        engine, before = self.stages.engine, state.timestamp
        # An input of the graphs, so that it is known before them; a batch's seconds go on the next one's account.
        # Several ranks know what they have when they have exchanged it.
        now = before.next_batch(*engine.counts(samples, tokens, seconds)) if engine.ranks == 1 else before
        timestamps = (state.previous_timestamp, before, now)
        asks = self.own is not None and Event.BATCH_END in self.attended
        while not (self.attended & _OF_A_BATCH or self.eager):
            if asks:
                state = yield ABOUT_TO_WRITE, state
            run = self.attempt("step", self._step, state, timestamps, (state.batch,))
            if run is not None:
                return (yield from self._end(state, run, now))
        state = yield Event.BATCH_START, state
        state = yield Event.BEFORE_TRAIN_BATCH, state
        while not (self.attended & (_OF_MICROBATCHES | {Event.AFTER_TRAIN_BATCH}) or self.eager):
            if asks:
                state = yield ABOUT_TO_WRITE, state
            run = self.attempt("gradients and update", self._rest, state, timestamps, (state.batch,))
            if run is not None:
                return (yield from self._end(state, run, now))
        buffers, model = state.buffers, state.model
        state = yield from self._gradients(state, timestamps[:2])
        if engine.ranks > 1:
            state = engine.agree(state, buffers)
            now = before.next_batch(*engine.counts(samples, tokens, seconds))
            timestamps = (*timestamps[:2], now)
        shown = False
        while True:
            if not shown and (Event.AFTER_TRAIN_BATCH in self.attended or "update" in self.eager):
                state = yield Event.AFTER_TRAIN_BATCH, state
                shown = True
            if "update" in self.eager:
                state = self.stages.update(
                    state, buffers=buffers, model=model, timestamp=now, previous_timestamp=before
                )
                return (yield Event.BATCH_END, state)
            if asks:
                state = yield ABOUT_TO_WRITE, state
            # What nobody in the graph looks at goes around it: a batch of another size needs no other update.
            looked_at = self.stages.handlers.keys() & (_OF_UPDATES - self.attended)
            around = {} if looked_at else {name: getattr(state, name) for name in _IN_FLIGHT[:3]}
            flight = (buffers, *[None if name in around else getattr(state, name) for name in _IN_FLIGHT])
            run = self.attempt("update", self._update, state, timestamps, flight)
            if run is not None:
                return (yield from self._end(state, run, now, around))

    def _end(self, state: State, run: Run, now: Timestamp, around: dict[str, Any] | None = None) -> Script:
        """The State of BATCH_END, from what a graph gave, and what went around it."""
        ended = self._ended(state, run, now)
        if Event.BATCH_END not in self.attended:
            return ended
        fields = dict(zip(_IN_FLIGHT, run.flight, strict=True)) | (around or {})
        return (yield Event.BATCH_END, holding(ended, **fields))

    def feed(self, batches: Any) -> Any:
        """Batches as :meth:`several` takes them."""
        return Pushback(batches) if self.steps > 1 else batches

    def goes_on(self, fit: Fit) -> bool:
        """Whether several batches can go through with nothing of the loop in between."""
        events = {*_OF_A_BATCH, *_BETWEEN, Event.BATCH_END}
        return bool(
            self.steps > 1
            and not self.attended & events
            and not self.eager
            and self.stages.engine.ranks == 1
            and not self.stages.handlers.keys() & _BETWEEN
            and fit.iteration_length is None
            and not fit.counts_tokens
            and _counted(fit)
        )

    def several(self, state: State, fit: Fit, batches: Any, stopwatch: Any) -> State:
        """Batches at which the loop has nothing to do, ``steps`` of them loaded, and then gone through, at a time.

        The batch after which an evaluator is due or training ends is left to the loop, and so is one that needs another
        graph. What a loader would overwrite, or takes its time, is loaded when its turn comes.
        """
        if not self.goes_on(fit):
            return state
        stretch = self.stretch("step", self._step)
        end = state.timestamp.max_duration
        assert end is not None
        ahead = self.steps if fit.source.batches_stay and end.unit is not TimeUnit.SECOND else 1
        while stretch.repeats(state):
            before, now = state.previous_timestamp, state.timestamp
            calls: list[tuple[Env, Flight]] = []
            env: Env | None = None
            failed: Exception | None = None
            while len(calls) < ahead:
                try:
                    loaded = next(batches, END)
                    ready = train_batch(state, fit, loaded, stopwatch.lap, now.batch)
                except Exception as error:
                    failed = error  # its turn comes after the steps before it
                    break
                if ready is None:
                    break
                batch, samples, tokens = ready
                seconds = stopwatch.lap()
                after = now.next_batch(samples, tokens, seconds)
                due_now = _loop_is_due(now, after, end, fit)
                try:
                    env = None if due_now else stretch.fits((before, now, after), (batch,), env)
                except Exception:
                    env = None  # an algorithm's arithmetic failed: the loop meets that again, after the steps before it
                if env is None:
                    batches.push(loaded)
                    stopwatch.put_back(seconds)
                    break
                calls.append((env, (batch,)))
                before, now = now, after
            state, stopped = stretch.again(state, calls)
            if stopped is not None:
                number, report = stopped
                before, now, _ = calls[number][0].timestamps
                raise _nonfinite(_timed(state, now, before), report)
            if failed is not None:
                raise failed
            state = _timed(state, now, before)
            if len(calls) < ahead:
                break
        return state

    def _ended(self, state: State, run: Run, now: Timestamp) -> State:
        """The State after a batch at whose end nobody looks, outside of it."""
        if run.report is not None and run.report.is_cpu and (report := run.report.item()):
            raise _nonfinite(state, int(report))
        draft = fresh_draft_of(state)
        for name, value in zip(run.names, run.durable, strict=True):
            setattr(draft, name, value)
        draft.timestamp, draft.previous_timestamp = now, state.timestamp
        draft.batch = draft.microbatch = draft.outputs = draft.loss = draft._grads = draft.grad_norm = None
        draft.position = Event.BATCH_END
        draft.__class__ = state.__class__
        return draft  # type: ignore[no-any-return]

    def _gradients(self, state: State, timestamps: tuple[Timestamp, ...]) -> Script:
        """The gradient of the batch: as one graph, one a microbatch, or eagerly where that is asked for."""
        while not (self.attended & _OF_MICROBATCHES or "forward" in self.eager):
            run = self.attempt("gradients", self._gradients_alone, state, timestamps, (state.batch,))
            if run is not None:
                return put_in(state, run, _OF_GRADIENTS)
        if "forward" in self.eager and self.stages.engine.ranks == 1:
            return (yield from gradients(state, self.stages))
        return (yield from gradients(state, self.stages, partial(microbatch, self, timestamps)))

    def _step(self, state: State, flight: Flight, traced: Traced) -> Ended:
        (batch,) = flight
        state = at(Event.BATCH_START, holding(state, batch=batch), traced)
        state = at(Event.BEFORE_TRAIN_BATCH, state, traced)
        return self._rest(state, (state.batch,), traced)

    def _rest(self, state: State, flight: Flight, traced: Traced) -> Ended:
        buffers = state.buffers
        state = run_silently(gradients(holding(state, batch=flight[0]), traced.stages), traced.handlers, traced.stages)
        return self._finish(state, buffers, traced)

    def _gradients_alone(self, state: State, flight: Flight, traced: Traced) -> Ended:
        state = run_silently(gradients(holding(state, batch=flight[0]), traced.stages), traced.handlers, traced.stages)
        return state, None, tuple(getattr(state, name) for name in _OF_GRADIENTS)

    def _update(self, state: State, flight: Flight, traced: Traced) -> Ended:
        buffers, *rest = flight
        return self._finish(holding(state, **dict(zip(_IN_FLIGHT, rest, strict=True))), buffers, traced)

    def _finish(self, state: State, buffers: Any, traced: Traced) -> Ended:
        before, now = traced.timestamps[1:3]
        if Event.AFTER_TRAIN_BATCH not in self.attended:
            state = at(Event.AFTER_TRAIN_BATCH, state, traced)
        state, report = update(traced.stages, state, buffers, timestamp=now, previous_timestamp=before)
        if Event.BATCH_END in self.attended:
            return state, report, tuple(getattr(state, name) for name in _IN_FLIGHT)
        return at(Event.BATCH_END, state, traced), report, ()


def _loop_is_due(now: Timestamp, after: Timestamp, end: Time, fit: Fit) -> bool:
    """Whether training ends with the batch between these, or an evaluator is due after it."""
    if after.get(end.unit) >= end.value:
        return True
    return bool(fit.evaluators) and any(
        due(each.interval.interval, now, after, Event.BATCH_END)  # type: ignore[attr-defined]
        for each in fit.evaluators
    )


def _timed(state: State, now: Timestamp, before: Timestamp) -> State:
    """The State with these timestamps."""
    if state.timestamp is now:
        return state
    draft = fresh_draft_of(state)
    draft.timestamp, draft.previous_timestamp = now, before
    draft.__class__ = state.__class__
    return draft  # type: ignore[no-any-return]


def _nonfinite(state: State, report: int) -> NonFiniteError:
    t = state.timestamp
    what = (
        "the gradients, or what the optimizer's step made of them, are not finite (which one can't be told from a "
        "compiled step: run the batch without compile)"
        if report == UPDATE_BAD
        else "the loss is not finite"
    )
    return NonFiniteError(
        f"batch {t.batch} (epoch {t.epoch}, batch {t.batch_in_epoch} in it): {what}. {NON_FINITE_ADVICE}"
    )
