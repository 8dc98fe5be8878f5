"""Ranges that are declared in a signature: what they refuse, and that the signature stays plain."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Annotated, Any, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.ranges import Above, AtLeast, Between, Duration, Name, Number, Within, checked, settings_of
from pure_loop.testing._compositions import built, values
from tests.support.refused import Refusal, check, rows
from tests.support.samples import sample
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
    others = {"rate": 0.5} | ({} if name == "life" else {"share": 0.5})
    for value in SETTINGS[name].outside:
        with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match=name):
            method(**others | {name: value})


@examples(30, 300)
@given(data=st.data())
def test_what_is_inside_is_taken(data: st.DataObject) -> None:
    """Numbers arrive as floats, amounts as times."""
    for name in SETTINGS.keys() - {"share", "life", "name"}:
        value = data.draw(values(SETTINGS[name]))
        assert method(**{"rate": 0.5, "share": 0.5, name: value})[name] == value
    taken = method(1, life="3ba")
    assert (type(taken["rate"]), taken["life"]) == (float, pl.Time("3ba"))


def test_settings_are_drawn_as_declared() -> None:
    drawn = sample(built(method), 60)
    assert all((made["share"] is None) != (made["life"] is None) for made in drawn)
    assert {made["name"] for made in drawn} == {"method"}
    assert len({made["count"] for made in drawn}) > 1
    assert {made["kind"] for made in drawn} == {"a", "b"}


def test_the_signature_is_plain() -> None:
    assert str(inspect.signature(method)).startswith("(rate: 'float', share: 'float | None' = None, life:")
    assert "Annotated" not in str(inspect.signature(pl.algorithms.sam))
    assert "Annotated" not in str(inspect.signature(pl.callbacks.SpeedMonitor))
    assert method.__doc__ == "Gives back its arguments."


@checked
class Base:
    def __init__(self, window: Annotated[int, AtLeast(1)] = 3) -> None:
        self.window = window


class Derived(Base):
    def __init__(self) -> None:
        super().__init__(window=0)


@checked
@attrs.frozen
class Schedule:
    start: Annotated[float, Number()]
    slow: bool = False


def test_classes_declare_in_their_constructor_or_in_fields() -> None:
    assert Base(4).window == 4
    assert Schedule(1).start == 1.0
    assert attrs.evolve(Schedule(1.0), slow=True).slow


Method: Any = method  # of which anything may be asked
SAM: Any = pl.algorithms.sam
ONE_OF = "method: give one of share and life, got "
REFUSED = [
    Refusal(name, call, error, says if isinstance(says, tuple) else (says,))
    for name, call, error, says in (
        ("neither", lambda: method(0.1), pl.ArgumentError, (ONE_OF + "neither", 'or method(0.1, life="3ba")')),
        ("both", lambda: method(0.1, share=0.1, life="3ba"), pl.ArgumentError, ONE_OF + "both"),
        ("misspelt", lambda: Method(0.1, shar=0.1), pl.ArgumentTypeError, "'shar'; did you mean share="),
        ("unknown", lambda: SAM(radius=1), pl.ArgumentTypeError, "no argument 'radius'; it has rho, epsilon, interval"),
        (
            *("missing", lambda: pl.algorithms.gradient_clipping("norm"), pl.ArgumentTypeError),
            "needs threshold: pl.algorithms.gradient_clipping(",
        ),
        (
            *("misspelt of a class", partial(pl.callbacks.SpeedMonitor, windw=3), pl.ArgumentTypeError),
            "SpeedMonitor has no argument 'windw'; did you mean window=",
        ),
        (
            *("by place", partial(pl.loggers.InMemoryLogger, 3), pl.ArgumentTypeError),
            "takes no argument without its name, and was given 1",
        ),
        ("a class", lambda: Base(0), pl.ArgumentError, ("Base: window must be", "write Base(window=3)")),
        ("a subclass", Derived, pl.ArgumentError, ("Base: window must be", "write Base(window=3)")),
        ("a field", partial(Schedule, math.nan), pl.ArgumentError, "Schedule: start must be a finite number, got nan"),
        ("another field", partial(Schedule, 1.0, slow=1), pl.ArgumentTypeError, "slow"),
        ("Above", partial(Above, 0, least=1), TypeError, "least"),
        ("AtLeast", partial(AtLeast, 0, below=1), TypeError, "below"),
        ("Between", partial(Between, 0, 1, above=0), TypeError, "above"),
        ("Within", partial(Within, 0, 1, below=1), TypeError, "below"),
        (
            "a range",
            lambda: pl.ranges.Abov,
            AttributeError,
            "'pure_loop.ranges' has no attribute 'Abov'; did you mean 'Ab",
        ),
    )
]


@rows(REFUSED)
def test_what_is_not_declared_is_refused_with_what_to_write(refusal: Refusal) -> None:
    check(refusal)
