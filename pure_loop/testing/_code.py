"""Values as the code that makes them: what a failure prints is to be pasted and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from pure_loop.testing.problems import PROBLEMS, Problem
from pure_loop.time import Time

__all__ = ["code"]


def code(value: Any) -> str:
    """Code that makes the value: records by the fields that are not at their default.

    >>> from pure_loop.order import Plan
    >>> code(Plan(batches=(4, 2), max_duration="1ep", microbatch_size=2))
    "Plan(batches=(4, 2), max_duration='1ep', microbatch_size=2)"
    """
    if isinstance(value, Time):
        return repr(str(value))
    if isinstance(value, Problem):
        return repr(value.name) if PROBLEMS.get(value.name) is value else f"Problem(name={value.name!r}, ...)"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{code(key)}: {code(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(code, value)) + (",)" if len(value) == 1 else ")")
    if attrs.has(type(value)):
        argument = [field for field in attrs.fields(type(value)) if not _at_default(field, value)]
        arguments = [f"{field.alias}={code(getattr(value, field.name))}" for field in argument]
        return f"{type(value).__name__}({', '.join(arguments)})"
    return repr(value)


def _at_default(field: attrs.Attribute[Any], record: Any) -> bool:
    default = field.default
    if default is attrs.NOTHING:
        return False
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()  # type: ignore[union-attr]
    value = getattr(record, field.name)
    return bool(value == default)
