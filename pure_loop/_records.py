"""Copying frozen records fast.

A frozen class refuses assignment, and writing its slots one by one through their descriptors costs
80 ns each. A *draft* has the same memory layout and takes assignments, which the interpreter
specialises to a few nanoseconds; when it is filled, its class is set to the frozen one. ``attrs.evolve``
takes ten times as long, and a State is copied at every event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["Record", "drafter"]


class Record:
    """The base of records that have drafts: weak references live here.

    The interpreter swaps the classes of two layouts only where neither adds a place for weak references.
    """

    __slots__ = ("__weakref__",)


def drafter(cls: type, *, without: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """A function that copies a ``cls`` into a draft: assign to its fields, then set ``draft.__class__ = cls``.

    Args:
        cls: a frozen attrs class that derives from :class:`Record`, with ``weakref_slot=False``.
        without: fields that are None in the draft, whatever they are in the record.

    >>> @attrs.frozen(weakref_slot=False)
    ... class Point(Record):
    ...     x: int
    ...     y: int
    >>> draft = drafter(Point)(Point(1, 2))
    >>> draft.y = 5
    >>> draft.__class__ = Point
    >>> draft
    Point(x=1, y=5)
    """
    draft = _draft_class(cls)
    names = [field.name for field in attrs.fields(cls)]
    lines = ["def copy(record):", "    draft = new(cls)"]
    lines += [f"    draft.{name} = {'None' if name in without else f'record.{name}'}" for name in names]
    scope: dict[str, Any] = {"new": object.__new__, "cls": draft}
    exec("\n".join([*lines, "    return draft"]), scope)
    copy: Callable[[Any], Any] = scope["copy"]
    return copy


def _draft_class(cls: type) -> type:
    """A class of the same layout whose instances take assignments."""
    namespace: dict[str, Any] = {"__setattr__": object.__setattr__, "__doc__": None}
    if "__slots__" in vars(cls):
        namespace["__slots__"] = vars(cls)["__slots__"]
    return type(cls)(f"_{cls.__name__}Draft", (cls.__base__ or object,), namespace)
