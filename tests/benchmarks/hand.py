"""The loop that one would write by hand. This module does not import pure_loop, nor anything that does."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from tests.benchmarks.turns import Steps
from tests.benchmarks.workloads import Workload

__all__ = ["hand_written"]


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
