"""Compositions of the library's own algorithms, with settings drawn from the ranges that signatures declare."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import torch
from hypothesis import reject
from hypothesis import strategies as st

from pure_loop import algorithms as library
from pure_loop.algorithm import Algorithm, Composition, compose
from pure_loop.errors import ArgumentError
from pure_loop.metrics._classes import class_axes
from pure_loop.ranges import AtLeast, Duration, Flag, Number, OneOf, Setting, alternatives_in, checked, settings_of
from pure_loop.schedules import linear
from pure_loop.testing._plans import check_choices, check_range
from pure_loop.testing.problems import Problem, as_problem

T = TypeVar("T")

_DURATIONS = tuple(f"{count}{unit}" for unit in ("ba", "ep") for count in (1, 2, 3))


def built(factory: Callable[..., T], **fixed: st.SearchStrategy[object]) -> st.SearchStrategy[T]:
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
    def made(**arguments: object) -> T:
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


def _all(declared: object) -> Iterator[object]:
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


def _factories() -> dict[str, Callable[..., Algorithm]]:
    """The library's algorithms by their names, those that serve any problem first."""
    names = [name for name in library.__all__ if getattr(library, name).__module__ == f"{library.__name__}.{name}"]
    return {name: getattr(library, name) for name in sorted(names, key=lambda name: _needs(name) or "")}


def _declared(name: str, variable: str, default: T) -> T:
    """What the module of an algorithm says in a variable."""
    value: T = getattr(sys.modules[f"{library.__name__}.{name}"], variable, default)
    return value


def _needs(name: str) -> str | None:
    """What an algorithm needs of a problem, as its module says, such as classes or attention; None: nothing."""
    return _declared(name, "SERVES", None)


_FACTORIES = _factories()
ALGORITHMS = {name: make for name, make in _FACTORIES.items() if _needs(name) != "members"}
"""The library's algorithms by their names, those that serve any problem first, without those in ACROSS_MEMBERS."""

ACROSS_MEMBERS = {name: make for name, make in _FACTORIES.items() if name not in ALGORITHMS}
"""Those that compare the members of an ensemble, and so train no model alone."""

# Drawn only where they are named: those that make another model of it, as twice there would be nothing to change, and
# those that can't keep each law.
_ONLY_NAMED = frozenset(
    name for name in ALGORITHMS if _needs(name) not in (None, "classes") or _declared(name, "EXPECTED_FAILURES", {})
)


@checked
def algorithms(
    *,
    problem: Problem | str | None = None,
    among: Sequence[str] | None = None,
    min_size: Annotated[int, AtLeast(0)] = 0,
    max_size: Annotated[int, AtLeast(0)] = 3,
) -> st.SearchStrategy[Composition]:
    """Compositions of the library's own algorithms, in any order, some of them twice, with settings of all kinds.

    They shrink to ``compose()``, which does nothing.

    Args:
        problem: what they are to train: label smoothing comes in where targets are classes. None: any problem.
        among: their names, such as ``["ema", "sam"]``. None: all that serve the problem, but those that need images or
            tokens, most of which make another model of it (BlurPool), and those that can't keep each law (mixup): these
            are drawn only where they are named.
        min_size, max_size: how many; no two that claim the same.

    Raises:
        ArgumentError: a name that is not known, an algorithm that can't serve the problem, or a range without a number.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> find(algorithms(), lambda drawn: any(member.name == "sam" for member in drawn.members))
    compose(sam(...))
    """
    check_range("algorithms", "min_size", min_size, "max_size", max_size)
    serving = _serving(None if problem is None else as_problem(problem))
    if among is None:
        return _algorithms(tuple(name for name in serving if name not in _ONLY_NAMED), min_size, max_size)
    chosen = check_choices("algorithms", "among", among, ALGORITHMS)
    if all(map(_claims, chosen)) and min_size > len(set().union(*map(_claims, chosen))):
        raise ArgumentError(f"algorithms: min_size={min_size}, and those in among claim the same: one of them a run.")
    for name in chosen:
        # Without a problem, any name that is passed is right.
        if problem is not None and name not in serving:
            raise ArgumentError(
                f"algorithms: among holds {name!r}, which can't serve {as_problem(problem)!r}; there are "
                f"{', '.join(map(repr, serving))}."
            )
    return _algorithms(chosen, min_size, max_size)


@functools.cache
def _serving(problem: Problem | None) -> tuple[str, ...]:
    """The names of the algorithms that can train a problem; None: any."""
    if problem is None:
        return tuple(name for name in ALGORITHMS if _needs(name) is None)
    model = problem.model(0)
    (batch,) = problem.batches([2], seed=0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = model.eval()(batch[0])
    has: dict[str | None, bool] = {None: True, "classes": 1 in class_axes(outputs, batch), "images": problem.images}
    has["tokens"] = isinstance(batch[0], torch.Tensor) and not batch[0].is_floating_point()
    # Layers that an algorithm needs it looks for itself; it is drawn only where it is named.
    return tuple(name for name in ALGORITHMS if has.get(_needs(name), True))


# Strategies are kept: making them takes much longer than drawing from them.
@functools.cache
def _algorithms(names: tuple[str, ...], min_size: int, max_size: int) -> st.SearchStrategy[Composition]:
    drawn = st.lists(st.sampled_from(names), min_size=min_size, max_size=max_size).map(tuple)
    return (drawn.filter(_are_compatible) if any(map(_claims, names)) else drawn).flatmap(_composed)


def _claims(name: str) -> frozenset[str]:
    """What an algorithm of the library claims, as its module says."""
    return _declared(name, "CLAIMS", frozenset())


def _are_compatible(names: Sequence[str]) -> bool:
    """Whether no two of these algorithms claim the same."""
    claimed = [claim for name in names for claim in _claims(name)]
    return len(set(claimed)) == len(claimed)


@functools.cache
def _composed(names: tuple[str, ...]) -> st.SearchStrategy[Composition]:
    members = []
    for position, name in enumerate(names):
        before = names[:position].count(name)
        members.append(built(ALGORITHMS[name], **({"name": st.just(f"{name}_{before + 1}")} if before else {})))
    return st.builds(compose, *members)
