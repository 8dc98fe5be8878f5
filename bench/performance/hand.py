"""The loop that one would write by hand. This module does not import pure_loop, nor anything that does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench.performance.turns import Steps
from bench.performance.workloads import Workload

__all__ = ["hand_written", "kernels_alone"]


def hand_written(
    *,
    fused: bool = False,
    compiled: bool = False,
    loader: Callable[[Workload], Iterable[Any]] = Workload.data,
    optimizer: type[torch.optim.Optimizer] | None = None,
    smoothing: float | None = None,
) -> Callable[[Workload], Steps]:
    """zero_grad, forward, loss, backward, AdamW or another class; one pass over a loader after another.

    ``smoothing``: of a moving average of the parameters, which is updated where it is.
    """

    def loop(workload: Workload) -> Steps:
        torch.manual_seed(0)
        model = workload.model()
        kind: Any = optimizer
        update: Any = (
            torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
            if kind is None
            else kind(model.parameters(), lr=1e-3)
        )
        forward = torch.compile(model) if compiled else model
        count = workload.microbatches
        size = len(workload.data()[0][0]) // count
        average = [] if smoothing is None else [each.detach().clone() for each in model.parameters()]
        for inputs, targets in itertools.chain.from_iterable(itertools.repeat(loader(workload))):
            update.zero_grad()
            if count == 1:
                workload.loss(forward(inputs), targets).backward()
            else:
                for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                    (workload.loss(forward(x), y) / count).backward()
            update.step()
            if smoothing is not None:
                with torch.no_grad():
                    torch._foreach_lerp_(average, list(model.parameters()), 1 - smoothing)
            yield 1

    return loop


def kernels_alone(workload: Workload) -> Steps:
    """Forward, loss, autograd's engine, the fused kernel and a look for NaN, each called directly.

    What is left if a loop costs nothing: it checks nothing, keeps nothing, and whatever can be made once is. The
    module finds its tensors and submodules as attributes, at once.
    """
    torch.manual_seed(0)
    model = workload.model()
    for module in model.modules():
        vars(module).update(module._parameters | module._buffers | module._modules)
    leaves = list(model.parameters())
    params = [leaf.detach() for leaf in leaves]
    averages, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    step, one, scale, found = torch.zeros(()), torch.ones(()), torch.ones(1), torch.zeros(1)
    steps = [step] * len(params)
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8}
    count = workload.microbatches
    size = len(workload.data()[0][0]) // count
    seed = torch.full((), 1 / count)
    engine, inputs = torch.autograd.Variable._execution_engine.run_backward, tuple(leaves)
    for batch in itertools.cycle(workload.data()):
        pieces = [batch] if count == 1 else zip(*(each.split(size) for each in batch), strict=True)
        total: list[torch.Tensor] = []
        for x, y in pieces:
            loss = workload.loss(model(x), y)
            grads = engine((loss,), (seed,), False, False, inputs, allow_unreachable=True, accumulate_grad=False)
            if total:
                torch._foreach_add_(total, grads)
            else:
                total = list(grads)
        del loss, grads
        with torch.no_grad():
            step.add_(one)
            torch._fused_adamw_(params, total, averages, squares, [], steps, **rates, amsgrad=False, maximize=False)
            torch._amp_foreach_non_finite_check_and_unscale_(params, found, scale)
            if found.item():
                raise ArithmeticError("not finite")
        del total
        yield 1
