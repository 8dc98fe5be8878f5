"""The batches of an ensemble: a script that calls one mapped graph a batch, and yields what is observed of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, Batch, PyTree
from pure_loop.compile.compiler import Compiler
from pure_loop.compile.graph import Ended, PerBatch, Traced, at
from pure_loop.compile.guards import Env, Evaluate
from pure_loop.compile.members import LOOP_INSTEAD, of_each, reported
from pure_loop.compile.numbers import Number
from pure_loop.compile.refusals import WHERE_POSSIBLE, Untraceable
from pure_loop.compile.segment import Run, Segment
from pure_loop.compile.segments import AROUND_MICROBATCH, INSIDE_MICROBATCH
from pure_loop.compile.stages import update
from pure_loop.compile.trees import DurableFields, durable_fields, values_of
from pure_loop.errors import CompileError, NonFiniteError
from pure_loop.event import Event
from pure_loop.loop.batch import gradients
from pure_loop.loop.call import Fit
from pure_loop.loop.driver import Script, drive
from pure_loop.loop.evaluation import current
from pure_loop.members import turns
from pure_loop.members.stacking import settled
from pure_loop.membership import PerMember, field_of
from pure_loop.stages.ownership import Request
from pure_loop.state import NOT_READY, State, after_batch, raw_params, with_fields
from pure_loop.time import Timestamp

# Events of a batch at whose handlers a graph may begin or end, where torch can't trace them.
_BEGINNING = (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH)
_OF_MICROBATCHES = AROUND_MICROBATCH | INSIDE_MICROBATCH
_INSIDE = frozenset({*_BEGINNING, *_OF_MICROBATCHES, Event.AFTER_TRAIN_BATCH})
_OF_THE_BATCH = ("batch", "microbatch", "outputs", "loss", "_grads", "grad_norm")
# What an event inside a batch may show that is another one than before it.
_SHOWN = ("buffers", "algorithm_state", "lr_scale", *_OF_THE_BATCH)
_BY_THE_LOOP = "batch without compile", 'batch with fallback="loop"'


@attrs.frozen
class _Later:
    """In the place of a number of the step, in what an event shows."""

    evaluate: Evaluate


@attrs.frozen
class _Shown:
    """Before the fields that an event shows, in what a graph gives: their names."""

    event: Event
    names: tuple[str, ...]


class MemberSteps(Compiler):
    """What an ensemble computes: one graph a batch, in which handlers of events inside of it are called.

    Where such an event is observed, the graph gives what the State has there as well, and the event is yielded once the
    graph has run. Handlers that torch can't trace run member by member, at the first and the last events of a batch.

    Attributes:
        outside: the events whose handlers the driver calls.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outside: set[Event] = set()
        self._observing: Segment | None = None

    def batch(
        self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]
    ) -> Generator[tuple[Event | Request, State], State, State]:
        state = settled(state)
        before = state.timestamp
        after = before.next_batch(*self.stages.engine.counts(samples, tokens, seconds))
        timestamps = (state.previous_timestamp, before, after)
        begun = 0
        while True:
            for event in _BEGINNING[begun:]:
                if event in self.outside:
                    state = yield event, state
                    begun += 1
            observed = bool(self.observed & (_INSIDE - self.outside))
            if not observed and self.ownership is not None and Event.BATCH_END in self.observed:
                state = yield Request.COUNT_REFERENCES, state
            run = self._run_of(state, timestamps, observed=observed)
            if run is not None:
                break
        if observed:
            assert self._observing is not None
            assert state.ensemble is not None
            count = len(_OF_THE_BATCH) if self._shows_end else 0
            env = Env(timestamps, DurableFields.of(values_of(state, self._observing.names)).leaves)
            values = iter(run.per_batch[count:])
            for shot in values:
                fields = {name: next(values) for name in shot.names}
                yield shot.event, with_fields(state, **_present(fields, env, len(state.ensemble)))
            run = run._replace(per_batch=run.per_batch[:count])
        return (yield from self._ended(state, fit, run, after))

    def _run_of(self, state: State, timestamps: tuple[Timestamp, ...], *, observed: bool) -> Run | None:
        """The step of a batch; None: a handler at its beginning or end runs outside of the graph from now on."""
        assert state.ensemble is not None
        per_batch: tuple[Batch, ...] = (state.batch,)
        if not all(state.ensemble.running):
            per_batch += (PerMember(torch.tensor(state.ensemble.running, device=state.device)),)
        try:
            segment = self._observing_segment() if observed else self.segment("step", self._step)
            with turns.among(state.ensemble.running):
                return segment(state, timestamps, per_batch)
        except Untraceable as error:
            kind, event = error.part
            if kind != "handler" or event not in (*_BEGINNING, Event.BATCH_END) or event in self.outside:
                raise for_members(error) from error.__cause__
            error.let_go()
            # What comes before it at the beginning is outside, too.
            self.outside |= {event} if event is Event.BATCH_END else {*_BEGINNING[: _BEGINNING.index(event) + 1]}
            self._observing = None
            self._segments.clear()
            return None

    def _observing_segment(self) -> Segment:
        """One that gives what events inside the batch show: what lasts is copied, because they show it as it was."""
        if self._observing is None:
            self._observing = Segment(
                "observed step", self._step, self.single, self.recorders, interprets=self.interprets
            )
        return self._observing

    def _ended(self, state: State, fit: Fit, run: Run, after: Timestamp) -> Script:
        """The State of BATCH_END, or outside of the batch where nothing is observed of it."""
        if run.report is not None and run.report.is_cpu and (report := run.report.item()):
            raise self.nonfinite(state, int(report), state.batch)
        before = state.timestamp
        if not self._shows_end:
            state = run.put_in(state, ()) if run.names else state
            return after_batch[type(state)](state, after, before, Event.BATCH_END)
        fields = {"timestamp": after, "previous_timestamp": before, "position": Event.BATCH_END}
        return (yield Event.BATCH_END, current(run.put_in(state, _OF_THE_BATCH, **fields), fit, Event.BATCH_END))

    @property
    def _shows_end(self) -> bool:
        return Event.BATCH_END in self.observed or Event.BATCH_END in self.outside

    def nonfinite(self, state: State, report: int, batch: Batch) -> NonFiniteError:
        code, number = reported(report)
        error = super().nonfinite(state, code, batch)
        error.args = (f"member {number}: {error.args[0].replace(*_BY_THE_LOOP)}",)
        return error

    def goes_on(self, fit: Fit) -> bool:
        return super().goes_on(fit) and not self.outside

    def _step(self, state: State, per_batch: PerBatch, traced: Traced) -> Ended:
        batch, *running = per_batch
        before, shots = state, list[PyTree]()
        visible = self.observed - self.outside

        def show(event: Event, state: State) -> None:
            if event in visible:
                fields = _shot(before, state)
                shots.extend((_Shown(event, tuple(fields)), *fields.values()))

        state = with_fields(state, batch=batch)
        for event in _BEGINNING:
            if event not in self.outside:
                state = at(event, state, traced)
                show(event, state)
        buffers = state.buffers
        pairs = drive(
            gradients(state, traced.stages),
            traced.handlers,
            stages=traced.stages,
            watch=visible & _OF_MICROBATCHES,
        )
        while True:
            try:
                show(*next(pairs))
            except StopIteration as stop:
                state = stop.value
                break
        state = at(Event.AFTER_TRAIN_BATCH, state, traced)
        show(Event.AFTER_TRAIN_BATCH, state)
        at_start, after = traced.timestamps[1:3]
        state, report = update(traced.stages, state, buffers, timestamp=after, previous_timestamp=at_start)
        if Event.BATCH_END not in self.outside:
            state = at(Event.BATCH_END, state, traced)
        if running:
            (keeps,) = running
            state, report = _masked(before, state, keeps), report * keeps
        shown = tuple(_wrapped(name, getattr(state, name)) for name in _OF_THE_BATCH) if self._shows_end else ()
        return state, report, (*shown, *shots)


