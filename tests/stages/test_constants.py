"""Ones are made once, and of a trace, where they have no numbers, they are not kept."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from pure_loop._internal import scalars as _cells
from pure_loop._internal.scalars import one_on

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cells, "_ones", {})


def test_they_are_made_once() -> None:
    assert one_on(CPU) is one_on(CPU)
    assert one_on(CPU, 1) is not one_on(CPU)
    assert one_on(CPU).item() == one_on(CPU, 1).item() == 1.0


def test_those_of_a_trace_are_not_kept() -> None:
    with FakeTensorMode():
        assert type(one_on(CPU)) is FakeTensor
    assert type(one_on(CPU)) is torch.Tensor
