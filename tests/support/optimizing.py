"""Parameters and gradients for optimizers, a model and a loop by hand over torch's, and what ours make of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import optree
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer
from pure_loop.random import derive, seeded, seeded_all
from pure_loop.ranges import settings_of
from pure_loop.time import Timestamp
from tests.support import problem

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SHAPES = [(), (3,), (2, 5), (37,), (2, 3, 4, 4), (0,)]
Step = Sequence[Tensor | None]
_MADE = {name: getattr(pl.optim, name) for name in pl.optim.__all__}
RULES: dict[str, Callable[..., Optimizer]] = {
    name: make for name, make in _MADE.items() if inspect.isfunction(make) and "lr" in settings_of(make)
}
"""The optimizers of the library, by their names: the functions with a learning rate that has a range."""
ELEMENTWISE = {name: make for name, make in RULES.items() if make().elementwise}
"""Those that take parameters of every shape, each number by itself."""


def tensors(seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def batches(seed: int, dtype: torch.dtype, count: int = 4) -> list[list[Tensor]]:
    return [tensors(seed + i + 1, dtype) for i in range(count)]


def named(values: Sequence[Any]) -> FrozenDict[str, Any]:
    return FrozenDict({f"p{i}": value for i, value in enumerate(values)})


def ours(
    opt: Optimizer, start: Sequence[Tensor], steps: Sequence[Step]
) -> list[tuple[FrozenDict[str, Tensor], FrozenDict[str, Any]]]:
    """Parameters and optimizer state, at first and after each step."""
    params = named(start)
    state = opt.init(params)
    results = [(params, state)]
    for batch, grads in enumerate(steps):
        params, state = opt.update(named(grads), state, params, Timestamp(batch=batch))
        results.append((params, state))
    return results


def assert_same(a: Any, b: Any) -> None:
    """Two trees of equal tensors and equal other values."""
    (leaves, structure), (others, other) = (optree.tree_flatten(x, namespace="pure_loop") for x in (a, b))
    assert structure == other
    for x, y in zip(leaves, others, strict=True):
        assert type(x) is type(y)
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


class Branches(nn.Module):
    """For ``problem.points``: a layer that only some batches use, and without biases only matrices."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5, bias=bias), nn.Linear(5, 3, bias=bias)
        self.sometimes = nn.Linear(4, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if x[0, 0] > 0:
            hidden = hidden + self.sometimes(x)
        return self.last(hidden.tanh())  # type: ignore[no-any-return]


def branches(bias: bool = True) -> nn.Module:
    with seeded(1):
        return Branches(bias)


def by_hand(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    data: Sequence[tuple[Tensor, Tensor]],
    rates: Sequence[Callable[[Timestamp], float] | None] = (),
    epochs: int = 1,
) -> list[dict[str, Tensor]]:
    """Parameters after each batch of a plain loop over torch's own optimizers, of these rates."""
    after = []
    for number in range(epochs * len(data)):
        inputs, targets = data[number % len(data)]
        module.zero_grad()
        problem.cross_entropy(module(inputs), targets).backward()
        # Where a class draws random numbers, they are of the run's seed and this batch.
        with seeded_all(derive(0, "update", number // len(data), number)):
            for optimizer, lr in zip_longest(optimizers, rates):
                if lr is not None:
                    optimizer.param_groups[0]["lr"] = lr(Timestamp(batch=number))
                optimizer.step()
        after.append({name: param.detach().clone() for name, param in module.named_parameters()})
    module.zero_grad()
    return after
