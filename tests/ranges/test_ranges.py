"""Ranges that are declared in a signature: what they refuse, and that the signature stays plain.

What holds for each method of the library stands in ``tests/architecture/test_every_method.py``.
"""

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
from pure_loop.ranges import Above, AtLeast, Between, Duration, Name, Number, Within, checked, settings_of
from pure_loop.testing._compositions import built, values
from tests.support.refused import Refusal, check
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
IN_WORDS = """rate: number above 0; share: number at least 0 and less than 1, or None; life: time above 0, such as
    `"100ba"`, or None; count: whole number at least 1; kind: `"a"`, `"b"`; flag: `True`, `False`; whole: whole number,
    or None; name: text"""


@examples(20, 300)
@given(data=st.data())
def test_what_is_inside_is_taken_and_what_is_outside_is_refused_by_its_name(data: st.DataObject) -> None:
    """Numbers arrive as floats, amounts as times."""
    for name in SETTINGS.keys() - {"share", "life", "name"}:
        value = data.draw(values(SETTINGS[name]))
        assert method(**{"rate": 0.5, "share": 0.5, name: value})[name] == value
    for name, setting in SETTINGS.items():
        others = {"rate": 0.5} | ({} if name == "life" else {"share": 0.5})
        for value in setting.outside:
            with pytest.raises((pl.errors.ArgumentError, pl.errors.ArgumentTypeError), match=name):
                method(**others | {name: value})
    taken = method(1, life="3ba")
    assert (type(taken["rate"]), taken["life"]) == (float, pl.Time("3ba"))


def test_settings_are_drawn_and_shown_as_declared_and_the_signature_is_plain() -> None:
    assert "; ".join(f"{name}: {each.in_words}" for name, each in SETTINGS.items()) == " ".join(IN_WORDS.split())
    drawn = sample(built(method), 60)
    assert all((made["share"] is None) != (made["life"] is None) for made in drawn)
    assert {made["kind"] for made in drawn} == {"a", "b"}
    assert str(inspect.signature(method)).startswith("(rate: 'float', share: 'float | None' = None, life:")
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


ANY_OF: Any = {"method": method, "sam": pl.algorithms.sam, "speed": pl.callbacks.SpeedMonitor}
ONE_OF = "method: give one of share and life, got "
TYPE, VALUE = pl.errors.ArgumentTypeError, pl.errors.ArgumentError
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: method(0.1), VALUE, ONE_OF + "neither"),
    (lambda: method(0.1), VALUE, 'or method(0.1, life="3ba")'),
    (lambda: method(0.1, share=0.1, life="3ba"), VALUE, ONE_OF + "both"),
    (lambda: ANY_OF["method"](0.1, shar=0.1), TYPE, "'shar'; did you mean share="),
    (lambda: ANY_OF["sam"](radius=1), TYPE, "no argument 'radius'; it has rho, epsilon, interval"),
    (lambda: pl.algorithms.gradient_clipping("norm"), TYPE, "needs threshold: pl.algorithms.gradient_clipping("),
    (lambda: ANY_OF["speed"](windw=3), TYPE, "SpeedMonitor has no argument 'windw'; did you mean window="),
    (lambda: pl.loggers.InMemoryLogger(3), TYPE, "takes no argument without its name, and was given 1"),  # type: ignore[call-arg]
    (lambda: Base(0), VALUE, "Base: window must be"),
    (Derived, VALUE, "write Base(window=3)"),
    (lambda: Schedule(math.nan), VALUE, "Schedule: start must be a finite number, got nan"),
    (lambda: Schedule(1.0, slow=1), TYPE, "slow"),  # type: ignore[arg-type]
    (lambda: Above(0, least=1), TypeError, "least"),  # type: ignore[call-arg]
    (lambda: AtLeast(0, below=1), TypeError, "below"),  # type: ignore[call-arg]
    (lambda: Between(0, 1, above=0), TypeError, "above"),  # type: ignore[call-arg]
    (lambda: Within(0, 1, below=1), TypeError, "below"),  # type: ignore[call-arg]
    (lambda: pl.ranges.Abov, AttributeError, "'pure_loop.ranges' has no attribute 'Abov'; did you mean 'Ab"),
]


def test_what_is_not_declared_is_refused_with_what_to_write() -> None:
    for call, error, says in REFUSED:
        check(Refusal(says, call, error, (says,)))
    assert attrs.evolve(Schedule(1), slow=True) == Schedule(1.0, True)
