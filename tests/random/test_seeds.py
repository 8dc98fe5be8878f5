"""What a backward begins with: a number as a tensor."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.autograd import gradient_of
from tests.support import problem


def test_the_gradient_is_that_of_torch() -> None:
    for number, dtype in ((1.0, torch.float32), (0.5, torch.float64), (0.3, torch.bfloat16)):
        x = torch.tensor([1.0, -2.0], dtype=dtype, requires_grad=True)
        for _ in range(3):
            (found,) = gradient_of((x * x).sum(), [x], number)
            (expected,) = torch.autograd.grad((x * x).sum(), [x], torch.tensor(number, dtype=dtype))
            assert torch.equal(found, expected)


def test_a_hook_that_writes_to_it_spoils_no_later_backward() -> None:
    """In-place writes to a gradient are bad manners, and a loop by hand stands them."""
    model, data = nn.Linear(3, 1), [(torch.ones(4, 3), torch.zeros(4, 1))] * 4
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)  # sums are exact in any order
    writes: tuple[Any, ...] = (lambda x: x.mul_(2.0), lambda x: x.data.mul_(2.0), lambda x: x.share_memory_().mul_(2))
    for size, write in itertools.product((None, 2), writes):

        def loss(outputs: Tensor, targets: Tensor, write: Any = write) -> Tensor:
            total = (outputs - targets).square().mean()
            total.register_hook(lambda gradient: write(gradient) and None)
            return total

        stream = problem.fit(model, data, loss=loss, optimizer=pl.optim.sgd(lr=0.0), microbatch_size=size, strict=None)
        seen = [state.grads["weight"].clone() for event, state in stream if event is Event.AFTER_TRAIN_BATCH]
        (wanted,) = torch.autograd.grad(loss(model(data[0][0]), data[0][1]), [model.weight])
        assert all(torch.equal(each, wanted) for each in seen)


class Alone(nn.Module):
    """Its loss is its parameter, so that the gradient is what the backward begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


@pytest.mark.usefixtures("every_gradient_is_large")
def test_gradients_that_are_it_stay_what_they_are() -> None:
    """Sums and clipping write in place to tensors that are not aliased, and this one is aliased."""
    for samples, clip_grad in itertools.product((4, 6), (None, 0.25)):
        kept = []
        options = {"loss": lambda outputs, targets: outputs, "microbatch_size": 2, "clip_grad": clip_grad}
        for event, state in problem.fit(Alone(), problem.points(5, samples), strict=None, **options):
            if event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH):
                kept.append((state, state.grads["weight"].item()))
                if event is Event.AFTER_TRAIN_BATCH:
                    assert kept[-1][1] == pytest.approx(1.0 if clip_grad is None else clip_grad, rel=1e-4)
        assert all(state.grads["weight"].item() == number for state, number in kept)


def test_a_backward_inside_of_a_backward_and_one_beside_it_have_their_own() -> None:
    seen: list[Any] = []

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            def inside() -> None:
                y = torch.tensor(2.0, requires_grad=True)
                with torch.enable_grad():
                    product = y * y
                product.register_hook(seen.append)
                seen.append(gradient_of(product, [y])[0].item())

            inside()
            thread = threading.Thread(target=inside)
            thread.start()
            thread.join()
            return gradient

    x = torch.tensor(1.0, requires_grad=True)
    gradient_of(x * 1, [x])
    loss = Inside.apply(x)
    loss.register_hook(seen.append)
    gradient_of(loss, [x])
    outer, first, _, second, _ = seen
    assert outer is not first
    assert outer is not second
    assert [each for each in seen if isinstance(each, float)] == [4.0, 4.0]
