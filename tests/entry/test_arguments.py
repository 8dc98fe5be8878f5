"""Checks of arguments: what they take, which of the two errors they raise, and what it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure_loop._internal.arguments import (
    check_callable,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_text,
)
from pure_loop.errors import ArgumentError, ArgumentTypeError

ANYTHING = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=2), st.none())


@given(ANYTHING, st.integers())
def test_an_integer(value: Any, least: int) -> None:
    if type(value) is int and value >= least:
        assert check_integer("n", value, least=least) is value
        return
    error = ArgumentError if type(value) is int else ArgumentTypeError
    with pytest.raises(error) as caught:
        check_integer("n", value, least=least)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"n={value!r}")
    assert f"a whole number of at least {least}" in str(caught.value)


@given(ANYTHING, st.floats(0, 9), st.floats(0, 9))
def test_a_number(value: Any, low: float, below: float) -> None:
    is_number = type(value) in (int, float)
    for interval, inside in (
        ({"least": low, "below": below}, is_number and low <= value < below),
        ({"above": low}, is_number and low < value and math.isfinite(value)),
        ({}, is_number and math.isfinite(value)),
    ):
        if inside:
            number = check_number("x", value, **interval)
            assert type(number) is float
            assert number == float(value)
            continue
        error = ArgumentError if is_number else ArgumentTypeError
        with pytest.raises(error) as caught:
            check_number("x", value, **interval)
        assert type(caught.value) is error


def test_an_int_that_no_float_holds() -> None:
    with pytest.raises(ArgumentError, match="finite"):
        check_number("x", 10**400)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: check_integer("n", 0, least=1), "n=0: give a whole number of at least 1."),
        (lambda: check_integer("n", "0"), "n='0' of type str: give a whole number."),
        (
            lambda: check_integer("n", True, where="f", least=1, example="f(n=2)"),
            "f: n must be a whole number of at least 1, got True of type bool; write f(n=2).",
        ),
        (lambda: check_number("x", 1, below=1, least=0), "x=1: give a number of at least 0 and less than 1."),
        (lambda: check_number("x", 0, above=0, where="f"), "f: x must be a finite number above 0, got 0."),
        (lambda: check_number("x", 2, below=1), "x=2: give a number less than 1."),
        (lambda: check_number("x", math.nan, wanted="seconds"), "x=nan: give seconds."),
        (lambda: check_flag("b", "no"), "b='no' of type str: write True or False."),
        (lambda: check_flag("b", 1, where="f"), "f: b must be True or False, got 1 of type int."),
        (lambda: check_text("t", ""), "t='' of type str: give a text that is not empty."),
        (lambda: check_choice("c", "x", ("a", "b", None)), 'c=\'x\': write "a", "b" or None.'),
        (lambda: check_choice("c", 1, (True, False), where="f"), "f: c must be True or False, got 1."),
        (lambda: check_callable("g", 3, "a function (x) -> y"), "g=3 of type int: give a function (x) -> y."),
    ],
)
def test_what_it_says(call: Any, says: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        call()
    assert str(caught.value) == says
