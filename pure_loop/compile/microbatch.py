"""A microbatch between BEFORE_FORWARD and AFTER_BACKWARD: graphs between the events that somebody attends to.

With nobody there it is one graph, which differentiates. Else autograd goes from one graph into the next
(:mod:`pure_loop.compile.connected`), and through what algorithms add at the events in between, eagerly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._weights import is_number
from pure_loop.compile.program import Ended, Flight, at, put_in
from pure_loop.compile.stretch import Program, Traced
from pure_loop.driver import run_silently
from pure_loop.event import Event
from pure_loop.loop import LoopStages, Script
from pure_loop.state import State, holding
from pure_loop.time import Timestamp

if TYPE_CHECKING:
    from pure_loop.compile.compiler import Compiler

__all__ = ["INSIDE", "Piece", "microbatch"]

Step: TypeAlias = Event | Literal["forward", "loss"]
STEPS: tuple[Step, ...] = (
    *("forward", Event.AFTER_FORWARD, Event.BEFORE_LOSS),
    *("loss", Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
)
INSIDE = frozenset(step for step in STEPS if isinstance(step, Event))
_CHANGED = ("microbatch", "outputs", "loss", "_grads", "batch")


@attrs.frozen
class Piece:
    """Steps between two events that somebody attends to.

    Attributes:
        end: the first step after it.
        name: for errors and records.
        fields: those in flight that it takes and gives.
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
    engine, task, before = compiler.stages.engine, compiler.stages.task, state
    if is_number(weight) and not task.by_shape:
        # A graph takes a number for a constant, and a count of tokens is another one in most batches.
        weight = torch.tensor(weight, dtype=torch.float64)
    state = engine.gathered(state)
    while not (compiler.attended & INSIDE or "forward" in compiler.eager):
        batch = state.batch if "batch" in _fields(compiler, STEPS, ()) else None
        flight = (state.microbatch, state._grads, weight, batch)
        run = compiler.attempt("microbatch", _whole, state, timestamps, flight, index)
        if run is not None:
            ended = [put_in(state, run, _fields(compiler, STEPS, _CHANGED[:4]))]
            del state, flight, run
            return engine.add_up(ended, before, last=last)
    state = yield from _in_pieces(compiler, timestamps, state, index, last)
    ended = [compiler.alone.backward(state, weight=weight)]
    del state
    return engine.add_up(ended, before, last=last)


def _eager(compiler: Compiler) -> bool:
    """Whether nothing of forwards and losses is compiled."""
    if "forward" in compiler.eager:
        return True
    # A module's own loss may read what its forward has left in the module, which a graph doesn't hand on.
    own_loss = compiler.stages.task.loss is None
    return own_loss and not compiler.attended.isdisjoint({Event.AFTER_FORWARD, Event.BEFORE_LOSS})


def _in_pieces(compiler: Compiler, timestamps: tuple[Timestamp, ...], state: State, index: int, last: bool) -> Script:
    """The State of BEFORE_BACKWARD."""
    # What runs eagerly exchanges nothing either: another rank may have a graph of its share of the batch.
    stages, begun, position = compiler.alone, state, 0
    while position < len(STEPS):
        step, eager = STEPS[position], _eager(compiler)
        if isinstance(step, Event) and (eager or step in compiler.attended):
            state = yield step, state
            position += 1
        elif eager:
            state = _stage(stages, step, state, index, last)
            position += 1
        else:
            piece = _piece_from(compiler, position)
            found = _run(compiler, piece, state, timestamps, index)
            if found is not None:
                position, state = piece.end, found
            elif _eager(compiler) and position:
                # What follows may differentiate one output by another, and those of a graph lie side by side.
                state = run_silently(_eagerly(stages, begun, STEPS[:position], index, last), stages.handlers, stages)
            del found
    return state


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


def _piece_from(compiler: Compiler, begin: int) -> Piece:
    """The longest piece that begins here."""
    key = begin, compiler.attended
    found = compiler.pieces.get(key)
    if found is None:
        end = next((i for i in range(begin, len(STEPS)) if STEPS[i] in compiler.attended), len(STEPS))
        steps = STEPS[begin:end]
        found = compiler.pieces[key] = Piece(
            end=end,
            name=" to ".join(dict.fromkeys(_name(step) for step in (steps[0], steps[-1]))),
            fields=_fields(compiler, steps, _CHANGED[:3]),
            program=_program(steps),
            empty=all(isinstance(step, Event) and step not in compiler.stages.handlers for step in steps),
            begins_with_leaves="forward" in steps,
        )
    return found


def _run(compiler: Compiler, piece: Piece, state: State, timestamps: tuple[Timestamp, ...], index: int) -> State | None:
    """The State after a piece; None: something in it can't be traced."""
    if piece.empty:
        return state
    if piece.begins_with_leaves:
        state = holding(state, params=compiler.alone.engine.leaves(state, index=0, last=True))
    flight = tuple([getattr(state, field) if field in piece.fields else None for field in _CHANGED])
    run = compiler.attempt(piece.name, piece.program, state, timestamps, flight, index, connected=True)
    return None if run is None else put_in(state, run, piece.fields)


def _fields(compiler: Compiler, steps: tuple[Step, ...], fields: tuple[str, ...]) -> tuple[str, ...]:
    """These fields in flight; all of them if an algorithm in these steps might look, or put others in their places."""
    return _CHANGED if compiler.stages.handlers.keys() & steps else fields


def _name(step: Step) -> str:
    return step.name if isinstance(step, Event) else step


def _program(steps: tuple[Step, ...]) -> Program:
    def program(state: State, flight: Flight, traced: Traced) -> Ended:
        state = holding(state, **dict(zip(_CHANGED, flight, strict=True)))
        for step in steps:
            # Seeds are those of microbatch 0, and moved to those of this one when they are used.
            state = at(step, state, traced) if isinstance(step, Event) else _stage(traced.stages, step, state, 0, True)
        return state, None, tuple(getattr(state, field) for field in _CHANGED)

    return program


def _whole(state: State, flight: Flight, traced: Traced) -> Ended:
    piece, grads, weight, batch = flight
    state, _, _ = _program(STEPS)(state, (piece, None, None, grads, batch), traced)
    state = traced.stages.backward(state, weight=weight)
    return state, None, tuple(getattr(state, name) for name in _CHANGED)
