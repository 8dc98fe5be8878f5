"""What tests and the examples of docstrings share: numbers that don't depend on what ran before."""

from __future__ import annotations

import os
import random

import pytest
import torch

# W&B reads it once a process, with the first run that a test or a page of the docs makes.
os.environ.setdefault("WANDB_MODE", "offline")
SEED = int(os.environ.get("PURE_LOOP_SEED", "1234"))


@pytest.fixture(autouse=True)
def begins_with_the_same_numbers() -> None:
    """What a test draws, such as a module's weights, doesn't depend on what ran before it."""
    random.seed(SEED)
    torch.manual_seed(SEED)
