"""Ranges that are declared in a signature: what they refuse, and that the signature stays plain."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.ranges import (
    Above,
    AtLeast,
    Between,
    Duration,
    Flag,
    Name,
    Number,
    OneOf,
    Within,
    checked,
    settings_of,
)
from pure_loop.testing._compositions import built, values
from tests.support.tiers import examples


@checked
def method(
    rate: Annotated[float, Above(0)],
    share: Annotated[float | None, Between(0, 1, one_of="decay")] = None,
    life: Annotated[str | None, Duration(one_of="decay", example='method(0.1, life="3ba")')] = None,
    *,
    count: Annotated[int, AtLeast(1)] = 2,
    kind: Literal["a", "b"] = "a",
    flag: bool = False,
    whole: Annotated[int | None, Number()] = None,
    name: Annotated[str, Name()] = "method",
) -> dict[str, Any]:
    """Gives back its arguments."""
    return locals()


SETTINGS = settings_of(method)
GIVEN = {"rate": 0.5, "share": 0.5}


def test_all_kinds_of_declarations_are_seen() -> None:
    assert {name: setting.in_words for name, setting in SETTINGS.items()} == {
        "rate": "number above 0",
        "share": "number at least 0 and less than 1, or None",
        "life": 'time above 0, such as `"100ba"`, or None',
        "count": "whole number at least 1",
        "kind": '`"a"`, `"b"`',
        "flag": "`True`, `False`",
        "whole": "whole number, or None",
        "name": "text",
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_outside_is_refused_by_its_name(name: str) -> None:
    for value in SETTINGS[name].outside:
        others = {"rate": 0.5} if name == "life" else GIVEN
        with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match=f"{name}.*{type(value).__name__}|{name}"):
            method(**{**others, name: value})  # type: ignore[arg-type]


@examples(30, 300)
@given(data=st.data())
def test_what_is_inside_is_taken(data: st.DataObject) -> None:
    for name in SETTINGS.keys() - {"share", "life", "name"}:
        value = data.draw(values(SETTINGS[name]))
        assert method(**{**GIVEN, name: value})[name] == value  # type: ignore[arg-type]


def test_numbers_arrive_as_floats_and_amounts_as_times() -> None:
    taken = method(1, life="3ba")
    assert taken["rate"] == 1.0
    assert isinstance(taken["rate"], float)
    assert taken["life"] == pl.Time("3ba")


def test_of_alternatives_exactly_one_is_given() -> None:
    says = r'method: give one of share and life, got {}; write .* or method\(0.1, life="3ba"\)'
    with pytest.raises(pl.ArgumentError, match=says.format("neither")):
        method(0.1)
    with pytest.raises(pl.ArgumentError, match=says.format("both")):
        method(0.1, share=0.1, life="3ba")


def test_the_signature_is_plain() -> None:
    assert str(inspect.signature(method)).startswith("(rate: 'float', share: 'float | None' = None, life:")
    assert "Annotated" not in str(inspect.signature(pl.algorithms.sam))
    assert "Annotated" not in str(inspect.signature(pl.callbacks.SpeedMonitor))
    assert method.__doc__ == "Gives back its arguments."


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: method(0.1, shar=0.1), "method has no argument 'shar'; did you mean share="),
        (lambda: pl.algorithms.sam(radius=1), "sam has no argument 'radius'; it has rho, epsilon, interval"),
        (lambda: pl.algorithms.sam(rh=1), "did you mean rho=?"),
        (lambda: pl.algorithms.gradient_clipping("norm"), r"needs threshold: pl.algorithms.gradient_clipping\("),
        (lambda: pl.callbacks.SpeedMonitor(windw=3), "SpeedMonitor has no argument 'windw'; did you mean window="),
        (lambda: pl.loggers.InMemoryLogger(3), "takes no argument without its name, and was given 1"),
    ],
)
def test_misspelt_arguments_are_refused_with_what_to_write(call: Any, says: str) -> None:
    with pytest.raises(pl.ArgumentTypeError, match=says):
        call()


def test_a_class_and_its_subclass_refuse() -> None:
    @checked
    class Base:
        def __init__(self, window: Annotated[int, AtLeast(1)] = 3) -> None:
            self.window = window

    class Derived(Base):
        def __init__(self) -> None:
            super().__init__(window=0)

    assert Base(4).window == 4
    for make in (lambda: Base(0), Derived):
        with pytest.raises(pl.ArgumentError, match=r"Base: window must be .* write Base\(window=3\)"):
            make()


def test_an_attrs_class_declares_in_its_fields() -> None:
    @checked
    @attrs.frozen
    class Schedule:
        start: Annotated[float, Number()]
        slow: bool = False

    assert Schedule(1).start == 1.0
    assert attrs.evolve(Schedule(1.0), slow=True).slow
    with pytest.raises(pl.ArgumentError, match="Schedule: start must be a finite number, got nan"):
        Schedule(math.nan)
    with pytest.raises(pl.ArgumentTypeError, match="slow"):
        Schedule(1.0, slow=1)  # type: ignore[arg-type]


def test_settings_are_drawn_as_declared() -> None:
    drawn: list[dict[str, Any]] = []

    @examples(60, 300)
    @given(built(method))
    def draw(made: dict[str, Any]) -> None:
        drawn.append(made)

    draw()
    assert all((made["share"] is None) != (made["life"] is None) for made in drawn)
    assert {made["name"] for made in drawn} == {"method"}
    assert len({made["count"] for made in drawn}) > 1
    assert {made["kind"] for made in drawn} == {"a", "b"}
    assert not any(isinstance(setting.range, Flag | OneOf) and setting.required for setting in SETTINGS.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda: Above(0, least=1),
        lambda: AtLeast(0, below=1),
        lambda: AtLeast(0, above=1),
        lambda: Between(0, 1, above=0),
        lambda: Within(0, 1, below=1),
    ],
)
def test_a_range_has_no_bounds_but_its_own(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"least|above|below"):
        call()


def test_of_a_misspelled_range_it_is_said_what_is_meant() -> None:
    with pytest.raises(AttributeError, match=r"module 'pure_loop\.ranges' has no attribute 'Abov'; did you mean 'Ab"):
        pl.ranges.Abov  # type: ignore[attr-defined]  # noqa: B018
