"""What a backward begins with: a number as a tensor."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.autograd import gradient_of

NUMBERS = [1.0, 0.5, 0.3]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize(("number", "dtype"), list(zip(NUMBERS, DTYPES, strict=True)))
def test_the_gradient_is_that_of_torch(number: float, dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.0], dtype=dtype, requires_grad=True)
    for _ in range(3):
        (found,) = gradient_of((x * x).sum(), [x], number)
        (expected,) = torch.autograd.grad((x * x).sum(), [x], torch.tensor(number, dtype=dtype))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "write", [lambda x: x.mul_(2.0), lambda x: x.data.mul_(2.0), lambda x: x.share_memory_().mul_(2)]
)
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_a_hook_that_writes_to_it_spoils_no_later_backward(microbatch_size: int | None, write: Any) -> None:
    """In-place writes to a gradient are bad manners, and a loop by hand stands them."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        total = (outputs - targets).square().mean()
        total.register_hook(lambda gradient: write(gradient) and None)
        return total

    model, data = nn.Linear(3, 1), [(torch.ones(4, 3), torch.zeros(4, 1))] * 4
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)  # sums are exact in any order
    optimizer = pl.optim.sgd(lr=0.0)
    stream = pl.fit(model, data, loss=loss, optimizer=optimizer, max_duration="1ep", microbatch_size=microbatch_size)
    seen = [state.grads["weight"].clone() for event, state in stream if event is Event.AFTER_TRAIN_BATCH]
    loss(model(data[0][0]), data[0][1]).backward()
    assert model.weight.grad is not None
    assert all(torch.equal(each, model.weight.grad) for each in seen)


class Alone(nn.Module):
    """Its loss is its parameter, so that the gradient is what the backward begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


@pytest.mark.usefixtures("every_gradient_is_large")
@pytest.mark.parametrize("clip_grad", [None, 0.25])
@pytest.mark.parametrize("samples", [4, 6])
def test_gradients_that_are_it_stay_what_they_are(samples: int, clip_grad: float | None) -> None:
    """Sums and clipping write in place to tensors that are not aliased, and this one is aliased."""
    kept = []
    stream = pl.fit(
        Alone(),
        [(torch.zeros(samples, 1), torch.zeros(samples, 1))] * 5,
        loss=lambda outputs, targets: outputs,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="2ep",
        microbatch_size=2,
        clip_grad=clip_grad,
    )
    for event, state in stream:
        if event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH):
            kept.append((state, state.grads["weight"].item()))
            if event is Event.AFTER_TRAIN_BATCH:
                assert state.grads["weight"].item() == pytest.approx(1.0 if clip_grad is None else clip_grad, rel=1e-4)
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
