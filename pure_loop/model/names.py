"""Mappings that are known by names, in the order of a model's names.

Kernels take lists, and pair them by position. So that no list is in another order than the next one, the mappings of a
State come in the order in which its model has the names, wherever they come from: another model of these names may
have made them in another order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from pure_loop.frozendict import FrozenDict

__all__ = ["Places", "aligned", "places", "reordered", "sorted_by"]

Places: TypeAlias = dict[str, int]

_MAPPINGS = frozenset({dict, OrderedDict, FrozenDict})
_SEQUENCES = frozenset({list, tuple, deque})


def places(*names: Iterable[str]) -> Places:
    """The place of each name, where these follow each other: parameters and buffers have no name in common."""
    return {name: place for place, name in enumerate(name for some in names for name in some)}


def sorted_by(names: tuple[str, ...], mapping: FrozenDict[str, Any]) -> FrozenDict[str, Any]:
    """A mapping of just these names in their order; one of others as it is.

    >>> sorted_by(("weight", "bias"), FrozenDict(bias=1, weight=2))
    FrozenDict({'weight': 2, 'bias': 1})
    """
    if len(mapping) != len(names) or tuple(mapping) == names or mapping.keys() != set(names):
        return mapping
    return FrozenDict((name, mapping[name]) for name in names)


def reordered(value: Any, wanted: Places, before: Places | None = None) -> Any:
    """A tree in which mappings with names alone as keys come in the wanted order; itself where none is in another one.

    Args:
        value: a tree of mappings, sequences and registered records.
        wanted: the places of the names.
        before: the places that they had where the tree was made: a mapping that was not in their order has one of its
            own, and keeps it. None: it is not known, and every mapping comes in the wanted order.

    >>> reordered({"mean": {"a": 1, "b": 2}, "latest": {"b": 3, "a": 4}}, places("ba"), places("ab"))
    {'mean': {'b': 2, 'a': 1}, 'latest': {'b': 3, 'a': 4}}
    """
    if wanted == before and list(wanted) == list(before):
        return value
    return _reordered(value, wanted, before)


def _reordered(value: Any, wanted: Places, before: Places | None) -> Any:
    kind = type(value)
    if kind in _MAPPINGS:
        items = {key: _reordered(item, wanted, before) for key, item in value.items()}
        keys = list(items)
        if len(keys) > 1 and wanted.keys() >= items.keys() and (before is None or _ascend(keys, before)):
            keys.sort(key=wanted.__getitem__)
        if keys == list(value) and all(items[key] is value[key] for key in keys):
            return value
        return kind((key, items[key]) for key in keys)
    if kind in _SEQUENCES:
        elements = [_reordered(item, wanted, before) for item in value]
        if all(result is old for result, old in zip(elements, value, strict=True)):
            return value
        return deque(elements, value.maxlen) if kind is deque else kind(elements)
    from pure_loop._internal.registry import registered  # records are rare

    record = registered(kind) if kind.__module__ != "builtins" else None
    if record is None or not record.fields:
        return value
    fields = record.take_apart(value)
    result = {name: _reordered(field, wanted, before) for name, field in fields.items()}
    return value if all(result[name] is fields[name] for name in fields) else record.put_together(result)


def _ascend(keys: list[Any], before: Places) -> bool:
    if not before.keys() >= set(keys):
        return False
    numbers = [before[key] for key in keys]
    return numbers == sorted(numbers)


def aligned(value: Any, like: Any) -> Any:
    """A tree of mappings in the order, and of the classes, of those of ``like`` with the same keys.

    >>> aligned({"b": 1, "a": {"y": 2, "x": 3}}, FrozenDict(a=FrozenDict(x=0, y=0), b=0))
    FrozenDict({'a': FrozenDict({'x': 3, 'y': 2}), 'b': 1})
    """
    kind = type(like)
    if kind in _MAPPINGS and isinstance(value, Mapping):
        if value is like or value.keys() != like.keys():
            return value
        items = {key: aligned(value[key], item) for key, item in like.items()}
        if type(value) is kind and list(value) == list(items) and all(items[key] is value[key] for key in items):
            return value
        return kind(items)
    if kind in _SEQUENCES and type(value) is kind and len(value) == len(like):
        elements = [aligned(item, reference) for item, reference in zip(value, like, strict=True)]
        if all(element is old for element, old in zip(elements, value, strict=True)):
            return value
        return deque(elements, value.maxlen) if kind is deque else kind(elements)
    return value
