"""Gradients of microbatches are added up in memory that nobody else has, and only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event, engine
from pure_loop._ownership import CAN_COUNT, held_once

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="references can't be counted on this interpreter")

WIDTH = 512
WHATEVER = torch.ones(4, 4)


def two_of_the_same() -> tuple[Tensor, ...]:
    one = torch.ones(2)
    return one, one


def two_views() -> tuple[Tensor, ...]:
    whole = torch.ones(4)
    return whole[:2], whole[2:]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: (torch.ones(2), torch.ones(3)), True),
        (lambda: (torch.ones(2, 3).t().contiguous(), torch.ones(3, 2, 4, 4)), True),
        (lambda: (torch.ones(6).view(2, 3),), True),
        (lambda: (WHATEVER,), False),
        (lambda: (WHATEVER.view(16),), False),
        (lambda: (WHATEVER.detach(),), False),
        (lambda: (torch.from_numpy(WHATEVER.numpy()),), False),
        (two_of_the_same, False),
        (two_views, False),
        (lambda: (torch.ones(()).expand(3),), False),
        (lambda: (torch.ones(2, 3).t(),), False),
    ],
    ids=[
        *("new", "another layout", "a view of nobody's", "somebody's", "a view of somebody's", "detached", "NumPy's"),
        *("twice the same", "views of one", "expanded", "transposed"),
    ],
)
def test_who_has_a_tensor_is_counted(make: Callable[[], Sequence[Tensor]], wanted: bool) -> None:
    assert held_once(make()) is wanted


def test_who_has_the_tensor_behind_a_view_is_counted() -> None:
    base = torch.ones(6)
    assert not held_once((base.view(2, 3),))
    storage = torch.ones(3).untyped_storage()
    assert not held_once((torch.empty(0).set_(storage),))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the loop found out when it asked."""
    found: list[bool] = []

    def asking(tensors: Any) -> bool:
        found.append(held_once(tensors))
        return found[-1]

    monkeypatch.setattr(engine, "held_once", asking)
    return found


def stream(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(0)
    data = [(torch.randn(7, WIDTH), torch.randn(7, WIDTH)) for _ in range(3)]
    options = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", **options}
    return pl.fit(model, data, loss=mse_loss, **options)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_large_gradients_are_added_up_in_place(
    answers: list[bool], watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place = pl.run(stream(layers(), microbatch_size=2, watch=watch))
    assert answers == [True] * 9  # three batches of four microbatches
    monkeypatch.setattr(engine, "held_once", lambda tensors: False)
    copied = pl.run(stream(layers(), microbatch_size=2, watch=watch))
    for name, tensor in in_place.params.items():
        assert torch.equal(tensor, copied.params[name])


def test_gradients_that_were_kept_stay_what_they_were(answers: list[bool]) -> None:
    kept = []
    for _, state in stream(layers(), microbatch_size=2):
        if state.grads is not None:
            kept.append((state.grads, {name: tensor.clone() for name, tensor in state.grads.items()}))
    assert all(answers)
    for grads, before in kept:
        for name, tensor in grads.items():
            assert torch.equal(tensor, before[name])


class Given(torch.autograd.Function):
    """Its gradient is a tensor that somebody else has."""

    gradient = torch.zeros(WIDTH, WIDTH)

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return Given.gradient


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x * Given.apply(self.weight)  # type: ignore[no-untyped-call]
        return total


def test_a_gradient_that_somebody_has_is_not_written_to(answers: list[bool]) -> None:
    Given.gradient = torch.ones(WIDTH, WIDTH)
    pl.run(stream(Odd(), microbatch_size=4))
    assert answers == [False] * 3
    assert torch.equal(Given.gradient, torch.ones(WIDTH, WIDTH))


def test_writing_to_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "held_once", lambda tensors: True)
    Given.gradient = torch.ones(WIDTH, WIDTH)
    pl.run(stream(Odd(), microbatch_size=4))
    assert not torch.equal(Given.gradient, torch.ones(WIDTH, WIDTH))


def test_small_gradients_are_not_asked_about(answers: list[bool]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))
    pl.run(stream(model, microbatch_size=2))
    assert not answers
