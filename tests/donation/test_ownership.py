"""Counting references: what the calibration makes of counters that count otherwise, and of those that can't count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import pytest
import torch

from pure_loop.donation import consumer, references
from pure_loop.donation.references import held_once, holders_of, measure

# Counters as interpreters may have them: more references on the stack, fewer (as Python 3.14 borrows them), the same.
COUNTERS: dict[str, Callable[[Any], int]] = {
    "as here": getrefcount,
    "one more": lambda value: getrefcount(value) + 1,
    "borrowed": lambda value: getrefcount(value) - 3,
}


def raising(value: Any) -> int:
    raise RuntimeError("no counts")


UNTRUSTED: dict[str, tuple[Callable[[Any], int] | None, str]] = {
    "none": (None, "this interpreter does not count references"),
    "immortal": (lambda _: 2**32 - 1, "does not show"),
    "blind to the second": (lambda value: min(getrefcount(value), 4), "does not show"),
    "raising": (raising, "raised RuntimeError: no counts"),
}


def test_references_are_counted_where_python_and_torch_count_them() -> None:
    """A count of ours that is off would switch donation off, and skip what says so."""
    if sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)():
        assert references.MEASURED.doubt == ""
        assert consumer.doubt == ""


@pytest.mark.parametrize("name", COUNTERS)
def test_what_the_counting_itself_adds_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure(COUNTERS[name])
    assert measured.doubt == ""
    monkeypatch.setattr(references, "MEASURED", measured)
    weight = torch.ones(2)
    assert held_once((torch.ones(2), torch.ones(3)))
    assert not held_once((weight,))
    assert not held_once((weight[:1],))


@pytest.mark.parametrize("name", UNTRUSTED)
def test_counts_that_miss_a_reference_are_not_trusted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, doubt = UNTRUSTED[name]
    measured = measure(counter)
    assert doubt in measured.doubt
    assert measured.count is None
    monkeypatch.setattr(references, "MEASURED", measured)
    assert not references.can_count()
    assert not held_once((torch.ones(2),))
    assert holders_of(lambda: None) > 2**30


def test_references_are_not_counted_without_a_global_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert "without a global lock" in measure(getrefcount).doubt
