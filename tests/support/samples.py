"""What is drawn from strategies: samples of it, and the simplest."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from pure_loop.order import Plan

SIMPLEST = Plan(batches=(1,), max_duration="1ba")


def simplest(strategy: st.SearchStrategy[Any], condition: Callable[[Any], Any] = lambda value: True) -> Any:
    options = settings(database=None, phases=[Phase.generate, Phase.shrink], max_examples=500)
    return find(strategy, condition, settings=options, random=random.Random(0))


def sample(strategy: st.SearchStrategy[Any], number: int = 50) -> list[Any]:
    """What is drawn; the same in every run."""
    drawn: list[Any] = []

    @settings(database=None, derandomize=True, phases=[Phase.generate], max_examples=number, suppress_health_check=SLOW)
    @given(strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
