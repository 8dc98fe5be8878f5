"""Copying frozen records fast.

A frozen class refuses assignment, and writing its slots one by one through their descriptors costs
80 ns each. A *draft* has the same memory layout and takes assignments, which the interpreter
specialises to a few nanoseconds; when it is filled, its class is set to the frozen one. ``attrs.evolve``
takes ten times as long, and a State is copied at every event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import attrs

__all__ = ["Record", "copier", "draft_class", "drafter"]


class Record:
    """The base of records that have drafts: weak references live here.

    The interpreter swaps the classes of two layouts only where neither adds a place for weak references.

    Attributes:
        _slots_behind: of fields that a property stands in front of, the names of their slots.
    """

    __slots__ = ("__weakref__",)

    _slots_behind: ClassVar[Mapping[str, str]] = {}


def drafter(
    cls: Any, *, without: tuple[str, ...] = (), otherwise: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """A function that copies a ``cls`` into a draft: assign to its fields, then set ``draft.__class__ = cls``.

    Args:
        cls: a frozen attrs class that derives from :class:`Record`, with ``weakref_slot=False``.
        without: fields that are None in the draft, whatever they are in the record.
        otherwise: what drafts a record of another class; None: there are none.

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
    return _written(cls, without, (), otherwise=otherwise)


def copier(cls: Any, *changed: str, without: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The same with the class set: a function that copies a ``cls``, and takes new values of the fields ``changed``.

    >>> @attrs.frozen(weakref_slot=False)
    ... class Point(Record):
    ...     x: int
    ...     y: int
    >>> copier(Point, "y")(Point(1, 2), 5)
    Point(x=1, y=5)
    """
    return _written(cls, without, changed, "    draft.__class__ = cls")


def _written(
    cls: Any,
    without: tuple[str, ...],
    changed: tuple[str, ...],
    *last: str,
    otherwise: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    slots = cls._slots_behind
    lines = [f"def copy({', '.join(('record', *changed))}):"]
    if otherwise is not None:
        lines.append("    if record.__class__ is not cls: return otherwise(record)")
    lines.append("    draft = new()")
    for field in attrs.fields(cls):
        name = field.name
        value = name if name in changed else "None" if name in without else f"record.{slots.get(name, name)}"
        lines.append(f"    draft.{name} = {value}")
    # Calling the class takes less than object.__new__ of it, which looks at what it is given.
    scope: dict[str, Any] = {"new": draft_class(cls), "cls": cls, "otherwise": otherwise}
    exec("\n".join([*lines, *last, "    return draft"]), scope)
    copy: Callable[..., Any] = scope["copy"]
    return copy


@cache
def draft_class(cls: type) -> type:
    """A class of the same layout whose instances take assignments; its ``record_class`` is ``cls``."""
    namespace: dict[str, Any] = {
        "__setattr__": object.__setattr__,
        "__init__": object.__init__,
        "__doc__": None,
        "record_class": cls,
    }
    if "__slots__" in vars(cls):
        namespace["__slots__"] = vars(cls)["__slots__"]
    return type(cls)(f"_{cls.__name__}Draft", (cls.__base__ or object,), namespace)
