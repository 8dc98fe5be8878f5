"""What a State says of its members, and how its fields are theirs.

Tensors of members are stacked along a leading dimension. What is no tensor is there once where it is equal, and as
:class:`MemberValues` where it differs. A batch that all share is there once; :class:`PerMember` is one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.reprs import shape_and_dtype
from pure_loop.data.batch import are_alike, leaves, map_tensors
from pure_loop.errors import ArgumentError
from pure_loop.frozendict import FrozenDict
from pure_loop.time import Timestamp

S = TypeVar("S")
T = TypeVar("T")

# The fields of a batch: PerMember, or a batch that all share.
BATCHES = frozenset({"batch", "microbatch"})
# Of any class that a batch may have.
OF_A_BATCH = BATCHES | {"outputs", "loss"}

__all__ = ["Fallback", "MemberCount", "MemberValues", "Members", "PerMember"]

Fallback: TypeAlias = Literal["loop"] | None
# Where a member has stopped: its timestamp, and the one before.
Stop: TypeAlias = tuple[Timestamp, Timestamp]


@attrs.frozen
class Members:
    """What a State of several models says of them.

    Attributes:
        seeds: of each member: of its random numbers, as ``seed`` is those of a State of one model.
        stopped: of each member that an algorithm has stopped, its timestamp and the one before; None: it trains.
        fallback: ``"loop"``: its steps are computed one member after the other; None: as one mapped graph.
    """

    seeds: tuple[int, ...]
    stopped: tuple[Stop | None, ...]
    fallback: Fallback = None

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def is_valid(self) -> bool:
        """Whether it is what a State has, and not what a stranger's file says."""
        seeds, stopped = self.seeds, self.stopped
        if type(seeds) is not tuple or type(stopped) is not tuple or not 0 < len(seeds) == len(stopped):
            return False
        stops = [stop for stop in stopped if stop is not None]
        timed = all(
            type(stop) is tuple and len(stop) == 2 and all(isinstance(item, Timestamp) for item in stop)
            for stop in stops
        )
        return timed and all(type(seed) is int for seed in seeds) and self.fallback in (None, "loop")

    @property
    def running(self) -> list[bool]:
        """Of each member, whether it trains."""
        return [stop is None for stop in self.stopped]


class MemberCount(int, Generic[S]):
    """``state.members``: how many members a State has; called with their numbers, it gives a State of those alone."""

    _select: Callable[[Sequence[int] | Tensor], S]

    def __new__(cls, count: int, select: Callable[[Sequence[int] | Tensor], S]) -> MemberCount[S]:
        result = super().__new__(cls, count)
        result._select = select
        return result

    def __call__(self, indices: Sequence[int] | Tensor) -> S:
        return self._select(indices)


@attrs.frozen
class PerMember(Generic[T]):
    """A batch of each member, in the place of one that all share.

    Attributes:
        stacked: the batch, whose tensors have a leading dimension of members.
    """

    stacked: T = attrs.field(eq=attrs.cmp_using(eq=are_alike))


@attrs.frozen
class MemberValues:
    """In the place of a value that is no tensor: that of each member, where they differ.

    Attributes:
        values: of the members, in order: numbers, texts, or whole trees of another structure each.
    """

    values: tuple[object, ...]


# What the members of a State have.


def member_value(value: PyTree, index: int, field: str = "") -> PyTree:
    """What a field of a State with members is for one of them."""
    if field in BATCHES:
        return map_tensors(lambda tensor: tensor[index], value.stacked) if isinstance(value, PerMember) else value
    if value is None:
        return value
    if isinstance(value, Tensor):
        return value[index]
    if type(value) is FrozenDict and all(type(item) is Tensor for item in value.values()):
        return FrozenDict((name, tensor[index]) for name, tensor in value.items())
    if field in OF_A_BATCH:
        return map_tensors(lambda tensor: tensor[index], value)

    def one(leaf: object) -> object:
        if isinstance(leaf, MemberValues):
            return leaf.values[index]
        return leaf[index] if isinstance(leaf, Tensor) else leaf

    return optree.tree_map(one, value, namespace=NAMESPACE)


