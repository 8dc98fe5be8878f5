"""What tests and the examples of docstrings share: numbers that don't depend on what ran before."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def begins_with_the_same_numbers() -> None:
    """What a test draws, such as a module's weights, doesn't depend on what ran before it."""
    random.seed(1234)
    torch.manual_seed(1234)
