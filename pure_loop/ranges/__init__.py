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

if TYPE_CHECKING:
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
    __getattr__ = _lazily(
        __name__,
        {
            "Above": "pure_loop.ranges.kinds",
            "AtLeast": "pure_loop.ranges.kinds",
            "Between": "pure_loop.ranges.kinds",
            "Duration": "pure_loop.ranges.kinds",
            "Flag": "pure_loop.ranges.kinds",
            "Index": "pure_loop.ranges.kinds",
            "Name": "pure_loop.ranges.kinds",
            "Number": "pure_loop.ranges.kinds",
            "OneOf": "pure_loop.ranges.kinds",
            "Range": "pure_loop.ranges.kinds",
            "Scheduled": "pure_loop.ranges.strengths",
            "Setting": "pure_loop.ranges.kinds",
            "Strength": "pure_loop.ranges.strengths",
            "Within": "pure_loop.ranges.kinds",
            "alternatives_in": "pure_loop.ranges.checked",
            "checked": "pure_loop.ranges.checked",
            "settings_of": "pure_loop.ranges.checked",
            "strength_at": "pure_loop.ranges.strengths",
        },
    )


def __dir__() -> list[str]:
    return __all__
