"""The parts of a stream of ``fit`` that tools replace, and its steps: States at events, and after each algorithm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from pure_loop._internal.closing import closing
from pure_loop._internal.frames import generator_arguments
from pure_loop._internal.torch_private import Operation, record_operations
from pure_loop.callback import Logger
from pure_loop.entry.members import MemberStages
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.hooks import Handler, Observer
from pure_loop.loop.call import Fit
from pure_loop.loop.stream import Stream
from pure_loop.state import State
from pure_loop.verify.leaves import LOOP, distance
from pure_loop.verify.leaves import copied as copied_tensors

T = TypeVar("T")


@attrs.frozen
class Parts:
    """What a stream of ``fit`` is made of: the arguments of its generator, which has not begun.

    Attributes:
        fit: the call of ``fit``.
        handlers: of algorithms, by event.
        observers: what callbacks and loggers are called by.
        loggers: those that are there.
        state: with which the stream begins.
    """

    fit: Fit
    handlers: dict[Event, tuple[Handler, ...]]
    observers: dict[Event, tuple[Observer, ...]]
    loggers: tuple[Logger, ...]
    state: State

    @classmethod
    def of(cls, stream: object, function: str) -> Parts:
        """
        Raises:
            ArgumentTypeError: it is no stream of ``fit``.
            ArgumentError: it has begun.
        """
        pairs = iter(stream) if isinstance(stream, Stream) else None
        if not isinstance(pairs, Generator):
            raise ArgumentTypeError(
                f"{function}({type(stream).__name__}): give the stream of fit itself, pl.{function}(pl.fit(...))."
            )
        if getgeneratorstate(pairs) != GEN_CREATED:
            raise ArgumentError(
                f"{function}: the stream has begun: give a new one, pl.{function}(pl.fit(...)); from a State on, "
                f"pl.{function}(pl.fit(state, ...))."
            )
        arguments: Mapping[str, Any] = generator_arguments(pairs)
        script = arguments.get("script")
        begun = generator_arguments(script) if isinstance(script, Generator) else arguments
        fit, state = begun.get("fit"), begun.get("state")
        if not isinstance(fit, Fit) or not isinstance(state, State):
            raise ArgumentTypeError(
                f"{function}: this is the stream of another function than fit, or of pl.progress: give that of fit "
                f"itself, pl.{function}(pl.fit(...))."
            )
        closed = (getattr(close, "__self__", None) for close in arguments["closing"])
        loggers = tuple(item for item in closed if isinstance(item, Logger))
        return cls(fit, arguments["handlers"], arguments["observers"], loggers, state)


def set_attribute(restoring: ExitStack, target: object, name: str, value: object) -> None:
    """Set an attribute, of a frozen record too."""
    restoring.callback(object.__setattr__, target, name, getattr(target, name))
    object.__setattr__(target, name, value)


def set_method(restoring: ExitStack, target: object, name: str, method: object) -> None:
    """Put a method into an instance, until ``restoring`` ends."""
    variables: dict[str, object] = vars(target)
    if name in variables:
        restoring.callback(variables.__setitem__, name, variables[name])
    else:
        restoring.callback(variables.pop, name)
    variables[name] = method


def replace_each(restoring: ExitStack, table: dict[Event, tuple[T, ...]], replace: Callable[[Event, T], T]) -> None:
    """Replace what a table has for each event, until ``restoring`` ends."""
    for event, listed in list(table.items()):
        restoring.callback(table.__setitem__, event, listed)
        table[event] = tuple(replace(event, item) for item in listed)


@attrs.frozen(eq=False)
class Step:
    """A State on its way from one event to the next.

    Attributes:
        event: the one at which it is, or is about to be observed.
        by: what made it: the name of an algorithm, or what the loop computed (:data:`LOOP`).
        is_algorithm: whether an algorithm did.
        state: the State.
        operations: those of torch on the way to the event, where they are recorded.
    """

    event: Event
    by: str
    is_algorithm: bool
    state: State
    operations: Sequence[Operation] = ()


def steps(
    stream: Stream, function: str, operations_from: float = math.inf, *, copied: bool = False
) -> Generator[Step, None, None]:
    """The steps of a stream of ``fit`` that has not begun, as far as it is iterated over.

    Args:
        stream: of ``fit``, with every event watched, and not compiled.
        function: for errors.
        operations_from: from which batch on operations are recorded.
        copied: whether the State before each algorithm is copied, so that what the algorithm writes in place is a
            change of its own step, and not of the one before.

    Raises:
        ArgumentTypeError: it is no stream of ``fit``.
        ArgumentError: it has begun; it is compiled: what is in a graph has no steps; or ``donate=True``.
    """
    return _steps(stream, refuse_stepless(stream, function), operations_from, copied)


def refuse_stepless(stream: object, function: str) -> Parts:
    """The parts of a stream that has steps to look at; raises as :func:`steps` does."""
    autoresume = (stream.settings or {}).get("autoresume") if isinstance(stream, Stream) else None
    if autoresume is not None:
        raise ArgumentError(
            f"{function}: the stream has autoresume={str(autoresume)!r}, so that it begins at the last checkpoint "
            "there, and saves others: write fit(..., autoresume=None)."
        )
    parts = Parts.of(stream, function)
    if isinstance(parts.fit.stages, MemberStages) and parts.fit.strategy.graphs is not None:
        raise ArgumentError(
            f"{function}: a step of members is one mapped graph, which has no steps between events: write "
            'pl.ensemble(..., fallback="loop"), which trains the same up to rounding.'
        )
    if parts.fit.strategy.graphs is not None:
        raise ArgumentError(
            f"{function}: the stream is compiled, and a graph has no steps between events: leave out compile=, which "
            "trains the same up to rounding."
        )
    ownership = parts.fit.stages.workspace.ownership
    if ownership is not None and ownership.always:
        raise ArgumentError(
            f"{function}: with donate=True a step writes to the memory of the States before it, with which they are "
            "compared: leave out donate=True, which trains the same."
        )
    return parts


def _steps(stream: Stream, parts: Parts, operations_from: float, copied: bool) -> Generator[Step, None, None]:
    noted: list[Step] = []
    pairs = iter(stream)
    batch = parts.state.timestamp.batch
    # However far it is iterated over: what the stream holds (files, workers, ranks) is let go of.
    with closing(pairs), ExitStack() as restoring:
        replace_each(restoring, parts.handlers, functools.partial(_noted, noted, [0], copied))
        while True:
            operations: list[Operation] = []
            recording = record_operations(operations) if batch >= operations_from else nullcontext()
            try:
                with recording:
                    event, state = next(pairs)
            except StopIteration:
                return
            batch = state.timestamp.batch
            if not noted:
                noted.append(Step(event, LOOP.get(event, "loop"), False, state))
            for step in noted:
                yield attrs.evolve(step, operations=operations) if operations else step
            noted.clear()


def _noted(noted: list[Step], depth: list[int], copied: bool, event: Event, handler: Handler) -> Handler:
    """A handler, with its States noted but for those of calls inside another algorithm, which keeps what it wants."""

    def call(state: State, *stages: object) -> State:
        if not depth[0] and not noted:
            noted.append(Step(event, LOOP.get(event, "loop"), False, state))
        if copied and not depth[0]:
            noted[-1] = attrs.evolve(noted[-1], state=copied_tensors(noted[-1].state))
        depth[0] += 1
        try:
            result = handler.function(state, *stages)
        finally:
            depth[0] -= 1
        if not depth[0] and isinstance(result, State):
            noted.append(Step(event, handler.algorithm, True, result))
        return result

    return attrs.evolve(handler, function=call)


def is_same(a: object, b: object, tolerance: float = 0.0) -> bool:
    """Whether two leaves are equal by value, NaN to NaN; tensors up to a distance relative to the larger norm."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b or (a != a and b != b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach().to(a.device)
    if torch.equal(a, b):
        return True
    # Where a sum is finite, no number is NaN: one pass instead of five.
    has_none = a.dtype in (torch.float32, torch.float64) and math.isfinite(a.sum().item())
    if not has_none and bool(((a == b) | ((a != a) & (b != b))).all()):
        return True
    gap = distance(a, b)
    if not tolerance or gap is None:
        return False
    largest = max(float(torch.linalg.vector_norm(item.to(torch.float64))) for item in (a, b))
    return gap <= tolerance * largest


def change_between(a: object, b: object) -> tuple[bool, float | None]:
    """Whether a leaf has another value, and the L2 norm of the change; of large tensors in few passes over them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype == torch.float32 and a.shape == b.shape:
        if a is b:
            return False, None
        gap = float(torch.linalg.vector_norm(b.detach().to(a.device) - a.detach()))
        # Squares of this dtype have neither overflown nor vanished, and nothing is NaN.
        if 1e-15 < gap < 1e15:
            return True, gap
    if is_same(a, b):
        return False, None
    return True, distance(a, b)
