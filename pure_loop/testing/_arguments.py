"""Arguments of strategies, read and refused where the strategy is made and not where it first draws."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from hypothesis import strategies as st

from pure_loop.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")


def check_range(where: str, low: str, least: float | None, high: str, most: float | None) -> None:
    """Refuse a range without a number in it; None is no bound."""
    if least is not None and most is not None and least > most:
        raise ArgumentError(f"{where}: {low}={least!r} is more than {high}={most!r}; nothing lies between them.")


def check_choices(where: str, name: str, value: object, choices: Collection[T]) -> tuple[T, ...]:
    """What was chosen, as it stands in ``choices``, in the order given; what comes twice is drawn twice as often."""
    listed = ", ".join(map(_shown, choices))
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{where}: {name}={value!r}: give a list of some of {listed}.")
    members = {item: item for item in choices}
    chosen = []
    for item in value:
        try:
            chosen.append(members[item])
        except (KeyError, TypeError):
            raise ArgumentError(f"{where}: {name} holds {item!r}, which is none of {listed}.") from None
    if not chosen:
        raise ArgumentError(f"{where}: {name}={value!r} leaves nothing to draw from; give some of {listed}.")
    return tuple(chosen)


def check_strategy(where: str, name: str, value: object, example: str) -> st.SearchStrategy[Any]:
    """``value``, if it is a strategy."""
    if isinstance(value, st.SearchStrategy):
        return value
    hint = " (a function that makes one: call it)" if callable(value) else ""
    raise ArgumentTypeError(
        f"{where}: {name} is a strategy, and {value!r} of type {type(value).__name__} is none{hint}; write {example}."
    )


def _shown(value: object) -> str:
    # An enum's text is what one writes; its repr isn't.
    return repr(str(value)) if isinstance(value, str) else repr(value)
