"""A microbatch between BEFORE_FORWARD and AFTER_BACKWARD: graphs between the observed events.

Where no event is observed it is one graph, which differentiates. Else autograd goes from one graph into the next
(:mod:`pure_loop.compile.connected`), and through what algorithms add at the events in between, eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal.weights import is_number
from pure_loop.compile.program import Ended, PerBatch, at, put_in
from pure_loop.compile.segment import Program, Traced
from pure_loop.event import Event
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.driver import Script, run_to_end
from pure_loop.state import State, raw_loss, raw_outputs, raw_params, with_fields
from pure_loop.time import Timestamp

if TYPE_CHECKING:
    from pure_loop.compile.compiler import Compiler

__all__ = ["INSIDE", "MicrobatchSegment", "microbatch"]

Step: TypeAlias = Event | Literal["forward", "loss"]
STEPS: tuple[Step, ...] = (
    *("forward", Event.AFTER_FORWARD, Event.BEFORE_LOSS),
    *("loss", Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
)
INSIDE = frozenset(step for step in STEPS if isinstance(step, Event))
_CHANGED = ("microbatch", "outputs", "loss", "_grads", "batch")
# Of these fields, in their order; nothing is kept of what a graph reads.
_READERS: tuple[Callable[[State], Any], ...] = (
    attrgetter("microbatch"),
    raw_outputs,
    raw_loss,
    attrgetter("_grads"),
    attrgetter("batch"),
)


@attrs.frozen
class MicrobatchSegment:
    """Steps between two observed events.

    Attributes:
        end: the first step after it.
        name: for errors and records.
        fields: the per-batch fields that it takes and gives.
        program: what is compiled.
        empty: whether nothing happens in it.
        begins_with_leaves: whether the forward is in it.
    """

    end: int
    name: str
    fields: tuple[str, ...]
    program: Program
    empty: bool
    begins_with_leaves: bool


def microbatch(
    compiler: Compiler,
    timestamps: tuple[Timestamp, ...],
    state: State,
    index: int,
    last: bool,
    weight: float | Tensor,
) -> Script:
    """From the State of BEFORE_FORWARD to that of AFTER_BACKWARD."""
    engine = compiler.stages.engine
    if is_number(weight) and not compiler.stages.task.by_shape:
        # A graph takes a number for a constant, and a count of tokens is another one in most batches.
        weight = torch.tensor(weight, dtype=torch.float64)
    # In no variable, which would keep its gradients alive while ranks exchange them.
    script = _computed(compiler, timestamps, engine.unsharded(state), index, last, weight)
    return engine.accumulate((yield from script), state, last=last)


def _computed(
    compiler: Compiler,
    timestamps: tuple[Timestamp, ...],
    state: State,
    index: int,
    last: bool,
    weight: float | Tensor,
) -> Script:
    """The State of AFTER_BACKWARD, with the gradients of this rank."""
    while not (compiler.observed & INSIDE or "forward" in compiler.eager):
        batch = state.batch if "batch" in _fields(compiler, STEPS, ()) else None
        per_batch = (state.microbatch, state._grads, weight, batch)
        run = compiler.attempt("microbatch", _whole, state, timestamps, per_batch, index)
        if run is not None:
            return put_in(state, run, _fields(compiler, STEPS, _CHANGED[:4]))
    state = yield from _by_segments(compiler, timestamps, state, index, last)
    return compiler.alone.backward(state, weight=weight)


def _eager(compiler: Compiler) -> bool:
    """Whether nothing of forwards and losses is compiled."""
    if "forward" in compiler.eager:
        return True
    # A module's own loss may read what its forward has left in the module, which a graph doesn't hand on.
    own_loss = compiler.stages.task.loss is None
    return own_loss and not compiler.observed.isdisjoint({Event.AFTER_FORWARD, Event.BEFORE_LOSS})


def _by_segments(compiler: Compiler, timestamps: tuple[Timestamp, ...], state: State, index: int, last: bool) -> Script:
    """The State of BEFORE_BACKWARD."""
    # What runs eagerly exchanges nothing either: another rank may have a graph of its share of the batch.
    stages, begun, position = compiler.alone, state, 0
    while position < len(STEPS):
        step, eager = STEPS[position], _eager(compiler)
        if isinstance(step, Event) and (eager or step in compiler.observed):
            state = yield step, state
            position += 1
        elif eager:
            state = _stage(stages, step, state, index, last)
            position += 1
        else:
            position, state = _advanced(compiler, timestamps, position, begun, state, index, last)
    return state


def _advanced(
    compiler: Compiler,
    timestamps: tuple[Timestamp, ...],
    position: int,
    begun: State,
    state: State,
    index: int,
    last: bool,
) -> tuple[int, State]:
    """The position and the State after the segment that begins here, or, where it can't be traced, before it."""
    segment = _segment_from(compiler, position)
    ended = _run(compiler, segment, state, timestamps, index)
    if ended is not None:
        return segment.end, ended
    if _eager(compiler) and position:
        # What follows may differentiate one output by another, and those of a graph lie side by side.
        stages = compiler.alone
        state = run_to_end(_eagerly(stages, begun, STEPS[:position], index, last), stages.handlers, stages)
    return position, state


