"""Tensors of other classes and layouts: they train as by hand, or are refused by name, and never crash Python."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from tests.conftest import THOROUGH
from tests.support.holding import data, fit
from tests.support.subclassing import KINDS, MODES, PLACES, answers

GIVEN = ("gradient", "optimizer's memory")  # by an algorithm of the user's


def allowed(kind: str, place: str, mode: str) -> tuple[str, ...]:
    if kind == "wrapper" and place not in ("parameter", "buffer") and mode != "compile":
        return ("same",)
    result = ("same", "refused")
    if kind == "inference":
        result += ("trained",)  # a State has copies, which autograd takes
    # Torch itself can't; or the optimizer can't take what an algorithm gave it.
    result += ("raised",) if place in GIVEN else ("by hand",)
    if kind in ("quantised", "expanded") and place in GIVEN:
        result += ("different",)  # these kinds are other numbers
    return result


def test_no_tensor_crashes_python() -> None:
    """The address of a wrapper subclass is a null pointer: a read there is the end of the process."""
    # What a row is depends on the others; nothing of the loop's puts it there, and torch computes nothing with it.
    left_out = {("expanded", "outputs", "pieces"), *(("meta", "optimizer's memory", mode) for mode in MODES)}
    every = set(itertools.product(KINDS, PLACES, MODES)) - left_out
    cases = sorted(every if THOROUGH else random.Random(0).sample(sorted(every), 24))
    cases += [("wrapper", place, mode) for place in PLACES for mode in ("auto", "keep")]
    for (kind, place, mode), answer in zip(cases, answers(cases), strict=True):
        case = f"{kind} as {place}, {mode}: {answer}"
        assert answer.startswith(allowed(kind, place, mode)), case
        if place in ("parameter", "buffer"):
            assert not answer.startswith("raised"), case
            named = "'layer.weight'" in answer or "'scale'" in answer or mode == "compile"
            assert named or not answer.startswith("refused"), case


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_buffer_is_compared_under_strict() -> None:
    class Graph(nn.Module):
        edges: torch.Tensor

        def __init__(self, layout: str) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("edges", getattr(torch.eye(8), layout)())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.edges, self.layer(inputs))

    for layout in ("to_sparse", "to_sparse_csr"):
        model = Graph(layout)
        strict, plain = (pl.run(fit(model, strict=each)) for each in (True, False))
        assert all(torch.equal(strict.params[name], plain.params[name]) for name in plain.params)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_training_inside_a_transform_reads_no_address() -> None:
    def weight(inputs: torch.Tensor) -> Any:
        return pl.run(fit(nn.Linear(4, 2), [(inputs, data(4)[0][1])])).params["weight"]

    with pytest.raises(RuntimeError, match="requires_grad_"):  # torch's own refusal, which says what to do
        torch.func.jvp(weight, (torch.ones(8, 4),), (torch.ones(8, 4),))
