"""Collectives as values: what a rank asks for, and what all ranks get once every one has asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import groupby
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed import ReduceOp

from pure_loop.errors import PureLoopError

Tensors: TypeAlias = tuple[Tensor, ...]


class CollectiveError(PureLoopError, AssertionError):
    """The ranks call different collectives, or a rank calls one with tensors that don't fit."""


class UnsupportedCollectiveError(PureLoopError, NotImplementedError):
    """A program uses a part of torch.distributed that is not simulated."""


@frozen
class Collective:
    """What one rank asked for.

    Attributes:
        kind: the function of torch.distributed, by the name that all its versions know.
        shapes, dtypes: of the tensors that the rank gives; for broadcast and scatter, that it gets.
        op: how they are reduced, such as ``"sum"``; None where nothing is.
        root: the rank from which or to which they go; None where all are alike.

    >>> print(Collective("all_reduce", ((3,),), (torch.float32,), op="sum"))
    all_reduce (sum) of (3,) float32
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    op: str | None = None
    root: int | None = None

    def __str__(self) -> str:
        text = self.kind if self.op is None else f"{self.kind} ({self.op})"
        if self.root is not None:
            text += f" {'from' if self.kind in ('broadcast', 'scatter') else 'to'} rank {self.root}"
        tensors = [f"{s} {str(d).removeprefix('torch.')}" for s, d in zip(self.shapes, self.dtypes, strict=True)]
        runs = [(tensor, len(list(equal))) for tensor, equal in groupby(tensors)]
        named = ", ".join(tensor if times == 1 else f"{times} x {tensor}" for tensor, times in runs)
        return f"{text} of {named}" if named else text


OPERATIONS: dict[object, str] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    total = reduce(_BINARY[op], tensors)
    # In place, because that refuses integers, as the backends do.
    return total.clone().div_(len(tensors)) if op == "avg" else total


def outcome(kind: str, op: str | None, root: int | None, value: Sequence[Tensors]) -> Sequence[Tensors]:
    """What every rank gets.

    Args:
        kind, op, root: as in :class:`Collective`; the same for all.
        value: what every rank gave. Where it gives a part to each rank, the parts for the ranks follow each other.

    >>> outcome("all_reduce", "sum", None, [(torch.tensor(1),), (torch.tensor(2),)])
    [(tensor(3),), (tensor(3),)]
    """
    ranks = len(value)
    match kind:
        case "all_reduce" | "reduce":
            assert op is not None
            total = tuple(map(partial(_reduced, op), zip(*value, strict=True)))
            return [total if root is None or rank == root else () for rank in range(ranks)]
        case "reduce_scatter" | "reduce_scatter_tensor":
            assert op is not None
            totals = tuple(map(partial(_reduced, op), zip(*value, strict=True)))
            return [totals[rank::ranks] for rank in range(ranks)]
        case "all_gather" | "all_gather_into_tensor" | "gather":
            everything = tuple(tensor for same_place in zip(*value, strict=True) for tensor in same_place)
            return [everything if root is None or rank == root else () for rank in range(ranks)]
        case "all_to_all" | "all_to_all_single":
            return list(zip(*value, strict=True))
        case "broadcast":
            assert root is not None
            return [value[root]] * ranks
        case "scatter":
            assert root is not None
            return [(tensor,) for tensor in value[root]]
        case _:
            return [()] * ranks  # a barrier
