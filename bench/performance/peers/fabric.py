"""Lightning Fabric: a loop by hand over what it set up."""

from __future__ import annotations

import itertools

import torch
from lightning.fabric import Fabric

from bench.performance.turns import Steps
from bench.performance.workloads import Workload

__all__ = ["steps"]


def steps(workload: Workload) -> Steps:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = workload.model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    count = workload.microbatches
    for index, (inputs, targets) in enumerate(itertools.cycle(workload.micro_data())):
        last = (index + 1) % count == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(workload.loss(model(inputs), targets) / count)
        if last:
            optimizer.step()
            optimizer.zero_grad()
            yield 1
