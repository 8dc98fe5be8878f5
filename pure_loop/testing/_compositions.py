"""Compositions of the library's own algorithms, with settings that are drawn too."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from pure_loop import algorithms as library
from pure_loop._internal.arguments import check_integer
from pure_loop.algorithm import Algorithm, Composition, compose
from pure_loop.errors import ArgumentError
from pure_loop.metrics._classes import class_axes
from pure_loop.testing._arguments import check_choices, check_range
from pure_loop.testing._settings import built
from pure_loop.testing.problems import Problem, as_problem

__all__ = ["ALGORITHMS", "algorithms"]


def _factories() -> dict[str, Callable[..., Algorithm]]:
    """The library's algorithms by their names, those that serve any problem first."""
    names = [name for name in library.__all__ if getattr(library, name).__module__ == f"{library.__name__}.{name}"]
    return {name: getattr(library, name) for name in sorted(names, key=lambda name: _needs(name) or "")}


def _needs(name: str) -> str | None:
    """What an algorithm needs of a problem, as its module says, such as classes or attention; None: nothing."""
    needed: str | None = getattr(sys.modules[f"{library.__name__}.{name}"], "SERVES", None)
    return needed


def _expected_failures(name: str) -> dict[str, str]:
    """The laws that an algorithm can't keep, as its module says, with the reasons."""
    failures: dict[str, str] = getattr(sys.modules[f"{library.__name__}.{name}"], "EXPECTED_FAILURES", {})
    return failures


ALGORITHMS = _factories()
"""The library's algorithms by their names, those that serve any problem first."""

# Drawn only where they are named: those that make another model of it, as twice there would be nothing to change, and
# those that can't keep each law.
_ONLY_NAMED = frozenset(
    name for name in ALGORITHMS if _needs(name) not in (None, "classes") or _expected_failures(name)
)


def algorithms(
    *,
    problem: Problem | str | None = None,
    among: Sequence[str] | None = None,
    min_size: int = 0,
    max_size: int = 3,
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
    where = "algorithms"
    least = check_integer("min_size", min_size, where=where, least=0, example="algorithms(min_size=1)")
    most = check_integer("max_size", max_size, where=where, least=0, example="algorithms(max_size=3)")
    check_range(where, "min_size", least, "max_size", most)
    serving = _serving(None if problem is None else as_problem(problem))
    if among is None:
        return _algorithms(tuple(name for name in serving if name not in _ONLY_NAMED), least, most)
    chosen = check_choices(where, "among", among, ALGORITHMS)
    if all(map(_claims, chosen)) and least > len(set().union(*map(_claims, chosen))):
        raise ArgumentError(f"algorithms: min_size={least}, and those in among claim the same: one of them a run.")
    for name in chosen:
        # Without a problem, any name that is passed is right.
        if problem is not None and name not in serving:
            raise ArgumentError(
                f"algorithms: among holds {name!r}, which can't serve {as_problem(problem)!r}; there are "
                f"{', '.join(map(repr, serving))}."
            )
    return _algorithms(chosen, least, most)


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
    claimed: frozenset[str] = getattr(sys.modules[f"{library.__name__}.{name}"], "CLAIMS", frozenset())
    return claimed


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
