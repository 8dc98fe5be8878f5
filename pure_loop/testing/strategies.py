"""Strategies for Hypothesis: all that runs are made of, and what comes out of them.

They are functions of keywords, which are looked at when they are called; what they draw is valid, and shrinks to the
simplest. Once this library and Hypothesis are imported, in whichever order, ``hypothesis.strategies.from_type`` finds
them by their types: ``from_type(pl.State)`` is ``states()``.

>>> import pure_loop as pl
>>> from hypothesis import given, strategies as st
>>> @given(now=timestamps())
... def test_rates_never_rise(now: pl.Timestamp) -> None:
...     rate = pl.schedules.linear(1.0, 0.0, "6ba")
...     assert rate(now.next_batch(samples=1)) <= rate(now)
>>> test_rates_never_rise()
"""

from __future__ import annotations

from pure_loop.entry import hypothesis as entry_hypothesis
from pure_loop.testing._batches import batches
from pure_loop.testing._compositions import algorithms
from pure_loop.testing._plans import plans
from pure_loop.testing._states import cases, problems, state_at, states
from pure_loop.testing._times import event_streams, times, timestamps
from pure_loop.testing.case import Case
from pure_loop.testing.problems import Problem

__all__ = [
    "algorithms",
    "batches",
    "cases",
    "event_streams",
    "plans",
    "problems",
    "state_at",
    "states",
    "times",
    "timestamps",
]

# Here also where Hypothesis loads no entry points (HYPOTHESIS_NO_PLUGINS), or finds none.
entry_hypothesis.register()
entry_hypothesis.register_types(Case, Problem)
entry_hypothesis.show(Case)


def __dir__() -> list[str]:
    return list(__all__)
