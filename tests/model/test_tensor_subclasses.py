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
from tests.support.subclassing import KINDS, MODES, PLACES, Child, Wrapped
from tests.support.tiers import examples

DATA = [(torch.ones(4, 3), torch.zeros(4, 2))] * 3


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    one = Child()
    yield one
    one.close()


@pytest.mark.parametrize("mode", ["auto", "keep"])
@pytest.mark.parametrize("place", ["loss", "outputs", "inputs", "targets", "gradient", "optimizer's memory"])
def test_a_wrapper_subclass_trains_as_by_hand(child: Child, place: str, mode: str) -> None:
    """Its address is a null pointer: a read there is the end of the process.

    Neighbours tried: all kinds and places of :mod:`tests.support.subclassing`, by the property below; jvp around fit; a
    parameter of a subclass of nn.Parameter; sparse and CSR buffers under strict=True.
    """
    answer = child.ask(kind="wrapper", place=place, optimizer="adamw", mode=mode)
    assert answer == "same"


@given(
    kind=st.sampled_from(sorted(KINDS)),
    place=st.sampled_from(PLACES),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    mode=st.sampled_from(sorted(MODES)),
)
@examples(10, 1500)
def test_no_tensor_crashes_python(child: Child, kind: str, place: str, optimizer: str, mode: str) -> None:
    check(child, kind, place, optimizer, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_tensor_crashes_python_anywhere(child: Child, mode: str) -> None:
    for kind in KINDS:
        for place in PLACES:
            check(child, kind, place, "adamw", mode)


def check(child: Child, kind: str, place: str, optimizer: str, mode: str) -> None:
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


@pytest.mark.filterwarnings("ignore:.*(quantized|nested) tensor")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("wrapper", r"buffer 'scale' is a Wrapped, a subclass of torch.Tensor, .* register a plain tensor"),
        ("mkldnn", r"buffer 'scale' has the layout torch._mkldnn, .* tensor.to_dense\(\)"),
        ("quantised", r"buffer 'scale' is quantised \(torch.qint8\)"),
        ("nested", r"buffer 'scale' is a nested tensor: keep its values"),
    ],
)
def test_a_buffer_that_no_state_can_hold_is_named_at_the_call(kind: str, message: str) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("scale", KINDS[kind](torch.ones(2)))
    with pytest.raises(pl.errors.ModelError, match=message):
        pl.fit(model, DATA, loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")


def test_a_parameter_of_another_class_is_named_at_the_call() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight = nn.Parameter(Wrapped(torch.ones(2, 3)))
    for donate in ("auto", True, False):
        with pytest.raises(pl.errors.ModelError, match=r"parameter '0.weight' is a Wrapped, .* nn.Parameter\(tensor\)"):
            pl.fit(model, DATA, loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
                   donate=donate)  # fmt: skip


def test_a_loss_that_is_sparse_is_an_error_that_says_so() -> None:
    stream = pl.fit(
        nn.Linear(3, 2),
        DATA,
        loss=lambda outputs, targets: functional.mse_loss(outputs, targets).to_sparse(),
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ep",
    )
    with pytest.raises(pl.errors.LossError, match=r"has the layout torch.sparse_coo; return a dense tensor"):
        pl.run(stream)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_buffer_is_compared_under_strict(layout: str) -> None:
    class Graph(nn.Module):
        edges: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("edges", getattr(torch.eye(4), layout)())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.edges, self.layer(inputs))

    def train(**options: bool) -> pl.State:
        torch.manual_seed(0)
        stream = pl.fit(
            Graph(), DATA, loss=functional.mse_loss, optimizer=pl.optim.adamw(lr=0.1), max_duration="1ep", **options
        )
        return pl.run(stream)

    strict, plain = train(strict=True), train()
    assert all(torch.equal(strict.params[name], plain.params[name]) for name in plain.params)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_training_inside_a_transform_reads_no_address() -> None:
    def weight(inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        data = [(inputs, torch.zeros(4, 2))] * 2
        stream = pl.fit(
            nn.Linear(3, 2), data, loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"
        )
        return pl.run(stream).params["weight"]

    with pytest.raises(RuntimeError, match="requires_grad_"):  # torch's own refusal, which says what to do
        torch.func.jvp(weight, (torch.ones(4, 3),), (torch.ones(4, 3),))
