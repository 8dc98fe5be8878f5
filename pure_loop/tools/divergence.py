"""Where two streams part: both are run side by side, step by step, until a leaf differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any

import attrs
from torch import Tensor

from pure_loop._internal.closing import closing
from pure_loop._internal.reprs import shown
from pure_loop._internal.torch_private import Operation
from pure_loop.event import Event
from pure_loop.loop.stream import Stream
from pure_loop.time import Timestamp
from pure_loop.tools.steps import Step, is_same, steps
from pure_loop.verify.leaves import distance, leaves_of

__all__ = ["Divergence", "diff_streams", "first_difference"]


@attrs.frozen(eq=False, repr=False)
class Divergence:
    """Where two runs part.

    Attributes:
        event: the first at which a leaf differs.
        timestamp: of the first run there.
        by: the algorithm, or the part of the loop, after which it does: ``"forward"``, ``"optimizer"``.
        leaf: the first leaf that differs: ``"grads/0.weight"``; ``"events"``: the runs have other events or algorithms.
        leaves: all leaves that differ after that step.
        a, b: the leaf in each run; None where it is not there.
        norm: the L2 norm of the difference; None where it has none.
        operation: the first operation of torch that gave other numbers; None: not recorded, or all gave the same.
    """

    event: Event
    timestamp: Timestamp
    by: str
    leaf: str
    leaves: tuple[str, ...]
    a: Any
    b: Any
    norm: float | None
    operation: str | None = None

    def __str__(self) -> str:
        size = "" if self.norm is None else f", {self.norm:.3g} apart"
        more = f" and {len(self.leaves) - 1} more" if len(self.leaves) > 1 else ""
        place = _first_place(self.a, self.b)
        a, b = (
            _text(value) if place is None else f"{_text(value)}, number {place[0]} is {number!r}"
            for value, number in zip((self.a, self.b), place[1:] if place else (None, None), strict=True)
        )
        return (
            f"The runs part at {self.event.name}, batch {self.timestamp.batch} (epoch {self.timestamp.epoch}), after "
            f"{self.by}: {self.leaf}{more}{size}.\n  a: {a}\n  b: {b}"
            + ("" if self.operation is None else f"\n  operation: {self.operation}")
        )

    __repr__ = __str__


def _first_place(a: Any, b: Any) -> tuple[int, Any, Any] | None:
    """Where two tensors of one shape differ first, and the numbers there."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
        return None
    one, other = a.detach().flatten(), b.detach().to(a.device).flatten()
    index = int(((one != other) & ~((one != one) & (other != other))).nonzero()[0])
    return index, one[index].item(), other[index].item()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def diff_streams(
    a: Stream, b: Stream, tolerance: float, operations_from: float = math.inf, end: float = math.inf
) -> Divergence | None:
    """The same of two streams, until ``end`` batches are finished; operations are recorded from a batch on."""
    with ExitStack() as closing_both:
        # Each ends its stream, in both: they may hold files, workers and ranks.
        one_run, other_run = (
            closing_both.enter_context(closing(steps(stream, "diff", operations_from, copied=True)))
            for stream in (a, b)
        )
        for one, other in zip_longest(one_run, other_run):
            if one is None or other is None or (one.event, one.by) != (other.event, other.by):
                step = next((item for item in (one, other) if item is not None and item.is_algorithm), one or other)
                mine, theirs = (_where(item) for item in (one, other))
                return Divergence(step.event, step.state.timestamp, step.by, "events", ("events",), mine, theirs, None)
            divergence = first_difference(one, other, tolerance)
            if divergence is not None:
                return divergence
            if one.state.timestamp.batch > end:
                return None
    return None


def _where(step: Step | None) -> str:
    return "it has ended" if step is None else f"{step.event.name}, {step.by}"


def first_difference(a: Step, b: Step, tolerance: float) -> Divergence | None:
    one, other = leaves_of(a.state), leaves_of(b.state)
    absent: Any = None
    leaves = [
        leaf
        for leaf in dict.fromkeys([*one, *other])
        if not (leaf in one and leaf in other and is_same(one[leaf], other[leaf], tolerance))
    ]
    if not leaves:
        return None
    leaf = leaves[0]
    x, y = one.get(leaf, absent), other.get(leaf, absent)
    operation = _first_operation(a.operations, b.operations)
    return Divergence(a.event, a.state.timestamp, a.by, leaf, tuple(leaves), x, y, distance(x, y), operation)


def _first_operation(a: Sequence[Operation], b: Sequence[Operation]) -> str | None:
    """The first operation that is another one, or returns other numbers."""
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if one.name != other.name:
            return f"{one.name} in a, {other.name} in b (operation {number} of the step)"
        # Not by what it takes: memory that is about to be filled has any numbers.
        if one.outputs != other.outputs and not one.name.startswith(_CHECKS):
            other_inputs = "" if one.inputs == other.inputs else ", which takes other tensors already"
            return f"{one.name} (operation {number} of the step{other_inputs})"
    return None


# What the loop runs after a step, to find numbers that are not finite.
_CHECKS = ("aten._amp_foreach_non_finite_check_and_unscale_", "aten.empty")
