"""What is compiled of a call of ``fit``: a segment for each stretch of a batch between two observed events.

Where no event of a microbatch is observed, it is one graph, which differentiates. Else autograd goes from one graph
into the next (:mod:`pure_loop.compile.connected`), and through what algorithms add at the events in between, eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from operator import attrgetter
from typing import Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal.weights import is_number
from pure_loop.compile.graph import Ended, PerBatch, Program, Traced, at
from pure_loop.compile.refusals import Untraceable
from pure_loop.compile.replay import Recorders
from pure_loop.compile.segment import Run, Segment
from pure_loop.event import Event
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.driver import Script, run_to_end
from pure_loop.stages.ownership import Ownership
from pure_loop.state import State, raw_loss, raw_outputs, raw_params, with_fields
from pure_loop.time import Timestamp

BEFORE_GRADIENTS = frozenset({Event.BATCH_START, Event.BEFORE_TRAIN_BATCH})
AROUND_MICROBATCH = frozenset({Event.BEFORE_FORWARD, Event.AFTER_BACKWARD})
INSIDE_MICROBATCH = frozenset({Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD})
OF_MICROBATCHES = AROUND_MICROBATCH | INSIDE_MICROBATCH
# The segments that end with an update.
_UPDATING = frozenset({"step", "gradients and update", "update"})


class Segments:
    """The segments of a call, which reach from one event that is observed to the next.

    What can't be traced is left out where that is allowed, and its event observed from then on.

    Args:
        stages: the loop's.
        observed: events that are observed outside the graphs: by the consumer, callbacks, loggers.
        where_possible: whether what can't be traced runs eagerly between graphs; else it is an error.
        ownership: gives memory that a graph may write to, for tensors that are those of a State of this loop's making:
            the same list, where they are not aliased, or copies. None: copies, always.
        interprets: whether graphs are not compiled: their operations run one after the other.

    Attributes:
        single: the stages of this rank by itself: what ranks exchange is no part of a graph.
        eager: the parts that run eagerly.
        recorders: what records graphs on a device.
    """

    def __init__(
        self,
        stages: LoopStages,
        observed: frozenset[Event],
        *,
        where_possible: bool,
        ownership: Ownership | None,
        interprets: bool = False,
    ) -> None:
        self.stages = stages
        # A segment ends where ranks exchange something, which is no part of a graph, and what follows begins anew.
        together = stages.engine.exchanges
        exchanges = BEFORE_GRADIENTS | AROUND_MICROBATCH | _calling_stages(stages)
        self.observed = observed | exchanges if together else observed
        self.single = attrs.evolve(stages, engine=stages.engine.single_rank()) if together else stages
        self.eager: set[str] = set()
        if stages.engine.in_parts:
            # What works on parts runs eagerly: the optimizer, with kernels that are as fast, and algorithms, which may
            # need more than this rank's.
            self.eager.add("update")
            self.observed |= frozenset(stages.handlers)
        self.where_possible = where_possible
        self.interprets = interprets
        self.ownership = ownership
        self.recorders = Recorders()
        self._segments: dict[Hashable, Segment] = {}

    def segment(self, name: str, program: Program, *, connected: bool = False) -> Segment:
        """The segment of this name, as far as the events observed now let it reach."""
        key = name, self.observed, self.stages.size  # of microbatches: their number is a part of the graph
        result = self._segments.get(key)
        if result is None:
            brief = name not in _UPDATING
            # References to a State are counted once an update; other graphs write to little of it.
            ownership = None if brief else self.ownership
            result = self._segments[key] = Segment(
                name,
                program,
                self.single,
                self.recorders,
                ownership=ownership,
                left_out=self.stages.engine.in_parts,
                brief=brief,
                connected=connected,
                interprets=self.interprets,
            )
        return result

    def leave_out(self, error: Untraceable) -> None:
        """From here on, run this part eagerly; or raise the error."""
        kind, event = error.part
        left_out = self.where_possible or error.runs_eagerly
        if not left_out or event in self.observed or kind in self.eager:
            raise error.for_users() from error.__cause__
        error.let_go()
        if event is not None:
            self.observed |= {event}
        else:
            self.eager.add(kind)

    def attempt(
        self,
        name: str,
        program: Program,
        state: State,
        timestamps: tuple[Timestamp, ...],
        per_batch: PerBatch,
        index: int = 0,
        *,
        connected: bool = False,
    ) -> Run | None:
        """Call the segment of this name; None: a part of it can't be traced, and is left out from here on."""
        try:
            return self.segment(name, program, connected=connected)(state, timestamps, per_batch, index)
        except Untraceable as error:
            self.leave_out(error)
            return None

    def close(self) -> None:
        """Let go of what was compiled, which on a GPU holds the memory of recordings."""
        self._segments.clear()


