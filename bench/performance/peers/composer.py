"""Composer's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer import Callback, ComposerModel, Trainer
from composer.core import DataSpec, Event, State
from torch import Tensor

from bench.performance.workloads import Endless, Workload

__all__ = ["train"]


class _Model(ComposerModel):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model()
        self.compute = workload.loss

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model(batch[0])

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.compute(outputs, batch[1])


class _Tick(Callback):
    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        if event is Event.BATCH_END:
            self.tick()


def train(workload: Workload, tick: Callable[[], None]) -> None:
    torch.manual_seed(0)
    model = _Model(workload)
    size = len(workload.data()[0][0])
    Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        train_dataloader=DataSpec(Endless(workload.data()), get_num_samples_in_batch=lambda batch: len(batch[0])),
        max_duration="1000000000ba",
        device="cpu",
        device_train_microbatch_size=size // workload.microbatches,
        callbacks=[_Tick(tick)],
        progress_bar=False,
        log_to_console=False,
        auto_log_hparams=False,
    ).fit()