def selected_value(value: PyTree, places: Sequence[int], field: str = "") -> PyTree:
    """What a field of a State with members is for some of them, in this order."""
    indices = torch.tensor(places)

    def some(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, indices.to(tensor.device))

    def of_leaf(leaf: object) -> object:
        if isinstance(leaf, MemberValues):
            return alike_or_each([leaf.values[place] for place in places])
        return some(leaf) if isinstance(leaf, Tensor) else leaf

    if field in BATCHES:
        return PerMember(map_tensors(some, value.stacked)) if isinstance(value, PerMember) else value
    if value is None:
        return value
    if field in OF_A_BATCH:
        return map_tensors(some, value)
    return optree.tree_map(of_leaf, value, namespace=NAMESPACE)


def measured(path: str, values: list[Any]) -> Any:
    """A metric of each member: numbers are a tensor, as other values of metrics are."""
    if all(isinstance(value, int | float) for value in values):
        return torch.tensor(values, dtype=torch.float64)
    return stacked_tree(path, values, may_differ=True)


def stacked_tree(path: str, trees: list[Any], *, may_differ: bool = False) -> Any:
    """Trees of one structure as one of stacked tensors.

    Args:
        path: of the trees, for errors.
        trees: one a member.
        may_differ: whether trees of other structures are kept as they are, one a member.

    Raises:
        ArgumentError: they differ in structure, or a tensor in shape, dtype or device.
    """
    rows, specs = zip(*[optree.tree_flatten(tree, namespace=NAMESPACE) for tree in trees], strict=True)
    other = next((number for number, spec in enumerate(specs) if spec != specs[0]), None)
    if other is None:
        try:
            return optree.tree_unflatten(specs[0], [_stacked_leaf(path, column) for column in zip(*rows, strict=True)])
        except ArgumentError:
            if not may_differ:
                raise
    elif not may_differ:
        raise ArgumentError(f"members of different structure: {path} of member {other} is another tree than that of 0.")
    return MemberValues(tuple(trees))


def _stacked_leaf(path: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return alike_or_each(values)
    for number, value in enumerate(values):
        kind = (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None
        if kind != (first.shape, first.dtype, first.device):
            described = shape_and_dtype(value) if kind is not None else type(value).__name__
            raise ArgumentError(
                f"members of different structure: {path} of member {number} is {described}, and that of member 0 "
                f"{shape_and_dtype(first)}."
            )
    # Each member's part lies in memory as it lay before: kernels may sum in another order elsewhere.
    return torch.stack(list(values))


def alike_or_each(values: Sequence[Any]) -> Any:
    first = values[0]
    alike = all(value is first or (type(value) is type(first) and value == first) for value in values)
    return first if alike else MemberValues(tuple(values))


def stacked_batches(name: str, values: list[Any]) -> Any:
    """Batches, outputs or losses, of any class: the first one, with the tensors of all in it."""
    columns: list[list[Tensor]] = []
    plain: list[list[object]] = []
    for value in values:
        found = list(leaves(value, f"state.{name}"))
        columns.append([leaf for _, leaf in found if isinstance(leaf, Tensor)])
        plain.append([(path, leaf) for path, leaf in found if not isinstance(leaf, Tensor)])
    for number, (tensors, others) in enumerate(zip(columns, plain, strict=True)):
        if len(tensors) != len(columns[0]) or others != plain[0]:
            raise ArgumentError(
                f"state.{name} of member {number} holds other things than that of member 0: batches, outputs and "
                "losses of members differ in the numbers of their tensors alone."
            )
    results = iter([_stacked_leaf(f"state.{name}", column) for column in zip(*columns, strict=True)])
    return map_tensors(lambda _: next(results), values[0])
