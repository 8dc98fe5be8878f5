"""Ranges of settings, declared where they are written: in the signature of what takes them.

::

    @checked
    def sam(rho: Annotated[float, Above(0)] = 0.05, interval: Annotated[int, AtLeast(1)] = 1) -> Algorithm: ...

:func:`checked` refuses at the call what is outside a range, and arguments that there are not, with what to write
instead. Strategies draw settings from the same declaration, tests draw what has to be refused, and docs print it. A
``bool`` and a ``Literal`` need no marker. Type checkers and ``help()`` see the plain signature. A setting that is
annotated with ``Strength`` takes a schedule, too (:mod:`pure_loop.ranges.strengths`).

May import ``time`` and what is below. Begin with ``kinds.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily
from pure_loop.ranges.checked import alternatives_in, checked, settings_of
from pure_loop.ranges.kinds import (
    Above,
    AtLeast,
    Between,
    Duration,
    Flag,
    Index,
    Name,
    Number,
    OneOf,
    Range,
    Setting,
    Within,
)
from pure_loop.ranges.strengths import Scheduled, Strength, strength_at

__all__ = [
    "Above",
    "AtLeast",
    "Between",
    "Duration",
    "Flag",
    "Index",
    "Name",
    "Number",
    "OneOf",
    "Range",
    "Scheduled",
    "Setting",
    "Strength",
    "Within",
    "alternatives_in",
    "checked",
    "settings_of",
    "strength_at",
]

if not TYPE_CHECKING:
    __getattr__ = _lazily(__name__, {})  # which says of a misspelled name what is meant


def __dir__() -> list[str]:
    return __all__
