"""Regression by modules of any kind, in a loop by hand and by ``fit``: a State holds what the module does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from tests.support import problem

__all__ = ["DATA", "LR", "WAYS", "assert_holds", "by_hand", "data", "ends", "fit", "last", "made", "mse"]
STEPS, LR = 6, 0.01
WAYS: list[dict[str, Any]] = [
    *({}, {"watch": {Event.BATCH_END}}, {"donate": False}, {"strict": True}, {"microbatch_size": 8})
]
mse = functional.mse_loss
Loss = Callable[[Any, Any], Tensor]


def SGD(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, fused=True)


def data(*shape: int) -> list[Any]:
    """Three batches of eight samples, so that a mean over them rounds as it does by hand, with two numbers each."""
    draw = lambda seed, *sizes: torch.randn(8, *sizes, generator=problem.noise(seed))  # noqa: E731
    return [(draw(i, *shape), draw(i + 10, 2)) for i in range(3)]


DATA = data(4)


def made(make: Callable[..., Any], *arguments: Any) -> Any:
    with seeded(0):
        return make(*arguments)


def by_hand(
    model: nn.Module, data: Any = DATA, optimizer: Any = SGD, loss: Loss | None = None, steps: int = STEPS
) -> Iterator[nn.Module]:
    """The module itself, trained, after each step; ``loss`` is a function of it and a batch."""
    torch_optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        batch = data[step % len(data)]
        torch_optimizer.zero_grad()
        (mse(model(batch[0]), batch[1]) if loss is None else loss(model, batch)).backward()
        torch_optimizer.step()
        yield model


def last(*arguments: Any, **options: Any) -> nn.Module:
    """The module at the end of :func:`by_hand`."""
    (*_, module) = by_hand(*arguments, **options)
    return module


def fit(start: Any, data: Any = DATA, algorithms: Any = (), **options: Any) -> pl.Stream:
    """:func:`by_hand`, two epochs of it."""
    settings: dict[str, Any] = {"loss": mse, "optimizer": pl.optim.sgd(lr=LR), "strict": False, **options}
    return problem.fit(start, data, algorithms, **settings)


def ends(start: Any, data: Any = DATA, **options: Any) -> list[pl.State]:
    """The States after each batch."""
    return [state for event, state in fit(start, data, **options) if event is Event.BATCH_END]


def assert_holds(state: pl.State, module: nn.Module, where: str = "") -> None:
    """The State, and its module, hold what this one does: names, numbers, dtypes, and what is persistent."""
    made = state.module()
    for params, buffers in (
        (state.params, state.buffers),
        (dict(made.named_parameters()), dict(made.named_buffers())),
    ):
        for held, named in ((params, dict(module.named_parameters())), (buffers, dict(module.named_buffers()))):
            assert held.keys() == named.keys(), where
            for name, tensor in named.items():
                assert held[name].dtype == tensor.dtype, (where, name)
                assert torch.equal(held[name].detach(), tensor.detach()), (where, name)
    assert made.state_dict().keys() == module.state_dict().keys(), where
    for name, submodule in module.named_modules():
        assert made.get_submodule(name)._buffers.keys() == submodule._buffers.keys(), where
