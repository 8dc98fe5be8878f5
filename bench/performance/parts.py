"""What a step of ours is made of: the kernels, what the loop asks before it writes, and the rest of its Python.

Each part is a function that is replaced by one that takes the time around it, so a part also has the microsecond or two
that its call and the clock cost.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import attrs
from torch import nn

from bench.performance.hand import hand_written
from bench.performance.loops import ours
from bench.performance.turns import OfGenerator
from bench.performance.workloads import WORKLOADS, Workload
from pure_loop import Event
from pure_loop.stages import engine, ownership, update

__all__ = ["measure"]

# Those whose model is one nn.Sequential.
_MEASURED = ("W1", "W2", "W4")

# The name of a part, and the function that it is, by its owner's name for it.
_PARTS: list[tuple[str, Any, str]] = [
    ("forward", nn.Sequential, "forward"),
    ("backward", engine, "gradient_of"),
    ("the optimizer's kernel", importlib.import_module("pure_loop.optim.adam"), "fused_adamw"),
    ("the check for NaN", update, "find_nonfinite"),
    ("counting references", ownership, "_counts"),
    ("leaves of autograd", engine.Engine, "leaves"),
    ("the consumer's variable", ownership, "rebinds_loop_variable"),
]


class _Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds[name] = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - begin
            return result

        # As a function of torch's: for one of the user's, generators would be seeded.
        return FunctionType(timed.__code__, {**globals(), "__name__": "torch"}, closure=timed.__closure__)


@contextmanager
def _timed(clock: _Clock) -> Iterator[None]:
    with ExitStack() as stack:
        # The clock refers to what it passes on, so what refers to a State that nothing keeps is counted anew.
        stack.enter_context(patch.object(ownership.Ownership, "expected", None))
        for name, owner, function in _PARTS:
            stack.enter_context(patch.object(owner, function, clock.around(name, getattr(owner, function))))
        yield


def measure(turns: int, seconds: float) -> dict[str, dict[str, float]]:
    """For each workload what part of the hand-written step each part of ``pl.fit(watch={BATCH_END})`` takes."""
    return {each.name: _of(each, turns, seconds) for each in WORKLOADS if each.name in _MEASURED}


def _of(workload: Workload, turns: int, seconds: float) -> dict[str, float]:
    clock = _Clock()
    found: dict[str, list[float]] = {}
    timed = attrs.evolve(workload, loss=clock.around("loss", workload.loss))
    hand = OfGenerator(hand_written(fused=True)(workload))
    with _timed(clock):
        loop = OfGenerator(ours(watch={Event.BATCH_END})(timed))
        loop.run(50)
        used, done = hand.run(20)
        steps = max(2, int(seconds / (used / done)))
        for _ in range(turns):
            used, done = hand.run(steps)
            by_hand = used / done
            clock.seconds = dict.fromkeys(clock.seconds, 0.0)
            used, done = loop.run(steps)
            parts = {name: taken / done / by_hand for name, taken in clock.seconds.items()}
            parts["the rest"] = used / done / by_hand - sum(parts.values())
            for name, part in parts.items():
                found.setdefault(name, []).append(part)
        loop.close()
    hand.close()
    order = ["forward", "loss", *(name for name, _, _ in _PARTS[1:]), "the rest"]
    return {name: statistics.median(found[name]) for name in order}
