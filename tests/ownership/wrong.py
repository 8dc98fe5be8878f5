"""Deliberately wrong decisions about who owns memory, which the tests of this folder have to catch.

Most of this folder uses the public API alone; how the decision is made is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pure_loop as pl
from pure_loop.loop.driver import measure_references
from pure_loop.stages import ownership, references
from pure_loop.stages.ownership import Ownership
from pure_loop.state import raw_opt_state

__all__ = ["WRONG", "always_in_place", "wrong"]


@contextmanager
def always_in_place() -> Iterator[None]:
    """An update writes in place whoever refers to the State, its mappings, its tensors or their memory."""
    measure_references()
    with (
        patch.object(Ownership, "_is_unseen", lambda *_: True),
        patch.object(ownership, "_lent", lambda *mappings: []),
    ):
        yield


@contextmanager
def _no_look_at_states() -> Iterator[None]:
    """References to the State, and to those before, are not counted."""
    real = ownership._counts

    def counts(*states: Any) -> tuple[int, ...]:
        assert Ownership.expected is not None
        return Ownership.expected[0], *real(*states)[1:4], *Ownership.expected[4:]

    with patch.object(ownership, "_counts", counts):
        yield


@contextmanager
def _no_look_at_the_scripts_state() -> Iterator[None]:
    """References to the State in the variable of the script are not counted."""
    real, count = ownership._counts, ownership.count

    def counts(state: pl.State, shares: Any, yielded: Any, scripts: Any) -> tuple[int, ...]:
        assert Ownership.expected is not None
        return count(state), *real(state, shares, yielded, scripts)[1:4], count(yielded), Ownership.expected[5]

    with patch.object(ownership, "_counts", counts):
        yield


class _Anything:
    """It equals whatever it is compared with."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


@contextmanager
def _no_count_of_mappings() -> Iterator[None]:
    """Mappings have the references that they would have if nothing else had them."""
    real, count = ownership._counts, ownership.count

    def counts(state: pl.State, shares: Any, yielded: Any, scripts: Any) -> tuple[int, ...]:
        assert Ownership.expected is not None
        _, params, memory, grads, _, _ = Ownership.expected
        params = min(params + 1, real(state, shares, yielded, scripts)[1])  # one more is that of the leaves
        return count(state), params, memory, grads, count(yielded), count(scripts)

    with patch.object(ownership, "_counts", counts), patch.object(ownership, "count_in", lambda _: _Anything()):
        yield


@contextmanager
def _no_look_at_tensors() -> Iterator[None]:
    with patch.object(ownership, "_lent", lambda *mappings: []):
        yield


@contextmanager
def _no_look_at_storages() -> Iterator[None]:
    """References to tensors are counted, and those to their memory are not."""
    real = references.Tensors.uses

    def uses(this: references.Tensors) -> list[tuple[Any, ...]]:
        return [(variables, 0, weak, 0, 0, 0, 0) for variables, _, weak, *_ in real(this)]

    references.expected_uses.cache_clear()
    with (
        patch.object(references.Tensors, "uses", uses),
        patch.object(ownership, "tensor_uses", lambda _: 0),
        patch.object(references, "tensor_uses", lambda _: 0),
    ):
        yield
    references.expected_uses.cache_clear()


@contextmanager
def _opt_state_counts_as_unread() -> Iterator[None]:
    real = Ownership.has_tensors_alone

    def has_tensors_alone(this: Ownership, state: pl.State, leaves: Any) -> bool:
        memory: Any = raw_opt_state(state)
        memory.lent = None
        return real(this, state, leaves)

    with patch.object(Ownership, "has_tensors_alone", has_tensors_alone):
        yield


@contextmanager
def _each_variable_is_replaced() -> Iterator[None]:
    with patch.object(ownership, "rebinds_loop_variable", lambda frame, value: True):
        yield


WRONG: dict[str, Callable[[], Any]] = {
    "always in place": always_in_place,
    "no look at States": _no_look_at_states,
    "no look at the script's State": _no_look_at_the_scripts_state,
    "no count of mappings": _no_count_of_mappings,
    "no look at tensors": _no_look_at_tensors,
    "no look at storages": _no_look_at_storages,
    "the optimizer state counts as unread": _opt_state_counts_as_unread,
    "each variable is replaced": _each_variable_is_replaced,
}


@contextmanager
def wrong(name: str) -> Iterator[None]:
    """With one of the wrong decisions."""
    measure_references()  # as it is
    with ExitStack() as stack:
        stack.enter_context(WRONG[name]())
        yield
