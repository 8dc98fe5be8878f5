"""Tensors of other classes and layouts: they train as by hand, or are refused by name, and never crash Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop.random import seeded
from tests.support.subclassing import KINDS, MODES, PLACES, Child
from tests.support.tiers import examples

DATA = [(torch.ones(4, 3), torch.zeros(4, 2))] * 3


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    one = Child()
    yield one
    one.close()


def test_a_wrapper_subclass_trains_as_by_hand(child: Child) -> None:
    """Its address is a null pointer: a read there is the end of the process."""
    for place in set(PLACES) - {"parameter", "buffer"}:
        for mode in ("auto", "keep"):
            answer = child.ask(kind="wrapper", place=place, optimizer="adamw", mode=mode)
            assert answer == "same", f"{place}, {mode}: {answer}"


@given(
    kind=st.sampled_from(sorted(KINDS)),
    place=st.sampled_from(PLACES),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    mode=st.sampled_from(sorted(MODES)),
)
@examples(30, 1500)
def test_no_tensor_crashes_python(child: Child, kind: str, place: str, optimizer: str, mode: str) -> None:
    case = f"{kind} as {place}, {optimizer}, {mode}"
    answer = child.ask(kind=kind, place=place, optimizer=optimizer, mode=mode)
    assert not answer.startswith("crashed"), f"{case}: {answer}"
    if (place, mode) == ("outputs", "pieces") and kind == "expanded":
        return  # what a row is depends on the others
    if (place, kind) == ("optimizer's memory", "meta"):
        return  # nothing of the loop's puts it there, and torch computes nothing with it
    allowed = ("same", "refused")
    if kind == "inference":
        allowed += ("trained",)  # a State has copies, which autograd takes
    if place not in ("gradient", "optimizer's memory"):
        allowed += ("by hand",)  # torch itself can't
    else:
        allowed += ("raised",)  # an algorithm of the user's gave the optimizer what it can't take
    if kind in ("quantised", "expanded") and place in ("gradient", "optimizer's memory"):
        allowed += ("different",)  # these kinds are other numbers
    assert answer.startswith(allowed), f"{case}: {answer}"
    if place in ("parameter", "buffer"):
        assert not answer.startswith("raised")
        if answer.startswith("refused"):
            assert "'layer.weight'" in answer or "'scale'" in answer or mode == "compile", f"{case}: {answer}"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_buffer_is_compared_under_strict() -> None:
    class Graph(nn.Module):
        edges: torch.Tensor

        def __init__(self, layout: str) -> None:
            super().__init__()
            with seeded(0):
                self.layer = nn.Linear(3, 2)
            self.register_buffer("edges", getattr(torch.eye(4), layout)())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.edges, self.layer(inputs))

    for layout in ("to_sparse", "to_sparse_csr"):
        settings = {"loss": functional.mse_loss, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "1ep"}
        strict, plain = (pl.run(pl.fit(Graph(layout), DATA, strict=each, **settings)) for each in (True, False))
        assert all(torch.equal(strict.params[name], plain.params[name]) for name in plain.params)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_training_inside_a_transform_reads_no_address() -> None:
    def weight(inputs: torch.Tensor) -> torch.Tensor:
        settings = {"loss": functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
        return pl.run(pl.fit(nn.Linear(3, 2), [(inputs, torch.zeros(4, 2))] * 2, **settings)).params["weight"]

    with pytest.raises(RuntimeError, match="requires_grad_"):  # torch's own refusal, which says what to do
        torch.func.jvp(weight, (torch.ones(4, 3),), (torch.ones(4, 3),))