def _eagerly(stages: LoopStages, state: State, steps: tuple[Step, ...], index: int, last: bool) -> Script:
    for step in steps:
        if isinstance(step, Event):
            state = yield step, state
        else:
            state = _stage(stages, step, state, index, last)
    return state


def _stage(stages: LoopStages, name: Step, state: State, index: int, last: bool) -> State:
    if name == "forward":
        return stages.forward(state, index=index, last=last)
    return stages.loss(state, index=index)


def _segment_from(compiler: Compiler, begin: int) -> MicrobatchSegment:
    """The longest segment that begins here."""
    key = begin, compiler.observed
    result = compiler.microbatch_segments.get(key)
    if result is None:
        end = next((i for i in range(begin, len(STEPS)) if STEPS[i] in compiler.observed), len(STEPS))
        steps = STEPS[begin:end]
        result = compiler.microbatch_segments[key] = MicrobatchSegment(
            end=end,
            name=" to ".join(dict.fromkeys(_name(step) for step in (steps[0], steps[-1]))),
            fields=_fields(compiler, steps, _CHANGED[:3]),
            program=_program(steps),
            empty=all(isinstance(step, Event) and step not in compiler.stages.handlers for step in steps),
            begins_with_leaves="forward" in [step for step in steps if not isinstance(step, Event)],
        )
    return result


def _run(
    compiler: Compiler, segment: MicrobatchSegment, state: State, timestamps: tuple[Timestamp, ...], index: int
) -> State | None:
    """The State after a segment; None: something in it can't be traced."""
    if segment.empty:
        return state
    if segment.begins_with_leaves:
        leaves = compiler.alone.engine.leaves(state, index=0, last=True)
        leaves.lent = None  # what was read before has no part in this forward, and a graph looks at each tensor anyway
        state = with_fields(state, params=leaves)
    per_batch = tuple(
        [read(state) if field in segment.fields else None for field, read in zip(_CHANGED, _READERS, strict=True)]
    )
    run = compiler.attempt(segment.name, segment.program, state, timestamps, per_batch, index, connected=True)
    # The leaves stay what they are, for the backward.
    return None if run is None else with_fields(put_in(state, run, segment.fields), params=raw_params(state))


def _fields(compiler: Compiler, steps: tuple[Step, ...], fields: tuple[str, ...]) -> tuple[str, ...]:
    """The values of these fields; of all of them if an algorithm in these steps may read or replace them."""
    return _CHANGED if compiler.stages.handlers.keys() & steps else fields


def _name(step: Step) -> str:
    return step.name if isinstance(step, Event) else step


def _program(steps: tuple[Step, ...]) -> Program:
    def program(state: State, per_batch: PerBatch, traced: Traced) -> Ended:
        state = with_fields(state, **dict(zip(_CHANGED, per_batch, strict=True)))
        for step in steps:
            # Seeds are those of microbatch 0, and moved to those of this one when they are used.
            state = at(step, state, traced) if isinstance(step, Event) else _stage(traced.stages, step, state, 0, True)
        return state, None, tuple(getattr(state, field) for field in _CHANGED)

    return program


def _whole(state: State, per_batch: PerBatch, traced: Traced) -> Ended:
    microbatch, grads, weight, batch = per_batch
    state, _, _ = _program(STEPS)(state, (microbatch, None, None, grads, batch), traced)
    state = traced.stages.backward(state, weight=weight)
    return state, None, tuple(getattr(state, name) for name in _CHANGED)
