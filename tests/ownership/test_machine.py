"""A State that is kept never changes: programs are drawn, and what they keep is compared with a twin that copies."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, find, given, settings

import pure_loop as pl
from pure_loop import Event
from tests.ownership.judge import Keep
from tests.ownership.programs import CONSUMERS, Program, judge, programs
from tests.ownership.wrong import WRONG, wrong
from tests.support.tiers import examples

# Of what they keep themselves they read the numbers.
_READ_THE_PAST = {"a deque", "list", "swapped"}
_TRIES = Program(algorithms=("tries", "begins"), options={"microbatch_size": 2}, large=True)


def _judged(program: Program) -> None:
    """With ``donate=True`` what is kept has its numbers, or says that it has none."""
    judge(program)
    returns = any(name.startswith("returns") for name in program.algorithms)
    if program.consumer not in _READ_THE_PAST and not returns and not program.forks:
        judge(program, donate=True)


@example(program=_TRIES)
@given(program=programs())
@settings(max_examples=20)
def test_what_is_kept_never_changes(program: Program) -> None:
    _judged(program)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(program=programs())
@examples(100, 2500)
def test_what_is_kept_never_changes_in_more_programs(program: Program) -> None:
    """Rare combinations, which are not drawn in the fast tier."""
    _judged(program)


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_each_consumer_may_keep_and_its_last_state_is_whole(consumer: str) -> None:
    keeps: list[dict[str, Any]] = [{}, {"batch": 4, "way": "parameter: a view"}, {"event": Event.FIT_END, "batch": 6}]
    keeps.append({"batch": 3, "way": "a mapping of moments", "left": 20})
    assert judge(Program(consumer=consumer, keeps=tuple(Keep(**each) for each in keeps))).compared == 5


def _fails(program: Program) -> bool:
    try:
        judge(program)
    except (AssertionError, pl.errors.DonatedStateError, pl.errors.ImpurityError):
        return True
    return False


# The others show in programs too rare to be drawn; test_kept.py has one for each.
RARE = {"no look at the script's State", "each variable is replaced"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WRONG if name not in RARE])
def test_drawn_programs_catch_a_wrong_decision(name: str) -> None:
    """That programs are drawn from the right distribution: up to a thousand are tried."""
    drawing = settings(
        max_examples=1000, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    with wrong(name):
        assert find(programs(), _fails, settings=drawing, random=random.Random(0)).keeps
