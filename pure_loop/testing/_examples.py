"""The examples of a check: of the cases that Hypothesis draws, few that differ much, which all laws share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import cast

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from pure_loop.event import Event
from pure_loop.order import Plan, expected
from pure_loop.testing.problems import Problem
from pure_loop.time import Time

DRAWN = 6
"""How many cases are drawn for each that a check chooses."""

_START = 100  # that a run costs apart from its events, in events
_COUNTED = (Event.BATCH_END, Event.EVAL_BEFORE_ALL)  # an evaluation after which training goes on is one of two


def repeatable(max_examples: int, *phases: Phase) -> hypothesis.settings:
    """Settings with which Hypothesis draws equal cases in every run, below ``hypothesis.seed(0)``."""
    # A fixed seed and no database: a report is the same in every run, and the code in a failure reproduces it. With
    # derandomize=True, other cases would be drawn after every change to the function that takes them.
    return hypothesis.settings(
        max_examples=max_examples,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


def drawn_from(cases: SearchStrategy[object], number: int) -> list[object]:
    """Cases that Hypothesis draws, of which that many are to be chosen.

    >>> from hypothesis import strategies as st
    >>> sorted(drawn_from(st.integers(1, 3), 3))
    [1, 2, 3]
    """
    drawn: list[object] = []

    @hypothesis.seed(0)
    @repeatable(DRAWN * number, Phase.generate)
    @hypothesis.given(cases)
    def draw(case: object) -> None:
        drawn.append(case)

    draw()
    return drawn


def chosen_from(drawn: Sequence[object], number: int) -> list[object]:
    """That many of these cases, in the order in which they are tried.

    Each is of a problem that has the fewest examples so far, and of those the one with the most pairs of values that
    no other example has, an evaluator and a loader without a length, say, for the number of its events. Ten of them
    show more, in a third of the time, than twenty as they are drawn, of which many are alike.

    >>> chosen_from([(1, 2), (1, 2), (1,)], 2)
    [(1, 2), (1,)]
    """
    runs = [expected(plan) if isinstance(plan := getattr(case, "plan", None), Plan) else [] for case in drawn]
    traits = [
        {*_traits(case), *((each, min(run.count(each), 2)) for each in _COUNTED)}
        for case, run in zip(drawn, runs, strict=True)
    ]
    pairs = [frozenset(combinations(sorted(each, key=repr), 2)) for each in traits]
    chosen: list[int] = []
    covered: set[object] = set()
    problems: Counter[object] = Counter()
    for _ in range(min(number, len(drawn))):
        # Of equals the first, which is the simplest: Hypothesis begins with it.
        best = max(
            (index for index in range(len(drawn)) if index not in chosen),
            key=lambda index: (
                -problems[_problem(drawn[index])],
                len(pairs[index] - covered) / (_START + len(runs[index])),
                -index,
            ),
        )
        chosen.append(best)
        covered |= pairs[best]
        problems[_problem(drawn[best])] += 1
    return [drawn[index] for index in chosen]


def _problem(case: object) -> object:
    return getattr(getattr(case, "problem", None), "name", None)


def _traits(value: object, name: str = "") -> Iterator[tuple[object, ...]]:
    """What distinguishes a case: names, units, and whether there are none, one or several of a kind."""
    if isinstance(value, Problem):
        yield name, value.name
    elif isinstance(value, Time):
        yield name, value.unit
    elif attrs.has(type(value)):
        for field in attrs.fields(cast("type[attrs.AttrsInstance]", type(value))):
            yield from _traits(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, Mapping):
        yield name, min(len(value), 2)
        for item in value.values():
            yield from _traits(item, name)
    elif isinstance(value, tuple):
        yield name, min(len(value), 2), len(set(value)) > 1
    else:
        yield name, min(value, 2) if isinstance(value, int | float) and not isinstance(value, bool) else value
