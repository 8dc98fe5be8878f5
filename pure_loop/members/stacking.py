"""A State of several members taken apart into theirs, and States of one structure put together.

Tensors of the members are stacked along a leading dimension. What is no tensor is there once where it is equal, and as
:class:`pure_loop.members.record.MemberValues` where it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.reprs import shape_and_dtype
from pure_loop.data.batch import leaves, map_tensors
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.frozendict import FrozenDict
from pure_loop.members import turns
from pure_loop.members.record import Members, MemberValues, PerMember
from pure_loop.state import EXPLAINED, NOT_READY, State, with_fields
from pure_loop.time import Timestamp

S = TypeVar("S", bound=State)

# Equal for all members, or told of them by `Members`.
_ONE = frozenset(
    {
        *("model", "timestamp", "previous_timestamp", "seed", "data_seed", "ensemble", "stop", "frozen", "event"),
        *("position", "notes", "evaluator"),
    }
)
_BATCHES = frozenset({"batch", "microbatch"})
# Of a batch: of any class that a batch may have.
_OF_A_BATCH = _BATCHES | {"outputs", "loss"}


def _names(state: State) -> list[str]:
    return [field.name for field in attrs.fields(type(state)) if field.name not in _ONE]


def _read(state: State, name: str) -> Any:
    return getattr(state, state._slots_behind.get(name, name))


# One member.


def member(state: S, index: int) -> S:
    """The State of one member, which trains on alone.

    Raises:
        ArgumentError: the State has no members, or none of this number.
        ArgumentTypeError: the number is no int.
    """
    return _member(state, _checked(state, index))


def _member(state: S, index: int) -> S:
    members = _members_of(state)
    stop = members.stopped[index]
    fields: dict[str, object] = {name: member_value(_read(state, name), index, name) for name in _names(state)}
    if stop is not None:
        fields["timestamp"], fields["previous_timestamp"] = stop
    return with_fields(state, **fields, seed=members.seeds[index], ensemble=None, stop=state.stop or stop is not None)


def member_value(value: PyTree, index: int, field: str = "") -> PyTree:
    """What a field of a State with members is for one of them."""
    if field in _BATCHES:
        return map_tensors(lambda tensor: tensor[index], value.stacked) if isinstance(value, PerMember) else value
    if value is None or value is NOT_READY:
        return value
    if isinstance(value, Tensor):
        return value[index]
    if type(value) is FrozenDict and all(type(item) is Tensor for item in value.values()):
        return FrozenDict((name, tensor[index]) for name, tensor in value.items())
    if field in _OF_A_BATCH:
        return map_tensors(lambda tensor: tensor[index], value)

    def one(leaf: object) -> object:
        if isinstance(leaf, MemberValues):
            return leaf.values[index]
        return leaf[index] if isinstance(leaf, Tensor) else leaf

    return optree.tree_map(one, value, namespace=NAMESPACE)


def split(state: S) -> list[S]:
    """The States of all members, in order."""
    return [_member(state, index) for index in range(len(_members_of(state)))]


def _members_of(state: State) -> Members:
    if state.ensemble is None:
        raise ArgumentError(
            "this State is that of one model, and has no members: pl.ensemble(make_model, seeds=range(8)) in the place "
            "of fit's model trains several, and pl.stack(states) puts States of one structure together."
        )
    return state.ensemble


def _checked(state: State, index: object) -> int:
    count = len(_members_of(state))
    if isinstance(index, bool) or not hasattr(type(index), "__index__"):
        raise ArgumentTypeError(f"state.member({index!r:.60}): a member is known by its number, from 0 to {count - 1}.")
    number = int(cast("Any", index).__index__())
    if not -count <= number < count:
        raise ArgumentError(f"state.member({number}): the State has {count} members, from 0 to {count - 1}.")
    return number % count


# Some of them.


def select(state: S, indices: Sequence[int] | Tensor) -> S:
    """A State of some members, in the order of their numbers in ``indices``.

    Raises:
        ArgumentError: the State has no members, or none of such a number; or there are no numbers.
        ArgumentTypeError: a number is no int.
    """
    members = _members_of(state)
    passed: object = indices.tolist() if isinstance(indices, Tensor) else indices
    if isinstance(passed, str) or not isinstance(passed, Iterable):
        raise ArgumentTypeError(f"state.members({indices!r:.60}): write the numbers of members, state.members([0, 3]).")
    chosen = [_checked(state, index) for index in passed]
    if not chosen:
        raise ArgumentError("state.members([]): write the numbers of members, state.members([0, 3]).")
    places = torch.tensor(chosen)

    def some(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, places.to(tensor.device))

    def of_leaf(leaf: object) -> object:
        if isinstance(leaf, MemberValues):
            return _alike_or_each([leaf.values[index] for index in chosen])
        return some(leaf) if isinstance(leaf, Tensor) else leaf

    def of_field(value: Any, name: str) -> Any:
        if name in _BATCHES:
            return PerMember(map_tensors(some, value.stacked)) if isinstance(value, PerMember) else value
        if value is None or value is NOT_READY:
            return value
        if name in _OF_A_BATCH:
            return map_tensors(some, value)
        return optree.tree_map(of_leaf, value, namespace=NAMESPACE)

    stopped = tuple(members.stopped[index] for index in chosen)
    record = attrs.evolve(members, seeds=tuple(members.seeds[index] for index in chosen), stopped=stopped)
    fields = {name: of_field(_read(state, name), name) for name in _names(state)}
    return with_fields(state, **fields, ensemble=record, stop=None not in stopped)


# Put together.


def stack(states: Iterable[S]) -> S:
    """A State whose members are those of several States of one model each, in order.

    They have been trained equally long, or an algorithm has stopped those that have been trained for less. Each keeps
    its seed.

    Args:
        states: of models of one structure.

    Raises:
        ArgumentTypeError: something in it is no State.
        ArgumentError: there is none; one has members itself; or they differ in structure, time, event or frozen
            parameters: names the number of the State, and the leaf.

    >>> import torch, pure_loop as pl
    >>> states = [pl.State.create(torch.nn.Linear(2, 1), seed=seed) for seed in (3, 4)]
    >>> stacked = pl.stack(states)
    >>> stacked.members, stacked.params["weight"].shape, stacked.member(1).seed
    (2, torch.Size([2, 1, 2]), 4)
    """
    listed = list(states) if isinstance(states, Iterable) and not isinstance(states, State | Mapping) else [states]
    for number, state in enumerate(listed):
        if not isinstance(state, State):
            raise ArgumentTypeError(
                f"pl.stack: item {number} is a {type(state).__name__}, not a State: pl.stack([state_a, state_b])."
            )
        if state.ensemble is not None:
            raise ArgumentError(
                f"pl.stack: State {number} has {len(state.ensemble)} members: stack those, state.member(i)."
            )
    if not listed:
        raise ArgumentError("pl.stack([]): write States of one structure, pl.stack([state_a, state_b]).")
    return stacked(cast("list[S]", listed))


def stacked(states: Sequence[S], like: S | None = None, before: Sequence[S] = ()) -> S:
    """As :func:`stack`; what none of the States has changed since ``before`` is that of ``like``, the State with those.

    Raises:
        ArgumentError: as there.
    """
    newest = max(states, key=lambda state: state.timestamp.batch)
    for number, state in enumerate(states):
        _refuse_misfit(newest, number, state)
    if like is not None and all(state is old for state, old in zip(states, before, strict=True)):
        return like
    fields: dict[str, Any] = {}
    for name in _names(newest):
        values = [_read(state, name) for state in states]
        old = None if like is None else [_read(state, name) for state in before]
        if old is not None and all(value is kept for value, kept in zip(values, old, strict=True)):
            fields[name] = _read(like, name)  # type: ignore[arg-type]
        else:
            fields[name] = _stacked_field(name, values, None if like is None else _read(like, name), old)
    known = None if like is None else like.ensemble
    stops = [(state.timestamp, state.previous_timestamp) if state.stop else None for state in states]
    record = Members(
        tuple(state.seed for state in states),
        tuple(stops) if known is None else tuple(a or b for a, b in zip(known.stopped, stops, strict=True)),
        None if known is None else known.fallback,
    )
    seed = newest.seed if like is None else like.seed
    return with_fields(newest, **fields, ensemble=record, seed=seed, stop=None not in record.stopped)


def _refuse_misfit(first: State, number: int, state: State) -> None:
    where = f"members of different structure: member {number}"
    if type(state) is not type(first):
        raise ArgumentError(f"{where} is a {type(state).__name__}, and another one is a {type(first).__name__}.")
    if state.model is not first.model and state.model != first.model:
        raise ArgumentError(
            f"{where} has the model {state.model!r}, and another one {first.model!r}: members are of one class, with "
            "equal settings, names, shapes and dtypes. make_model may differ by seed in numbers alone."
        )
    for field in ("frozen", "event", "evaluator", "data_seed"):
        value, wanted = getattr(state, field), getattr(first, field)
        if value != wanted:
            raise ArgumentError(f"{where} has state.{field}={value!r}, and another one {wanted!r}: they are equal.")
    if not state.stop and _counts(state.timestamp) != _counts(first.timestamp):
        raise ArgumentError(
            f"{where} is at batch {state.timestamp.batch} (epoch {state.timestamp.epoch}), and another one at batch "
            f"{first.timestamp.batch} (epoch {first.timestamp.epoch}): train them equally long first."
        )


def _counts(timestamp: Timestamp) -> tuple[int, ...]:
    return timestamp.epoch, timestamp.batch, timestamp.sample, timestamp.batch_in_epoch


def _stacked_field(name: str, values: list[Any], like: Any, old: list[Any] | None) -> Any:
    first = values[0]
    if name in _BATCHES:
        return first if all(value is first for value in values) else PerMember(stacked_batches(name, values))
    if all(value is first for value in values) and (first is None or first is NOT_READY):
        return first
    if name in _OF_A_BATCH:
        return stacked_batches(name, values)
    if name == "lr_scale":  # None is 1, and one member may have a factor where another has none
        values = [torch.ones((), dtype=torch.float64) if value is None else value for value in values]
    if type(first) is FrozenDict:
        return _stacked_mapping(name, values, like, old)
    return _stacked_tree(f"state.{name}", values)


def _stacked_mapping(name: str, values: list[Any], like: Any, old: list[Any] | None) -> Any:
    """By name: what no member has changed stays."""
    keys = list(values[0])
    for number, value in enumerate(values):
        if list(value) != keys and name != "algorithm_state":
            other = sorted({*map(str, value)} ^ {*map(str, keys)})[:3]
            raise ArgumentError(
                f"members of different structure: state.{name} of member {number} and that of member 0 differ in "
                f"{other}."
            )
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for value in values for key in value):
        path = f"state.{name}[{key!r}]"
        if any(key not in value for value in values):
            raise ArgumentError(f"members of different structure: not all of them have {path}.")
        entries = [value[key] for value in values]
        unchanged = old is not None and all(
            isinstance(before, Mapping) and key in before and entry is before[key]
            for entry, before in zip(entries, old, strict=True)
        )
        if unchanged and key in like:
            result[key] = like[key]
        elif name == "metrics":
            result[key] = FrozenDict(
                {metric: measured(f"{path}[{metric!r}]", [entry[metric] for entry in entries]) for metric in entries[0]}
            )
        else:
            result[key] = _stacked_tree(path, entries, may_differ=name == "algorithm_state")
    mapping: FrozenDict[str, Any] = FrozenDict(result)
    if name in EXPLAINED:
        mapping.field = name
    return mapping


def measured(path: str, values: list[Any]) -> Any:
    """A metric of each member: numbers are a tensor, as other values of metrics are."""
    if all(isinstance(value, int | float) for value in values):
        return torch.tensor(values, dtype=torch.float64)
    return _stacked_tree(path, values, may_differ=True)


def _stacked_tree(path: str, trees: list[Any], *, may_differ: bool = False) -> Any:
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
        return _alike_or_each(values)
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


def _alike_or_each(values: Sequence[Any]) -> Any:
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


def stop_members(state: S, numbers: Iterable[int]) -> S:
    """The State in which these members have stopped, too, at its timestamp."""
    members, stop, stopping = _members_of(state), (state.timestamp, state.previous_timestamp), set(numbers)
    stopped = tuple(old or (stop if number in stopping else None) for number, old in enumerate(members.stopped))
    ensemble = attrs.evolve(members, stopped=stopped)
    return with_fields(state, ensemble=ensemble, stop=state.stop or None not in stopped)


def running(state: State) -> list[int]:
    """The numbers of the members that have not stopped."""
    return [number for number, runs in enumerate(_members_of(state).running) if runs]


def over_some(state: S, numbers: Iterable[int], function: Callable[[S], S]) -> S:
    """The State with these members as a function of the State of one gives them."""
    before = split(state)
    after = list(before)
    for number in numbers:
        with turns.turn(number):
            after[number] = function(before[number])
    return stacked(after, state, before)


def over_members(function: Callable[..., State], *, stopped: bool = False) -> Callable[..., State]:
    """A function of a State of one model, ``(state, *rest) -> state``, called for each member where there are some.

    ``stopped``: for those that have stopped, too.
    """

    def of_all(state: State, *rest: object) -> State:
        if state.ensemble is None:
            return function(state, *rest)
        before = split(state)
        after = []
        for number, one in enumerate(before):
            with turns.turn(number):
                skips = state.ensemble.stopped[number] is not None and not stopped
                after.append(one if skips else function(one, *rest))
        return stacked(after, state, before)

    return of_all
