"""Checks of arguments: what they take, which of the two errors they raise, and what it says."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure_loop._internal import arguments as checks
from pure_loop.errors import ArgumentError, ArgumentTypeError
from tests.support.tiers import examples

ANYTHING = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=2), st.none(), st.just(10**400))


@given(ANYTHING, st.integers(), st.floats(0, 9), st.floats(0, 9))
@examples(60, 1000)
def test_integers_and_numbers_within_their_bounds(value: Any, least: int, low: float, below: float) -> None:
    is_number = type(value) in (int, float)
    finite = is_number and value != 10**400 and math.isfinite(value)
    for check, bounds, right_type, inside in (
        (checks.check_integer, {"least": least}, type(value) is int, type(value) is int and value >= least),
        (checks.check_number, {"least": low, "below": below}, is_number, is_number and low <= value < below),
        (checks.check_number, {"above": low}, is_number, finite and low < value),
        (checks.check_number, {}, is_number, finite),
    ):
        if inside:
            checked = check("n", value, **bounds)
            assert checked == value
            assert type(checked) is (int if check is checks.check_integer else float)
            continue
        with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
            check("n", value, **bounds)
        assert type(caught.value) is (ArgumentError if right_type else ArgumentTypeError)
        assert str(caught.value).startswith(f"n={value!r}"[:40])


SAYS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("integer", ("n", "0"), {}, "n='0' of type str: give a whole number, such as n=0."),
    ("integer", ("n", Fraction(5, 2)), {}, "n=Fraction(5, 2) of type Fraction: give a whole number."),
    ("integer", ("n", Fraction(4, 2)), {}, "give a whole number, such as n=int(Fraction(2, 1))."),
    ("integer", ("n", "0"), {"least": 1}, "n='0' of type str: give a whole number of at least 1."),
    (
        "integer",
        ("n", True),
        {"least": 1, "where": "f", "example": "f(n=2)"},
        "got True of type bool; write f(n=2).",
    ),
    ("number", ("x", 1), {"below": 1, "least": 0}, "x=1: give a number of at least 0 and less than 1."),
    ("number", ("x", 0), {"above": 0, "where": "f"}, "f: x must be a finite number above 0, got 0."),
    ("number", ("x", math.nan), {"wanted": "seconds"}, "x=nan: give seconds."),
    ("flag", ("b", "no"), {}, "b='no' of type str: write True or False."),
    ("text", ("t", ""), {}, "t='' of type str: give a text that is not empty."),
    ("choice", ("c", "x", ("a", "b", None)), {}, 'c=\'x\': write "a", "b" or None.'),
    ("choice", ("c", 1, (True, False)), {"where": "f"}, "f: c must be True or False, got 1."),
    ("callable", ("g", 3, "a function (x) -> y"), {}, "g=3 of type int: give a function (x) -> y."),
]


def test_what_they_say() -> None:
    for kind, values, named, says in SAYS:
        with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
            getattr(checks, f"check_{kind}")(*values, **named)
        assert str(caught.value).endswith(says)
