"""Settings drawn from the ranges that a signature declares, and those that it has to refuse."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hypothesis import reject
from hypothesis import strategies as st

from pure_loop.errors import ArgumentError
from pure_loop.ranges import Duration, Flag, Number, OneOf, Setting, alternatives_in, settings_of
from pure_loop.schedules import linear

__all__ = ["built", "values"]

T = TypeVar("T")

_DURATIONS = tuple(f"{count}{unit}" for unit in ("ba", "ep") for count in (1, 2, 3))


def built(factory: Callable[..., T], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """What a factory makes of drawn settings.

    Drawn are those that it needs, those with typical values, of those that exclude one another one, and now and then
    all others that have a range. What it refuses all the same, because two settings don't go together, isn't drawn.

    Args:
        factory: a function with :func:`pure_loop.ranges.checked` ranges.
        fixed: strategies of further settings.

    >>> from hypothesis import find
    >>> from pure_loop.algorithms import sam
    >>> find(built(sam), lambda made: True)
    sam(rho=..., adaptive=False, gap=0.0)
    """
    settings = {name: setting for name, setting in settings_of(factory).items() if setting.range.typical != ()}
    ways = alternatives_in(settings)
    exclusive = {setting.name for way in ways for setting in way}
    common = [setting for setting in settings.values() if setting.name not in exclusive]
    always = [setting for setting in common if setting.required or setting.range.typical is not None]

    @functools.wraps(factory)
    def made(**arguments: Any) -> T:
        try:
            return factory(**arguments)
        except ArgumentError:
            reject()

    strategies = []
    for more in [always, common] if len(common) > len(always) else [always]:
        for chosen in itertools.product(*ways):
            drawn = {setting.name: values(setting) for setting in (*more, *chosen)}
            strategies.append(st.builds(made, **drawn, **fixed))
    return st.one_of(strategies)


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Values of a setting: its typical ones, or any in its range; schedules between such, where it takes one."""
    declared = setting.range
    if isinstance(declared, Number):
        numbers = st.integers(*_whole(declared)) if setting.whole else st.floats(*_real(declared))
        return numbers | st.builds(linear, numbers, numbers, st.just("3ba")) if setting.scheduled else numbers
    return st.sampled_from(declared.typical or tuple(_all(declared)))


def _all(declared: Any) -> Iterator[Any]:
    if isinstance(declared, Flag):
        yield from (False, True)
    elif isinstance(declared, OneOf):
        yield from declared.choices
    elif isinstance(declared, Duration):
        yield from _DURATIONS
    else:
        raise TypeError(f"{declared!r} says nothing of what is typical: give it typical=(...), or () for the default")


def _whole(declared: Number) -> tuple[int, int]:
    if declared.typical:
        return int(declared.typical[0]), int(declared.typical[1])
    least = 0 if math.isinf(declared.least) else int(declared.least)
    return least, min(least + 2, math.ceil(declared.below) - 1) if declared.below < math.inf else least + 2


def _real(declared: Number) -> tuple[float, float]:
    if declared.typical:
        return float(declared.typical[0]), float(declared.typical[1])
    low = max(declared.least, declared.above)
    least = 0.0 if math.isinf(low) else low
    width = 1.0 if math.isinf(declared.below) else declared.below - least
    return least + width / 100, least + width * 0.99
