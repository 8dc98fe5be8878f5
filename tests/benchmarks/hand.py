"""The loop that one would write by hand. This module does not import pure_loop, nor anything that does."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from tests.benchmarks.turns import Steps
from tests.benchmarks.workloads import Workload

__all__ = ["hand_written", "kernels_alone"]


def hand_written(*, fused: bool = False, compiled: bool = False) -> Callable[[Workload], Steps]:
    """zero_grad, forward, loss, backward, AdamW."""

    def loop(workload: Workload) -> Steps:
        torch.manual_seed(0)
        model = workload.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
        forward = torch.compile(model) if compiled else model
        count = workload.microbatches
        size = len(workload.data()[0][0]) // count
        for inputs, targets in itertools.cycle(workload.data()):
            optimizer.zero_grad()
            if count == 1:
                workload.loss(forward(inputs), targets).backward()
            else:
                for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                    (workload.loss(forward(x), y) / count).backward()
            optimizer.step()
            yield 1

    return loop


def kernels_alone(workload: Workload) -> Steps:
    """Forward, loss, autograd's engine and the fused kernel called directly: what is left if a loop costs nothing."""
    torch.manual_seed(0)
    model = workload.model()
    leaves = list(model.parameters())
    params = [leaf.detach() for leaf in leaves]
    averages, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    step, one, scale, found = torch.zeros(()), torch.ones(()), torch.ones(1), torch.zeros(1)
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8}
    count = workload.microbatches
    size = len(workload.data()[0][0]) // count
    for inputs, targets in itertools.cycle(workload.data()):
        total: list[torch.Tensor] = []
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            loss = workload.loss(model(x), y)
            seed = torch.full_like(loss, 1 / count)
            grads = torch.autograd.graph._engine_run_backward(
                (loss,), (seed,), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
            )
            total = list(torch._foreach_add(total, grads)) if total else list(grads)
        with torch.no_grad():
            step = torch.add(step, one)
            steps = [step] * len(params)
            torch._fused_adamw_(params, total, averages, squares, [], steps, **rates, amsgrad=False, maximize=False)
            torch._amp_foreach_non_finite_check_and_unscale_(params, found, scale)
            if found.item():
                raise ArithmeticError("not finite")
        yield 1
