"""What tests of rehearsals share: a run, and the phases that failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl

DATA = [(torch.full((4, 3), 1.0), torch.tensor([0, 1, 1, 0]))] * 4
RUN: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1)}


def rehearse(model: Any = None, data: Any = DATA, **options: Any) -> Any:
    return pl.rehearse(nn.Linear(3, 2) if model is None else model, data, **RUN | {"max_duration": "3ep"} | options)


def phases(*args: Any, **options: Any) -> list[str]:
    with pytest.raises(pl.RehearsalError) as caught:
        rehearse(*args, **options)
    return [phase for phase, _ in caught.value.failures]
