"""What CI tries of a test, in its fast or its slow tier, and what the thorough tier does."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings

from tests.conftest import THOROUGH

__all__ = ["examples", "pairwise", "tiers"]


def examples(fast: int, thorough: int) -> settings:
    """How many examples of a property."""
    return settings(max_examples=thorough if THOROUGH else fast)


def tiers(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """The values as parameters of a test: CI tries those in ``fast``, the thorough tier all.

    A tuple has a value for each of several arguments.
    """
    return [
        each
        if each in fast
        else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.thorough)
        for each in values
    ]


def pairwise(*arguments: Mapping[str, Any] | Collection[Any]) -> list[Any]:
    """The combinations of values as parameters of a test: CI tries so many that each two values meet, and no more.

    ``arguments`` are the values that each argument of the test may have, or these by what they are called.
    """
    called = [each if isinstance(each, Mapping) else {str(value): value for value in each} for each in arguments]
    combinations = list(itertools.product(*called))
    missing = {pair for each in combinations for pair in _pairs(each)}
    found = set()
    while missing:
        best = max(combinations, key=lambda each: len(missing & _pairs(each)))
        found.add(best)
        missing -= _pairs(best)
    return [
        pytest.param(
            *[values[name] for values, name in zip(called, each, strict=True)],
            id="-".join(each),
            marks=[] if each in found else pytest.mark.thorough,
        )
        for each in combinations
    ]


def _pairs(combination: tuple[str, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(combination), 2))
