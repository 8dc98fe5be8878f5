"""States of one structure put together, and functions of the State of one model called for each member."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import ReferenceType

import attrs
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from pure_loop._internal.arguments import check_choice
from pure_loop._internal.equality import equal
from pure_loop._internal.suggestions import teaching
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.members import turns
from pure_loop.membership import (
    BATCHES,
    OF_A_BATCH,
    Fallback,
    Members,
    PerMember,
    measured,
    own_fields,
    stacked_batches,
    stacked_tree,
)
from pure_loop.model.model import ModelDef
from pure_loop.state import EXPLAINED, NOT_READY, State, with_fields
from pure_loop.time import Timestamp

S = TypeVar("S", bound=State)


def split(state: S) -> list[S]:
    """The States of all members, in order."""
    return [state.member(index) for index in range(state.members)]


@teaching
def stack(states: Iterable[S], *, fallback: Fallback = None) -> S:
    """A State whose members are those of several States of one model each, in order.

    They have been trained equally long, or an algorithm has stopped those that have been trained for less. Each keeps
    its seed.

    Args:
        states: of models of one structure.
        fallback: None: the members are mapped; ``"loop"``: computed one after the other, as in :func:`ensemble`.

    Raises:
        ArgumentTypeError: something in it is no State.
        ArgumentError: there is none; one has members itself; another ``fallback``; or they differ in structure, time,
            event or frozen parameters: names the number of the State, and the leaf.

    >>> import torch, pure_loop as pl
    >>> states = [pl.State.create(torch.nn.Linear(2, 1), seed=seed) for seed in (3, 4)]
    >>> stacked = pl.stack(states)
    >>> stacked.members, stacked.params["weight"].shape, stacked.member(1).seed
    (2, torch.Size([2, 1, 2]), 4)
    """
    check_choice("fallback", fallback, (None, "loop"), where="pl.stack")
    passed: object = states
    if isinstance(passed, State | Mapping) or not isinstance(passed, Iterable):
        raise ArgumentTypeError(
            f"pl.stack({type(passed).__name__}): write States of one structure, pl.stack([state_a, state_b])."
        )
    listed = list(states)
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
    state = stacked(listed)
    assert state.ensemble is not None
    return with_fields(state, ensemble=attrs.evolve(state.ensemble, fallback=fallback))


def stacked(states: Sequence[S], like: S | None = None, before: Sequence[S] = ()) -> S:
    """As :func:`stack`; what none of the States has changed since ``before`` is that of ``like``, the State with those.

    Raises:
        ArgumentError: as there.
    """
    newest = max(states, key=lambda state: (not state.stop, state.timestamp.batch, state.timestamp.epoch))
    for number, state in enumerate(states):
        _refuse_misfit(newest, number, state)
    if like is not None and all(state is old for state, old in zip(states, before, strict=True)):
        return like
    fields: dict[str, Any] = {}
    rows, rows_before = [own_fields(state) for state in states], [own_fields(state) for state in before]
    of_like: dict[str, Any] = {} if like is None else own_fields(like)
    for name in rows[0]:
        values = [row[name] for row in rows]
        old = [row[name] for row in rows_before] if of_like else None
        if old is not None and all(value is kept for value, kept in zip(values, old, strict=True)):
            fields[name] = of_like[name]
        else:
            fields[name] = _stacked_field(name, values, of_like.get(name), old)
    known = None if like is None else like.ensemble
    stops = [(state.timestamp, state.previous_timestamp) if state.stop else None for state in states]
    record = Members(
        tuple(state.seed for state in states),
        tuple(stops) if known is None else tuple(a or b for a, b in zip(known.stopped, stops, strict=True)),
        None if known is None else known.fallback,
    )
    seed = newest.seed if like is None else like.seed
    data = newest.data if all(equal(state.data, newest.data) for state in states) else None
    return with_fields(newest, **fields, data=data, ensemble=record, seed=seed, stop=None not in record.stopped)


def _refuse_misfit(first: State, number: int, state: State) -> None:
    where = f"members of different structure: member {number}"
    if type(state) is not type(first):
        raise ArgumentError(f"{where} is a {type(state).__name__}, and another one is a {type(first).__name__}.")
    difference = None if state.model is first.model else _difference(state.model, first.model)
    if difference is not None:
        raise ArgumentError(
            f"{where} has {difference}: one step is traced for all, so their modules are of one class and differ in "
            "the numbers of parameters and buffers alone. Make a buffer of what else differs, or write pl.each."
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


# What torch keeps in a module: of parameters, buffers, submodules and hooks, which the structure compares.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


def _difference(one: ModelDef, other: ModelDef) -> str | None:
    """The first thing in which two structures differ, and what the other one has there; None: nothing."""
    modules, others = dict(one.skeleton.named_modules()), dict(other.skeleton.named_modules())
    for path, module in modules.items():
        twin = others.get(path)
        if twin is None or not _of_one_class(module, twin) or module.extra_repr() != twin.extra_repr():
            return f"{_shown(path, module)}, and another one {_shown(path, twin)}"
        attributes = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        for key, value in attributes.items():
            other_value = vars(twin).get(key)
            if not _alike(value, other_value):
                return f"{path or 'a model'}.{key}={value!r:.60}, and another one {other_value!r:.60}"
    return None if one == other else f"the model {one!r}, and another one {other!r}"


def _of_one_class(module: nn.Module, twin: nn.Module) -> bool:
    # A module with parametrizations has a class of its own, which torch makes for it.
    return type_before_parametrizations(module) is type_before_parametrizations(twin)


def _alike(value: Any, other: Any) -> bool:
    """Whether an attribute of a module is that of another one, but for what it holds of parameters and buffers."""
    if isinstance(value, nn.Module):
        return isinstance(other, nn.Module) and _of_one_class(value, other) and repr(value) == repr(other)
    if type(value) is not type(other) or not isinstance(value, Tensor | list | tuple | dict | ReferenceType):
        return equal(value, other)
    if isinstance(value, Tensor):
        return value.is_meta or (value.dtype is other.dtype and torch.equal(value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_alike(item, other[key]) for key, item in value.items())
    return isinstance(value, ReferenceType) or (len(value) == len(other) and all(map(_alike, value, other)))


def _shown(path: str, module: nn.Module | None) -> str:
    name = "none" if module is None else f"{type(module).__name__}({module.extra_repr()})"
    return f"{name} at {path!r}" if path else name


def _counts(timestamp: Timestamp) -> tuple[int, ...]:
    return timestamp.epoch, timestamp.batch, timestamp.sample, timestamp.batch_in_epoch


def _stacked_field(name: str, values: list[Any], like: Any, old: list[Any] | None) -> Any:
    first = values[0]
    if name in BATCHES:
        return first if all(value is first for value in values) else PerMember(stacked_batches(name, values))
    if all(value is first for value in values) and (first is None or first is NOT_READY):
        return first
    if name in OF_A_BATCH:
        return stacked_batches(name, values)
    if name == "lr_scale":  # None is 1, and one member may have a factor where another has none
        values = [torch.ones((), dtype=torch.float64) if value is None else value for value in values]
    if type(first) is FrozenDict:
        return _stacked_mapping(name, values, like, old)
    return stacked_tree(f"state.{name}", values)


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
            if any(entry.keys() != entries[0].keys() for entry in entries):
                raise ArgumentError(f"members of different structure: not all of them have the metrics of {path}.")
            result[key] = FrozenDict(
                {metric: measured(f"{path}[{metric!r}]", [entry[metric] for entry in entries]) for metric in entries[0]}
            )
        else:
            result[key] = stacked_tree(path, entries, may_differ=name == "algorithm_state")
    mapping: FrozenDict[str, Any] = FrozenDict(result)
    if name in EXPLAINED:
        mapping.field = name
    return mapping


def stop_members(state: S, numbers: Iterable[int]) -> S:
    """The State in which these members have stopped, too, at its timestamp."""
    assert state.ensemble is not None
    stop, stopping = (state.timestamp, state.previous_timestamp), set(numbers)
    stopped = tuple(old or (stop if number in stopping else None) for number, old in enumerate(state.ensemble.stopped))
    ensemble = attrs.evolve(state.ensemble, stopped=stopped)
    return with_fields(state, ensemble=ensemble, stop=state.stop or None not in stopped)


def running(state: State) -> list[int]:
    """The numbers of the members that have not stopped."""
    assert state.ensemble is not None
    return [number for number, runs in enumerate(state.ensemble.running) if runs]


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

    Of those that have stopped it is called where they would still be alone: at the events that end their last batch and
    its epoch, and at FIT_END. With ``stopped`` it is always called.
    """

    def of_all(state: State, *rest: object) -> State:
        if state.ensemble is None:
            return function(state, *rest)
        before = split(state)
        after = []
        for number, one in enumerate(before):
            stop = state.ensemble.stopped[number]
            goes_on = stop is None or (state.event not in _OF_THE_NEXT and stop[0].batch == state.timestamp.batch)
            takes_part = goes_on or stopped or state.event is Event.FIT_END
            with turns.turn(number):
                after.append(function(one, *rest) if takes_part else one)
        return stacked(after, state, before)

    return of_all


# What belongs to the batch or the epoch that follows.
_OF_THE_NEXT = frozenset(
    {
        *(Event.EPOCH_START, Event.ITERATION_START, Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER),
        *(Event.BATCH_START, Event.BEFORE_TRAIN_BATCH),
    }
)


def settled(state: S) -> S:
    """The State before a batch, which members that have stopped since the last one no longer make.

    Their last epoch has been counted since.
    """
    members, now = state.ensemble, (state.timestamp, state.previous_timestamp)
    if members is None or all(members.running):
        return state
    stops = tuple(stop and (now if stop[0].batch == state.timestamp.batch else stop) for stop in members.stopped)
    return state if stops == members.stopped else with_fields(state, ensemble=attrs.evolve(members, stopped=stops))
