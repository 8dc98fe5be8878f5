"""What a State says of its members, and how its fields are theirs.

Tensors of members are stacked along a leading dimension. What is no tensor is there once where it is equal, and as
:class:`MemberValues` where it differs. A batch that all share is there once; :class:`PerMember` is one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, SupportsIndex, TypeAlias, TypeVar

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.reprs import number as number_of
from pure_loop._internal.reprs import shape_and_dtype
from pure_loop.data.batch import are_alike, leaves, map_tensors
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.frozendict import FrozenDict
from pure_loop.time import Timestamp

S = TypeVar("S")
T = TypeVar("T")

# The fields of a batch: PerMember, or a batch that all share.
BATCHES = frozenset({"batch", "microbatch"})
# Of any class that a batch may have.
OF_A_BATCH = BATCHES | {"outputs", "loss"}

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
    stopped: tuple[Stop | None, ...] = attrs.field(eq=lambda stops: tuple(map(_place_of, stops)))
    fallback: Fallback = None

    def __len__(self) -> int:
        return len(self.seeds)

    def __str__(self) -> str:
        """In words.

        >>> print(Members(seeds=(3, 4), stopped=(None, (Timestamp(), Timestamp()))))
        2, of the seeds 3, 4; stopped: 1 at batch 0
        """
        seeds = [str(seed) for seed in self.seeds[:8]] + ["..."] * (len(self) > 8)
        stops = [f"{number} at batch {stop[0].batch}" for number, stop in enumerate(self.stopped) if stop is not None]
        more = f" and {len(stops) - 4} more" if len(stops) > 4 else ""
        stopped = f"; stopped: {', '.join(stops[:4])}{more}" if stops else ""
        return f"{len(self)}, of the seeds {', '.join(seeds)}{stopped}"

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


def _place_of(stop: Stop | None) -> object:
    """Where a member has stopped, without what a clock says."""
    if stop is None:
        return None
    return [(t.epoch, t.batch, t.sample, t.token, t.iteration, t.batch_in_epoch) for t in stop]


class MemberCount(int, Generic[S]):
    """``state.members``: how many members a State has; called with their numbers, it gives a State of those alone.

    Iterated over, it gives the State of each.
    """

    _state: Any
    _select: Callable[[Any], S]

    def __new__(cls, state: Any, select: Callable[[Any], S]) -> MemberCount[S]:
        result = super().__new__(cls, len(state.ensemble or ()))
        result._state, result._select = state, select
        return result

    def __call__(self, indices: Sequence[int] | Tensor = ()) -> S:
        return self._select(indices)

    # No __len__ or __getitem__: torch.tensor and NumPy would take the number for a sequence of States.
    def __iter__(self) -> Iterator[S]:
        return map(self._state.member, range(self))

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


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

# The fields that are equal for all members, or told of them by `ensemble`.
_OF_ALL = frozenset(
    {
        *("model", "timestamp", "previous_timestamp", "seed", "data_seed", "ensemble", "stop", "frozen", "event"),
        *("data", "position", "notes", "evaluator"),
    }
)


def own_fields(state: Any) -> dict[str, Any]:
    """The fields of a State, by the names of slots, that its members have of their own."""
    names = [field.name for field in attrs.fields(type(state)) if field.name not in _OF_ALL]
    return {name: field_of(state, name) for name in names}


def field_of(state: Any, name: str) -> Any:
    """A field of a State; that it was read is not noted on it: for code that keeps no reference, or counts its own."""
    return getattr(state, state._slots_behind.get(name, name))


def fields_of_member(state: Any, index: object) -> dict[str, Any]:
    """Those fields of a State with members in which one of them differs, for ``state.member``."""
    number, members = _number_of(state, index, "state.member({})"), _members_of(state)
    fields = {name: member_value(value, number, name) for name, value in own_fields(state).items()}
    stop = members.stopped[number]
    if stop is not None and stop[0].batch != state.timestamp.batch:  # else its last epoch may have been counted
        fields["timestamp"], fields["previous_timestamp"] = stop
    return fields | {"seed": members.seeds[number], "ensemble": None, "stop": state.stop or stop is not None}


def fields_of_members(state: Any, indices: Sequence[int] | Tensor) -> dict[str, Any]:
    """Those fields of a State with members that are others of some of them, for ``state.members``."""
    passed: object = indices.tolist() if isinstance(indices, Tensor) else indices
    if isinstance(passed, str) or not isinstance(passed, Iterable):
        raise ArgumentTypeError(f"state.members({passed!r:.60}): write the numbers of members, state.members([0, 3]).")
    chosen = [_number_of(state, index, "state.members([{}])") for index in passed]
    if not chosen:
        raise ArgumentError("state.members([]): write the numbers of members, state.members([0, 3]).")
    members = _members_of(state)
    stopped = tuple(members.stopped[number] for number in chosen)
    record = attrs.evolve(members, seeds=tuple(members.seeds[number] for number in chosen), stopped=stopped)
    fields = {name: selected_value(value, chosen, name) for name, value in own_fields(state).items()}
    return fields | {"ensemble": record, "stop": None not in stopped}


def _members_of(state: Any) -> Members:
    members: Members | None = state.ensemble
    if members is None:
        raise ArgumentError(
            "this State is that of one model, and has no members: pl.ensemble(make_model, seeds=range(8)) in the place "
            "of fit's model trains several, and pl.stack(states) puts States of one structure together."
        )
    return members


def _number_of(state: Any, index: object, call: str) -> int:
    count, written = len(_members_of(state)), call.format(f"{index!r:.60}")
    if isinstance(index, bool) or not isinstance(index, SupportsIndex):
        raise ArgumentTypeError(f"{written}: a member is known by its number, from 0 to {count - 1}.")
    number = index.__index__()
    if not -count <= number < count:
        raise ArgumentError(f"{written}: the State has {count} members, from 0 to {count - 1}.")
    return number % count


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


def first_nonfinite(batches: Tensor) -> tuple[int, str] | None:
    """The first batch with a number that was not finite, and of which members, in words; None: there is none.

    Args:
        batches: that of the State, or of each of its members, -1 if none; int64, shape () or (members,).

    >>> first_nonfinite(torch.tensor(-1)), first_nonfinite(torch.tensor(4)), first_nonfinite(torch.tensor([-1, 7, 7]))
    (None, (4, ''), (7, ' of members 1, 2'))
    """
    listed = [number_of(item) for item in batches.reshape(-1)]
    batch = min((item for item in listed if isinstance(item, int) and item >= 0), default=None)
    if batch is None:
        return None
    places = [str(place) for place, item in enumerate(listed) if item == batch]
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    members = f" of {'members' if len(places) > 1 else 'member'} {', '.join(places[:3])}{more}"
    return batch, members if batches.ndim else ""
