"""Copying frozen records fast.

A frozen class refuses assignment, and writing its slots one by one through their descriptors costs
80 ns each. A *draft* has the same memory layout and takes assignments, which the interpreter
specialises to a few nanoseconds; when it is filled, its class is set to the frozen one. ``attrs.evolve``
takes ten times as long, and a State is copied at every event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import attrs

__all__ = ["Record", "copier", "set_class"]

T = TypeVar("T")


class Record:
    """The base of records that have drafts: weak references live here.

    The interpreter swaps the classes of two layouts only where neither adds a place for weak references.

    Attributes:
        _slots_behind: of fields that a property stands in front of, the names of their slots.
    """

    __slots__ = ("__weakref__",)

    _slots_behind: ClassVar[Mapping[str, str]] = {}


@cache
def copier(cls: Any, *fields: str, without: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A function that copies a ``cls``, and takes new values of these fields.

    Args:
        cls: a frozen attrs class that derives from :class:`Record`, with ``weakref_slot=False``.
        *fields: those that the function takes values of, in this order, by the names of their slots.
        without: fields that are None in the copy, whatever they are in the record.

    >>> @attrs.frozen(weakref_slot=False)
    ... class Point(Record):
    ...     x: int
    ...     y: int
    >>> copier(Point, "y")(Point(1, 2), 5)
    Point(x=1, y=5)
    """
    unchanged = [field.name for field in attrs.fields(cls) if field.name not in (*fields, *without)]
    # No field has the name of another variable of the function: a class of the user's may have a field "draft".
    lines = [
        f"def copy(record{''.join(f', new_{name}' for name in fields)}):",
        "    draft = make_draft()",
        *(f"    draft.{name} = record.{cls._slots_behind.get(name, name)}" for name in unchanged),
        *(f"    draft.{name} = None" for name in without),
        *(f"    draft.{name} = new_{name}" for name in fields),
        "    draft.__class__ = cls",
        "    return draft",
    ]
    # Calling the class takes less than object.__new__ of it, which looks at what it is given.
    scope: dict[str, Any] = {"make_draft": draft_class(cls), "cls": cls}
    exec("\n".join(lines), scope)
    copy: Callable[..., Any] = scope["copy"]
    return copy


@cache
def draft_class(cls: type) -> type:
    """A class of the same layout with instances that take assignments."""
    namespace: dict[str, Any] = {
        "__setattr__": object.__setattr__,
        "__init__": object.__init__,
    }
    if "__slots__" in vars(cls):
        namespace["__slots__"] = vars(cls)["__slots__"]
    return type(cls)(f"_{cls.__name__}Draft", (cls.__base__ or object,), namespace)


def set_class(value: object, cls: type[T]) -> T:
    """The object itself, of another class of the same layout from here on.

    It keeps what it has, such as names of parameters, hooks and modes; and so does what refers to it.
    """
    value.__class__ = cls
    return cast("T", value)
