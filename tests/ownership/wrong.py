"""Deliberately wrong decisions about who owns memory, which the tests of this folder have to catch.

Most of this folder uses the public API alone; how the decision is made is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.loop.driver import measure_references
from pure_loop.stages import ownership, references
from pure_loop.stages.ownership import Ownership
from pure_loop.stages.workspace import Workspace
from pure_loop.state import raw_opt_state

__all__ = ["WRONG", "wrong"]

_real, _count, _uses = ownership._counts, ownership.count, references.Tensors.uses
_has_tensors_alone = Ownership.has_tensors_alone


def _expecting(*places: int) -> Callable[..., tuple[int, ...]]:
    """The references in these places are those that there would be if nothing else had what is counted."""

    def counts(state: pl.State, shares: Any, yielded: Any, scripts: Any) -> tuple[int, ...]:
        assert Ownership.expected is not None
        mappings = _real(state, shares, yielded, scripts)[1:4]
        found = [_count(state), *mappings, _count(yielded), _count(scripts)]
        for place in places:
            # One more reference to the parameters is that of the leaves.
            found[place] = min(Ownership.expected[place] + (place == 1), found[place])
        return tuple(found)

    return counts


class _Anything:
    """It equals whatever it is compared with."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def _no_look_at_storages(this: references.Tensors) -> list[tuple[Any, ...]]:
    """References to tensors are counted, and those to their memory are not."""
    return [(variables, 0, weak, 0, 0, 0, 0) for variables, _, weak, *_ in _uses(this)]


def _opt_state_counts_as_unread(this: Ownership, state: pl.State, leaves: Any) -> bool:
    memory: Any = raw_opt_state(state)
    memory.lent = None
    return _has_tensors_alone(this, state, leaves)


# What is replaced, and by what.
WRONG: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "always in place": [(Ownership, "_is_unseen", lambda *_: True), (ownership, "_lent", lambda *mappings: [])],
    "no look at States": [(ownership, "_counts", _expecting(0, 4, 5))],
    "no look at the script's State": [(ownership, "_counts", _expecting(5))],
    "no count of mappings": [
        (ownership, "_counts", _expecting(1, 2, 3)),
        (ownership, "count_in", lambda _: _Anything()),
    ],
    "no look at tensors": [(ownership, "_lent", lambda *mappings: [])],
    "no look at storages": [
        (references.Tensors, "uses", _no_look_at_storages),
        (ownership, "tensor_uses", lambda _: 0),
        (references, "tensor_uses", lambda _: 0),
    ],
    "the optimizer state counts as unread": [(Ownership, "has_tensors_alone", _opt_state_counts_as_unread)],
    "gradients are never kept": [(Workspace, "take_gradients", lambda this, _: this.ownership is not None)],
    "each variable is replaced": [(ownership, "rebinds_loop_variable", lambda frame, value: True)],
}


@contextmanager
def wrong(name: str) -> Iterator[None]:
    """With one of the wrong decisions."""
    measure_references()  # as it is
    references.expected_uses.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        for owner, attribute, replacement in WRONG[name]:
            patched.setattr(owner, attribute, replacement)
        yield
    references.expected_uses.cache_clear()
