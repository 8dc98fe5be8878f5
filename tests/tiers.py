"""What CI tries of a test, in its fast or its slow tier, and what the thorough tier does."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

from tests.conftest import THOROUGH

__all__ = ["examples", "tiers"]


def examples(fast: int, thorough: int) -> settings:
    """How many examples of a property."""
    return settings(max_examples=thorough if THOROUGH else fast)


def tiers(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """The values as parameters of a test: CI tries those in ``fast``, the thorough tier all."""
    return [each if each in fast else pytest.param(each, marks=pytest.mark.thorough) for each in values]