def _masked(before: State, after: State, running: Tensor) -> State:
    """The State after a step, for a member that may have stopped: what lasts stays as it was before.

    Args:
        before, after: of the step.
        running: whether the member trains; bool, shape ().
    """

    def chosen(value: object, old: object) -> object:
        if value is old:
            return value
        if isinstance(value, Tensor) and isinstance(old, Tensor):
            return torch.where(running, value, old)
        if type(value) is Number:
            return Number.of(value.context, lambda new, kept: new if turns.trains() else kept, value, old)
        return value

    fields = {}
    for name in durable_fields(type(before)):
        value: Any = field_of(after, name)
        old: Any = field_of(before, name)
        if value is not old and old is not None:
            fields[name] = optree.tree_map(chosen, value, old, namespace=NAMESPACE)
    return with_fields(after, **fields)


def _shot(before: State, state: State) -> dict[str, PyTree]:
    """What an event shows that the State before the batch has not."""
    fields: dict[str, PyTree] = {}
    for name in _SHOWN:
        value: Any = field_of(state, name)
        if value is NOT_READY:
            value = None
        if value is not field_of(before, name):
            fields[name] = _wrapped(name, value)
    params = getattr(raw_params(state), "origin", raw_params(state))
    if params is not raw_params(before):
        fields["params"] = params
    return fields


def _wrapped(name: str, value: PyTree) -> PyTree:
    """A value that a graph gives: a batch may be one that all members share."""
    if name in ("batch", "microbatch"):
        return PerMember(value)
    if name == "algorithm_state":
        return optree.tree_map(
            lambda leaf: _Later(leaf.evaluate) if isinstance(leaf, Number) else leaf, value, namespace=NAMESPACE
        )
    return value


def _present(fields: dict[str, PyTree], env: Env, count: int) -> dict[str, PyTree]:
    """What an event shows, with the numbers of this step."""
    memories = fields.get("algorithm_state")
    if memories is None:
        return fields
    value = optree.tree_map(
        lambda leaf: of_each(leaf.evaluate, count)(env) if isinstance(leaf, _Later) else leaf,
        memories,
        namespace=NAMESPACE,
    )
    return {**fields, "algorithm_state": value}


def for_members(error: Untraceable) -> CompileError:
    """An error of a trace, in the words of what the user asked for."""
    text = error.args[0].replace(WHERE_POSSIBLE, LOOP_INSTEAD).replace(*_BY_THE_LOOP)
    for words in ("can't be compiled", "is not compiled"):
        text = text.replace(words, "can't be mapped over members")
    result = CompileError(text if LOOP_INSTEAD in text else f"{text} {LOOP_INSTEAD}")
    for note in getattr(error, "__notes__", ()):
        result.add_note(note.replace("was compiled", "was mapped over members"))
    return result
