"""A State that is kept never changes: programs are drawn, and what they keep is compared with a twin that copies."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

import pure_loop as pl
from tests.conftest import THOROUGH
from tests.ownership.programs import CONSUMERS, SURROUNDINGS, Keep, Program, judge, programs
from tests.ownership.wrong import wrong


@given(program=programs())
@settings(max_examples=25)
def test_what_is_kept_never_changes(program: Program) -> None:
    judge(program)


@pytest.mark.slow
@given(program=programs())
@settings(max_examples=200)
def test_what_is_kept_never_changes_in_more_programs(program: Program) -> None:
    judge(program)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@given(program=programs())
@settings(max_examples=2500, derandomize=not THOROUGH, suppress_health_check=list(HealthCheck))
def test_what_is_kept_never_changes_in_ten_thousand_steps(program: Program) -> None:
    """Of four batches or so each."""
    judge(program)


def _fails(program: Program) -> bool:
    try:
        judge(program)
    except (AssertionError, pl.errors.DonatedStateError, pl.errors.ImpurityError):
        return True
    return False


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("always in place", 25),
        pytest.param("no count of mappings", 100, marks=pytest.mark.slow),
        pytest.param("no look at tensors", 200, marks=pytest.mark.slow),
        pytest.param("no look at storages", 200, marks=pytest.mark.slow),
        pytest.param("no look at States", 1000, marks=pytest.mark.slow),
        pytest.param("the optimizer state counts as unread", 1000, marks=pytest.mark.slow),
    ],
)
def test_drawn_programs_catch_a_wrong_decision(name: str, most: int) -> None:
    drawing = settings(
        max_examples=most, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    with wrong(name):
        assert find(programs(), _fails, settings=drawing, random=random.Random(0)).keeps


# In CI's fast tier the plain surrounding has every consumer, and the others have two.
_COMBINATIONS = [
    pytest.param(
        consumer,
        surrounding,
        marks=[] if surrounding == "plain" or consumer in ("for event, state", "yield from") else pytest.mark.slow,
    )
    for consumer in CONSUMERS
    for surrounding in SURROUNDINGS
]


@pytest.mark.parametrize(("consumer", "surrounding"), _COMBINATIONS)
def test_each_consumer_may_keep(consumer: str, surrounding: str) -> None:
    keeps = (Keep(batch=2), Keep(batch=4, way="parameter: a view"), Keep(batch=3, way="a mapping of moments", left=20))
    assert judge(Program(consumer=consumer, surrounding=surrounding, keeps=keeps)).compared == 3