def _calling_stages(stages: LoopStages) -> frozenset[Event]:
    """Events outside microbatches at which algorithms ask for the stages: for a gradient of all ranks, it may be."""
    return frozenset(
        event for event, listed in stages.handlers.items() if any(handler.takes_stages for handler in listed)
    ).difference(OF_MICROBATCHES)


Step: TypeAlias = Event | Literal["forward", "loss"]
STEPS: tuple[Step, ...] = (
    *("forward", Event.AFTER_FORWARD, Event.BEFORE_LOSS),
    *("loss", Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
)
_CHANGED = ("microbatch", "outputs", "loss", "_grads", "batch")
# Of these fields, in their order; nothing is kept of what a graph reads.
_READERS: tuple[Callable[[State], object], ...] = (
    attrgetter("microbatch"),
    raw_outputs,
    raw_loss,
    attrgetter("_grads"),
    attrgetter("batch"),
)


def microbatch(
    segments: Segments, timestamps: tuple[Timestamp, ...], state: State, index: int, last: bool, weight: float | Tensor
) -> Script:
    """From the State of BEFORE_FORWARD to that of AFTER_BACKWARD."""
    engine = segments.stages.engine
    # In no variable, which would keep its gradients alive while ranks exchange them.
    script = _Microbatch(segments, timestamps, index, last).script(engine.unsharded(state), weight)
    return engine.accumulate((yield from script), state, last=last)


@attrs.frozen
class _Microbatch:
    """One microbatch of a batch.

    Attributes:
        segments: what is compiled, of this rank by itself: another rank may have a graph of its share of the batch.
        timestamps: of the State before the batch, and of the batch.
        index: its number in the batch.
        last: whether no other microbatch follows in the batch.
    """

    segments: Segments
    timestamps: tuple[Timestamp, ...]
    index: int
    last: bool

    def script(self, state: State, weight: float | Tensor) -> Script:
        """The State of AFTER_BACKWARD, with the gradients of this rank."""
        segments = self.segments
        while not (segments.observed & INSIDE_MICROBATCH or "forward" in segments.eager):
            batch = state.batch if "batch" in self._fields(STEPS, ()) else None
            # A graph takes a number for a constant, and a count of tokens is another one in most batches.
            varies = is_number(weight) and not segments.stages.task.by_shape
            factor = torch.tensor(weight, dtype=torch.float64) if varies else weight
            per_batch = (state.microbatch, state._grads, factor, batch)
            run = segments.attempt("microbatch", _differentiated, state, self.timestamps, per_batch, self.index)
            if run is not None:
                return run.put_in(state, self._fields(STEPS, _CHANGED[:4]))
        state = yield from self._forward_and_loss(state)
        return segments.single.backward(state, weight=weight)

    def _forward_and_loss(self, state: State) -> Script:
        """The State of BEFORE_BACKWARD."""
        begun, position = state, 0
        while position < len(STEPS):
            step, eager = STEPS[position], self._is_eager()
            if isinstance(step, Event) and (eager or step in self.segments.observed):
                state = yield step, state
                position += 1
            elif eager:
                state = self._stage(step, state)
                position += 1
            else:
                position, state = self._advanced(position, begun, state)
        return state

    def _advanced(self, position: int, begun: State, state: State) -> tuple[int, State]:
        """The position and the State after the segment that begins here, or, where it can't be traced, before it."""
        observed = self.segments.observed
        end = next((i for i in range(position, len(STEPS)) if STEPS[i] in observed), len(STEPS))
        ended = self._run(_span(position, end), state)
        if ended is not None:
            return end, ended
        if self._is_eager() and position:
            # What follows may differentiate one output by another, and those of a graph lie side by side.
            stages = self.segments.single
            state = run_to_end(self._eagerly(begun, STEPS[:position]), stages.handlers, stages)
        return position, state

    def _run(self, span: _Span, state: State) -> State | None:
        """The State after these steps as a graph; None: something in it can't be traced."""
        segments, fields = self.segments, self._fields(span.steps, _CHANGED[:3])
        if not span.computations and segments.stages.handlers.keys().isdisjoint(span.steps):
            return state
        if "forward" in span.computations:
            leaves = segments.single.engine.leaves(state, index=0, last=True)
            # What was read before has no part in this forward, and a graph looks at each tensor anyway.
            leaves.lent = None
            state = with_fields(state, params=leaves)
        per_batch = tuple(
            [read(state) if field in fields else None for field, read in zip(_CHANGED, _READERS, strict=True)]
        )
        run = segments.attempt(span.name, span.program, state, self.timestamps, per_batch, self.index, connected=True)
        # The leaves stay what they are, for the backward.
        return None if run is None else run.put_in(state, fields, params=raw_params(state))

    def _eagerly(self, state: State, steps: tuple[Step, ...]) -> Script:
        for step in steps:
            if isinstance(step, Event):
                state = yield step, state
            else:
                state = self._stage(step, state)
        return state

    def _stage(self, name: Step, state: State) -> State:
        # What runs eagerly exchanges nothing either: another rank may have a graph of its share of the batch.
        return _stage(self.segments.single, name, state, self.index, self.last)

    def _fields(self, steps: tuple[Step, ...], fields: tuple[str, ...]) -> tuple[str, ...]:
        """The values of these fields; of all of them if an algorithm in these steps may read or replace them."""
        return _CHANGED if self.segments.stages.handlers.keys() & steps else fields

    def _is_eager(self) -> bool:
        """Whether nothing of forwards and losses is compiled."""
        if "forward" in self.segments.eager:
            return True
        # A module's own loss may read what its forward has left in the module, which a graph doesn't hand on.
        own_loss = self.segments.stages.task.loss is None
        return own_loss and not self.segments.observed.isdisjoint({Event.AFTER_FORWARD, Event.BEFORE_LOSS})


def _stage(stages: LoopStages, name: Step, state: State, index: int, last: bool) -> State:
    if name == "forward":
        return stages.forward(state, index=index, last=last)
    return stages.loss(state, index=index)


@attrs.frozen
class _Span:
    """Some of the steps of a microbatch, one after the other.

    Attributes:
        name: of the first and of the last.
        steps: the steps, in order.
        computations: those of them that are no event.
        program: what computes them.
    """

    name: str
    steps: tuple[Step, ...]
    computations: frozenset[Step]
    program: Program


@cache
def _span(begin: int, end: int) -> _Span:
    """The steps from this position to before that one."""
    steps = STEPS[begin:end]

    def program(state: State, per_batch: PerBatch, traced: Traced) -> Ended:
        state = with_fields(state, **dict(zip(_CHANGED, per_batch, strict=True)))
        for step in steps:
            # Seeds are those of microbatch 0, and moved to those of this one when they are used.
            state = at(step, state, traced) if isinstance(step, Event) else _stage(traced.stages, step, state, 0, True)
        return state, None, tuple(getattr(state, field) for field in _CHANGED)

    names = [step.name if isinstance(step, Event) else step for step in (steps[0], steps[-1])]
    computations = frozenset(step for step in steps if not isinstance(step, Event))
    return _Span(" to ".join(dict.fromkeys(names)), steps, computations, program)


_WHOLE = _span(0, len(STEPS))


def _differentiated(state: State, per_batch: PerBatch, traced: Traced) -> Ended:
    microbatch, grads, weight, batch = per_batch
    state, _, _ = _WHOLE.program(state, (microbatch, None, None, grads, batch), traced)
    state = traced.stages.backward(state, weight=weight)
    return state, None, tuple(getattr(state, name) for name in _CHANGED)
