"""Accelerate: a loop by hand over what it prepared."""

from __future__ import annotations

import itertools

import torch
from accelerate import Accelerator

from bench.performance.turns import Steps
from bench.performance.workloads import Workload

__all__ = ["steps"]


def steps(workload: Workload) -> Steps:
    torch.manual_seed(0)
    count = workload.microbatches
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count)
    model = workload.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    for index, (inputs, targets) in enumerate(itertools.cycle(workload.micro_data())):
        with accelerator.accumulate(model):
            accelerator.backward(workload.loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if (index + 1) % count == 0:
            yield 1
