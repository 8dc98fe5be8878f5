"""``pl.diff``: the first event, the first algorithm or part of the loop, and the leaf in which two runs differ."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import attrs
from torch import Tensor

from pure_loop._internal.arguments import check_number
from pure_loop._internal.reprs import shown
from pure_loop._internal.suggestions import teaching
from pure_loop.event import Event
from pure_loop.loop.stream import Stream
from pure_loop.time import Timestamp
from pure_loop.tools.steps import Step, distance, is_same, leaves_of, steps

__all__ = ["Divergence", "diff"]


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
    """

    event: Event
    timestamp: Timestamp
    by: str
    leaf: str
    leaves: tuple[str, ...]
    a: Any
    b: Any
    norm: float | None

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


@teaching
def diff(stream_a: Stream, stream_b: Stream, *, tolerance: float = 0.0) -> Divergence | None:
    """The first step at which two runs differ, or None: both are run side by side, until they do or end.

    Compared are all leaves of both States, by value, after what the loop computed before each event and after each
    algorithm: what is named is the first that made a difference, and not the first event at which it was seen. Times by
    the clock are left out. Values are compared on the host: this is to debug with.

    Args:
        stream_a, stream_b: what ``pl.fit(...)`` returned, not begun and not compiled.
        tolerance: for runs on other devices: leaves whose difference is at most this, relative to the larger norm, are
            equal; 0: bit for bit.

    Raises:
        ArgumentTypeError: one is no stream of ``fit``.
        ArgumentError: one has begun, or is compiled; a negative tolerance.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> def train(lr):
    ...     net = torch.nn.Linear(2, 1)
    ...     _ = [torch.nn.init.ones_(parameter) for parameter in net.parameters()]
    ...     return pl.fit(net, data, loss=torch.nn.functional.mse_loss, max_duration="1ep",
    ...                   optimizer=pl.optim.sgd(lr=lr))
    >>> diff(train(0.1), train(0.1)) is None
    True
    >>> where = diff(train(0.1), train(0.2))
    >>> where.event.name, where.timestamp.batch, where.by, where.leaf
    ('BATCH_END', 1, 'optimizer', 'params/weight')
    """
    tolerance = check_number("tolerance", tolerance, least=0, where="diff")
    for a, b in zip_longest(*(steps(stream, "diff", copied=True) for stream in (stream_a, stream_b))):
        if a is None or b is None or (a.event, a.by) != (b.event, b.by):
            step = next((item for item in (a, b) if item is not None and item.is_algorithm), a or b)
            mine, theirs = (_where(item) for item in (a, b))
            return Divergence(step.event, step.state.timestamp, step.by, "events", ("events",), mine, theirs, None)
        divergence = _first_difference(a, b, tolerance)
        if divergence is not None:
            return divergence
    return None


def _where(step: Step | None) -> str:
    return "it has ended" if step is None else f"{step.event.name}, {step.by}"


def _first_difference(a: Step, b: Step, tolerance: float) -> Divergence | None:
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
    return Divergence(a.event, a.state.timestamp, a.by, leaf, tuple(leaves), x, y, distance(x, y))
