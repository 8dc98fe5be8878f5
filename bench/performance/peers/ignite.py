"""Ignite: an Engine with its own supervised training step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from ignite.engine import Engine, Events, create_supervised_trainer

from bench.performance.workloads import Workload

__all__ = ["train"]


def train(workload: Workload, tick: Callable[[], None]) -> None:
    torch.manual_seed(0)
    model = workload.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trainer = create_supervised_trainer(
        model, optimizer, workload.loss, gradient_accumulation_steps=workload.microbatches
    )
    count = workload.microbatches

    @trainer.on(Events.ITERATION_COMPLETED(every=count))
    def _(engine: Engine) -> None:
        tick()

    trainer.run(itertools.cycle(workload.micro_data()), max_epochs=1, epoch_length=10**9)
