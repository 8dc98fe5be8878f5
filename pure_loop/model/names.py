"""Mappings that are known by names, in the order of a model's names.

Kernels take lists, and pair them by position. So that no list is in another order than the next one, the mappings of a
State come in the order in which its model has the names, wherever they come from: another model of these names may
have made them in another order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import attrs

from pure_loop.frozendict import FrozenDict

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
    return _of_record(value, lambda field, _: _reordered(field, wanted, before))


def _of_record(value: Any, change: Callable[[Any, Any], Any], like: Any = None) -> Any:
    """A registered record with changed fields; anything else, and one without a change, itself.

    Args:
        value: anything.
        change: of a field and that of ``like``, where this is a record of the same class, else None.
        like: another record.
    """
    from pure_loop._internal.registry import registered  # records are rare

    record = registered(type(value)) if type(value).__module__ != "builtins" else None
    if record is None or not record.fields:
        return value
    fields = record.take_apart(value)
    likes = record.take_apart(like) if type(like) is type(value) else {}
    result = {name: change(field, likes.get(name)) for name, field in fields.items()}
    return value if all(result[name] is fields[name] for name in fields) else record.put_together(result)


def _ascend(keys: list[Any], before: Places) -> bool:
    if not before.keys() >= set(keys):
        return False
    numbers = [before[key] for key in keys]
    return numbers == sorted(numbers)


def renamed(value: Any, names: Mapping[str, str | None]) -> Any:
    """A tree in which the keys of mappings that are names have changed; itself where none does.

    A mapping is known by names if it has no other keys, and so is a set or a list of texts.

    Args:
        value: a tree of mappings, sequences, sets and registered records.
        names: all names, and what has become of each; None: it is left out.

    >>> renamed({"step": 3, "mean": {"a": 1, "b": 2, "c": 3}}, {"a": "x", "b": None, "c": "c"})
    {'step': 3, 'mean': {'x': 1, 'c': 3}}
    """
    kind = type(value)
    if kind in _MAPPINGS:
        items = {key: renamed(item, names) for key, item in value.items()}
        if items and names.keys() >= items.keys():
            items = {new: items[key] for key in items if (new := names[key]) is not None}
        same = list(items) == list(value) and all(items[key] is value[key] for key in items)
        return value if same else kind(items)
    if kind in _SEQUENCES or kind in (set, frozenset):
        elements = list(value)
        if elements and all(type(item) is str and item in names for item in elements):
            result: list[Any] = [new for item in elements if (new := names[item]) is not None]
        else:
            result = [renamed(item, names) for item in elements]
        if len(result) == len(elements) and all(new is old for new, old in zip(result, elements, strict=True)):
            return value
        return deque(result, value.maxlen) if kind is deque else kind(result)
    return _of_record(value, lambda field, _: renamed(field, names))


def completed(
    value: Any, wanted: Any, names: Collection[str], adapt: Callable[[Any, Any], Any] = lambda before, after: after
) -> Any:
    """A tree with those entries of ``wanted`` that its mappings lack, of these names alone; itself where none is.

    Args:
        value: a tree of mappings, sequences and registered records.
        wanted: a tree of the same structure.
        names: of the entries.
        adapt: of each mapping that changes, before and after, what stands for it.

    >>> completed({"step": 3, "mean": {"a": 1}}, {"step": 0, "mean": {"a": 0, "b": 0, "c": 0}}, {"b"})
    {'step': 3, 'mean': {'a': 1, 'b': 0}}
    """
    kind = type(value)
    if kind in _MAPPINGS and isinstance(wanted, Mapping):
        items = {key: completed(item, wanted.get(key), names, adapt) for key, item in value.items()}
        items |= {key: item for key, item in wanted.items() if key not in items and key in names}
        same = len(items) == len(value) and all(items[key] is value[key] for key in value)
        return value if same else adapt(value, kind(items))
    if kind in _SEQUENCES and type(wanted) is kind and len(value) == len(wanted):
        elements = [completed(item, like, names, adapt) for item, like in zip(value, wanted, strict=True)]
        same = all(element is old for element, old in zip(elements, value, strict=True))
        return value if same else deque(elements, value.maxlen) if kind is deque else kind(elements)
    return _of_record(value, lambda field, like: completed(field, like, names, adapt), wanted)


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


@attrs.frozen(kw_only=True)
class Note:
    """A change of the names of parameters and buffers: by an algorithm at INIT, or when a file was loaded.

    Attributes:
        source: the name of the algorithm, or of the file.
        migrated: whether a file was loaded, ``pl.load(path, model=..., rename=..., exclude=...)``.
        batch: how many batches were finished.
        renamed: pairs of the old and the new name.
        added: names that the model had and the file had not, or that were excluded: they began with the values of the
            model, without optimizer state. Of an algorithm those that it made, or made in another shape.
        removed: names that are gone.
        begun_anew: names of the algorithms whose memory was of what was excluded, and begins anew.

    >>> print(Note(source="ep3.safetensors", migrated=True, batch=12, renamed=(("a.scale", "a.gain"),), removed=("b",)))
    loaded from ep3.safetensors at batch 12: renamed a.scale to a.gain; removed b
    """

    source: str
    migrated: bool
    batch: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    begun_anew: tuple[str, ...] = ()

    def __str__(self) -> str:
        renamed = [f"{old} to {name}" for old, name in self.renamed]
        what = (
            ("renamed", renamed),
            ("added", self.added),
            ("removed", self.removed),
            ("algorithms that begin anew:", self.begun_anew),
        )
        done = "; ".join(f"{verb} {', '.join(names)}" for verb, names in what if names)
        where = f"loaded from {self.source}" if self.migrated else f"changed by {self.source}"
        return f"{where} at batch {self.batch}: {done}"

    @property
    def is_valid(self) -> bool:
        """Whether it has the types of a note: one that a file has may be anything."""
        lists = (self.added, self.removed, self.begun_anew)
        names = [name for some in lists for name in (some if type(some) is tuple else (None,))]
        pairs = self.renamed if type(self.renamed) is tuple else (None,)
        if not all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
            return False
        texts = (self.source, *names, *(name for pair in self.renamed for name in pair))
        return all(type(text) is str for text in texts) and type(self.migrated) is bool and type(self.batch) is int
