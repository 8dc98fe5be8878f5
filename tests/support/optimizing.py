"""Parameters and gradients for optimizers, and what ours and torch's make of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, master_weights, partition
from pure_loop.ranges import settings_of
from pure_loop.time import Timestamp

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
WRAPPERS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "by itself": lambda optimizer: optimizer,
    "master_weights": master_weights,
    "partition": lambda optimizer: partition({"all": optimizer}, label=lambda name, tensor: "all"),
}
"""An optimizer by itself, or inside of another one, by the names of these."""


def tensors(seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def named(values: Sequence[Any]) -> FrozenDict[str, Any]:
    return FrozenDict({f"p{i}": value for i, value in enumerate(values)})


def ours(
    opt: Optimizer, start: Sequence[Tensor], steps: Sequence[Step]
) -> list[tuple[FrozenDict[str, Tensor], FrozenDict[str, Any]]]:
    params = named(start)
    state = opt.init(params)
    results = [(params, state)]
    for batch, grads in enumerate(steps):
        params, state = opt.update(named(grads), state, params, Timestamp(batch=batch))
        results.append((params, state))
    return results


def theirs(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    start: Sequence[Tensor],
    steps: Sequence[Step],
    lr: Callable[[Timestamp], float] | None = None,
) -> list[list[Tensor]]:
    params = [torch.nn.Parameter(p.clone()) for p in start]
    reference = make(params)
    results = [[p.detach().clone() for p in params]]
    for batch, grads in enumerate(steps):
        for group in reference.param_groups if lr is not None else ():
            group["lr"] = lr(Timestamp(batch=batch))
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        reference.step()
        results.append([p.detach().clone() for p in params])
    return results


def assert_equal(results: list[tuple[FrozenDict[str, Tensor], Any]], expected: list[list[Tensor]]) -> None:
    for i, ((params, _), other) in enumerate(zip(results, expected, strict=True)):
        for (name, value), target in zip(params.items(), other, strict=True):
            assert value.dtype == target.dtype
            assert torch.equal(value, target), f"{name} differs after {i} steps: {value} and {target}"


def batches(seed: int, dtype: torch.dtype, count: int = 4) -> list[list[Tensor]]:
    return [tensors(seed + i + 1, dtype) for i in range(count)]


def assert_same(a: Any, b: Any) -> None:
    (leaves, structure), (others, other) = (optree.tree_flatten(x, namespace="pure_loop") for x in (a, b))
    assert structure == other
    for x, y in zip(leaves, others, strict=True):
        assert type(x) is type(y)
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y
