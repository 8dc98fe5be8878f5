"""Generators of random numbers in a traced step: what is drawn from one is drawn under its seed, in each call anew.

A graph would hold a generator, and its seed, for ever. So what is drawn from ``pl.random.generator(...)``, or inside of
``pl.random.seeded(...)``, is traced as a draw from torch's global generator, and noted together with how its seed is
derived from the numbers of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pure_loop.compile.draws import Group
from pure_loop.compile.numbers import Number, Seed, TraceContext
from pure_loop.random.seeds import tracer

__all__ = ["DrawnFromDataError", "StrayGeneratorError", "TracedGenerator", "traced_generators"]

# Writes down what is drawn inside as of a group.
Drawing = Callable[[Group], AbstractContextManager[None]]


class StrayGeneratorError(RuntimeError):
    """A draw from a generator whose state no graph knows."""


class DrawnFromDataError(RuntimeError):
    """A draw that depends on what a graph is given; of the operation of that name."""


class TracedGenerator(torch.Generator):
    """One of a trace: whatever it is asked for is another thing in each call."""

    group: Group
    trace: _Tracer

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise StrayGeneratorError

    manual_seed = seed = initial_seed = get_state = set_state = clone_state = _refuse
    graphsafe_get_state = graphsafe_set_state = _refuse


@contextmanager
def traced_generators(context: TraceContext, drawing: Drawing) -> Iterator[None]:
    """Inside, on this thread, generators are those of a trace, whose numbers are those of ``context``."""
    trace = _Tracer(context, drawing)
    token = tracer.set(trace)
    try:
        with _TakenFromCalls(trace):
            yield
    finally:
        tracer.reset(token)


class _Tracer:
    """What :mod:`pure_loop.random` asks for generators."""

    def __init__(self, context: TraceContext, drawing: Drawing) -> None:
        self._context = context
        self.drawing = drawing

    def computed(self, function: Callable[..., int], *value: Any) -> int:
        return Seed.of(self._context, function, *value)  # type: ignore[return-value]

    def generator(self, seed: int, device: torch.device | str) -> torch.Generator:
        result = TracedGenerator(device)
        result.group, result.trace = _group(seed, torch.device(device)), self
        return result

    def seeded(self, seed: int, device: Any) -> AbstractContextManager[None]:
        return self.drawing(_group(seed, torch.device("cpu" if device is None else device)))


def _group(seed: Any, device: torch.device) -> Group:
    if isinstance(seed, Number):
        evaluate = seed.evaluate
        return Group(None, device, lambda context: evaluate(context.env))
    return Group(None, device, lambda context: seed)


class _TakenFromCalls(TorchFunctionMode):
    """Calls lose their generator: what they draw belongs to its group."""

    def __init__(self, trace: _Tracer) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = next((item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)), None)
        if kwargs.get("generator", self) in (None, generator):
            del kwargs["generator"]  # None would be one, too: another overload
        if generator is None:
            return function(*args, **kwargs)
        if not isinstance(generator, TracedGenerator) or generator.trace is not self._trace:
            raise StrayGeneratorError
        with self._trace.drawing(generator.group):
            return function(*(None if item is generator else item for item in args), **kwargs)
