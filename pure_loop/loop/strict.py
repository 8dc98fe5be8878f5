"""``strict=True``: runtime checks of the event order and of immutability; errors name the offender.

The order of events is held against the specification; every tensor of a State is compared, by value,
before and after an algorithm, a callback, the loop's body or the loop's own computation had it (the
version counters of tensors miss what fused kernels, ``.data`` and BatchNorm write); and algorithms
may not draw from the global random generators of torch (the CPU's), Python and NumPy, and a forward or loss only from
those that are seeded for it, while no other thread does. It copies every State, so it is for tests and for the first
steps of a new algorithm.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import TYPE_CHECKING, Any, Literal, cast

import optree
import torch
from torch import Tensor

from pure_loop._internal.dtensor import local_tensor
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.errors import ImpurityError
from pure_loop.event import Event
from pure_loop.state import State

if TYPE_CHECKING:
    from pure_loop.order import Checker

__all__ = ["Strict", "dense_parts", "same"]

# The stage that runs after each event.
_COMPUTED_AFTER: dict[Event | None, str] = {
    Event.BEFORE_FORWARD: "the forward",
    Event.BEFORE_LOSS: "the loss",
    Event.BEFORE_BACKWARD: "the backward",
    Event.AFTER_TRAIN_BATCH: "the optimizer's step",
    Event.EVAL_BEFORE_FORWARD: "the forward of the evaluation",
    Event.EVAL_AFTER_FORWARD: "a metric",
    Event.PREDICT_BEFORE_FORWARD: "the forward of the prediction",
}


class Strict:
    """The checks of one stream."""

    def __init__(self, checker: Checker | None) -> None:
        self._checker = checker
        self._given: list[tuple[Any, Any]] = []
        self._random: tuple[Tensor, Any, bytes] | None = None

    @classmethod
    def of_order(cls, order: Literal["current", "2021"], *, loaded: bool = False) -> Strict:
        """Checks that hold the events against an order as well."""
        from pure_loop.order import Checker

        return cls(Checker(order, loaded=loaded))

    def advance(self, event: Event) -> None:
        """
        Raises:
            OrderError: the event may not come here.
        """
        if self._checker is not None:
            self._checker.advance(event)

    def hand_over(self, state: State) -> None:
        """Remember a State by value before it is passed on."""
        leaves: list[Any] = optree.tree_leaves(cast(Any, state), namespace=NAMESPACE)
        # Of tensors in parts the part: only this rank may be looking.
        self._given = [
            (leaf, local_tensor(leaf).detach().clone() if isinstance(leaf, Tensor) else leaf) for leaf in leaves
        ]

    def take_back(self, state: State, holder: str, event: Event | None) -> None:
        """
        Raises:
            ImpurityError: a tensor of the State changed; names the leaf and the code that had it.
        """
        value, self._given = self._given, []
        for index, (leaf, before) in enumerate(value):
            if isinstance(leaf, Tensor) and not same(leaf, before):
                path = _path(state, index)
                raise ImpurityError(
                    f"{holder} changed {path} in place, at or after {event.name if event else 'no event'}: it was "
                    f"{_short(before)} and is {_short(leaf)}. A State never changes: compute a new tensor "
                    "(`x = x + 1`, not `x += 1` or `x.add_(1)`), and give it back with state.replace(...)."
                )

    def after_computation(self, state: State, event: Event | None) -> None:
        """
        Raises:
            ImpurityError: what the script did after this event wrote to the State.
        """
        self.take_back(state, _COMPUTED_AFTER.get(event, "the computation that followed"), event)

    def before_handler(self, state: State) -> None:
        self.hand_over(state)
        self._random = _random_state()

    def after_handler(self, state: State, name: str, event: Event) -> None:
        """
        Raises:
            ImpurityError: the algorithm wrote to its State, or drew from a global generator.
        """
        self.take_back(state, f"algorithm {name!r}", event)
        assert self._random is not None
        now = _random_state()
        before = self._random
        numpy_drew = bool(before[2]) and before[2] != now[2]  # NumPy itself may be loaded by the handler
        if not torch.equal(before[0], now[0]) or before[1] != now[1] or numpy_drew:
            raise ImpurityError(
                f"algorithm {name!r} drew from a global random generator at {event.name}, so it can't be replayed: "
                "draw from pl.random.generator(state.seed, name, state.timestamp.batch)."
            )


def _random_state() -> tuple[Tensor, Any, bytes]:
    numpy: Any = sys.modules.get("numpy")
    # Reading .random loads it if nothing has yet: loaded by a handler, it would seem to have been drawn from there.
    drawn = b"" if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
    return torch.get_rng_state(), random.getstate(), drawn


def same(a: Any, b: Any) -> bool:
    """Equal by value: bitwise for tensors, with NaN equal to itself; ``==`` for everything else.

    >>> same(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    True
    """
    a, b = local_tensor(a), local_tensor(b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return False
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or a.layout != b.layout:
            return False
        return all(map(_same_numbers, dense_parts(a.detach()), dense_parts(b.detach())))
    if hasattr(a, "__array__") and hasattr(b, "__array__"):  # NumPy's: their == is an array
        return bool(a.shape == b.shape and a.dtype == b.dtype and ((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b)


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Dense tensors that have all numbers of this one: its indices and values where it is sparse."""
    layout = tensor.layout
    if tensor.is_meta:
        return []
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor if layout is torch.strided else tensor.to_dense()]


def _path(state: State, index: int) -> str:
    accessors = optree.tree_accessors(cast(Any, state), namespace=NAMESPACE)
    return accessors[index].codify("state")


def _short(tensor: Tensor) -> str:
    flat = local_tensor(tensor).detach().to_dense().flatten()
    return f"{flat[:3].tolist()}{'...' if flat.numel() > 3 else ''}"
