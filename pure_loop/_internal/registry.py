"""Registered classes: those that a checkpoint can name.

A file names a class, and only one that was registered here is ever made from it: nothing is imported, no constructor
and no validator runs, whatever the file says.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, overload

import attrs

from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["Kind", "named", "register", "register_subclasses", "registered"]

C = TypeVar("C", bound=type)


@attrs.frozen
class Kind:
    """How values of a class are taken apart and put together: by fields, or, of an enum, by name."""

    cls: type
    name: str
    fields: tuple[str, ...]

    def take_apart(self, value: object) -> dict[str, object]:
        return {field: getattr(value, field) for field in self.fields}

    def put_together(self, values: dict[str, object]) -> object:
        """
        Raises:
            ValueError: the class has other fields by now; one that is new needs a default.
        """
        unknown = sorted(values.keys() - set(self.fields))
        missing = [field for field in self.fields if field not in values]
        defaults = _defaults(self.cls) if missing else {}
        lacking = [field for field in missing if field not in defaults]
        if unknown or lacking:
            raise ValueError(
                f"{self.name} was saved with other fields than it has now: "
                + "; ".join(f"{what} {some[:3]}" for what, some in (("unknown", unknown), ("missing", lacking)) if some)
            )
        values = {**values, **{field: defaults[field]() for field in missing}}
        if issubclass(self.cls, tuple):
            return tuple.__new__(self.cls, [values[field] for field in self.fields])
        result = object.__new__(self.cls)
        for field, value in values.items():
            object.__setattr__(result, field, value)
        return result


_by_class: dict[type, Kind] = {}
_by_name: dict[str, Kind] = {}
# Classes of which subclasses need not be registered.
_roots: list[type] = []


def register_subclasses(cls: type) -> None:
    """Let checkpoints hold values of all subclasses of a class, as if each was registered."""
    if cls not in _roots:
        _roots.append(cls)


@overload
def register(cls: C, *, name: str | None = None) -> C: ...
@overload
def register(*, name: str | None = None) -> Callable[[C], C]: ...
def register(cls: Any = None, *, name: str | None = None) -> Any:
    """Let checkpoints hold values of a class of yours: an attrs class, a dataclass, a NamedTuple or an Enum.

    Subclasses of :class:`pure_loop.State` are registered as they are.

    Args:
        cls: the class.
        name: what files call it; by default its module and name, so give one if either may change.

    Raises:
        ArgumentTypeError: it is none of these.
        ArgumentError: another class has this name.

    >>> from typing import NamedTuple
    >>> @register
    ... class Averages(NamedTuple):
    ...     mean: float
    ...     count: int
    """
    if cls is None:
        return lambda value: register(value, name=name)
    result = name or f"{getattr(cls, '__module__', '?')}:{getattr(cls, '__qualname__', cls)}"
    namesake = _by_name.get(result)
    if namesake is not None and namesake.cls is not cls and _path(namesake.cls) != _path(cls):
        raise ArgumentError(
            f"register({cls.__name__}, name={result!r}): checkpoints call {_path(namesake.cls)} so; give another name."
        )
    kind = Kind(cls, result, tuple(_fields(cls)))
    _by_class[cls] = _by_name[result] = kind
    return cls


def registered(cls: type) -> Kind | None:
    """How values of exactly this class are taken apart; None if it can't be in a checkpoint."""
    if cls not in _by_class and issubclass(cls, tuple(_roots)):
        register(cls)
    return _by_class.get(cls)


def named(name: str) -> Kind | None:
    """The class that checkpoints call so."""
    if name not in _by_name:
        for cls in (cls for root in _roots for cls in _subclasses(root)):
            # Not the class from which attrs made the one with slots, nor a draft.
            if "__attrs_attrs__" in vars(cls):
                registered(cls)
    return _by_name.get(name)


def _subclasses(cls: Any) -> Iterable[type]:
    for item in cls.__subclasses__():
        yield item
        yield from _subclasses(item)


def _defaults(cls: Any) -> dict[str, Callable[[], object]]:
    """What makes the default of each field that has one."""
    if attrs.has(cls):
        result: dict[str, Callable[[], object]] = {}
        fields: Any = attrs.fields(cls)
        for field in fields:
            if isinstance(field.default, _FACTORY) and not field.default.takes_self:
                result[field.name] = field.default.factory
            elif field.default is not attrs.NOTHING:
                result[field.name] = partial(_same, field.default)
        return result
    if issubclass(cls, tuple):
        return {name: partial(_same, value) for name, value in cls._field_defaults.items()}
    result = {}
    for name, field in getattr(cls, "__dataclass_fields__", {}).items():
        if field.default is not dataclasses.MISSING:
            result[name] = partial(_same, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            result[name] = field.default_factory
    return result


_FACTORY: Any = attrs.Factory


def _same(value: object) -> object:
    return value


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _fields(cls: Any) -> Iterable[str]:
    if isinstance(cls, type):
        if issubclass(cls, enum.Enum):
            return ()
        if attrs.has(cls):
            return (field.name for field in attrs.fields(cls))
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            return tuple(cls._fields)
        if hasattr(cls, "__dataclass_fields__"):
            return tuple(cls.__dataclass_fields__)
    raise ArgumentTypeError(
        f"register({cls!r}): give an attrs class, a dataclass, a NamedTuple or an Enum; a value of another class goes "
        "into a checkpoint as a dict, a list or a tensor."
    )
