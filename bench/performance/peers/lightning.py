"""Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from bench.performance.workloads import Endless, Workload

__all__ = ["train"]


class _Module(LightningModule):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model()
        self.loss = workload.loss

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return self.loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class _Tick(Callback):
    def __init__(self, tick: Callable[[], None], count: int) -> None:
        self.tick, self.count = tick, count

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % self.count == 0:
            self.tick()


def train(workload: Workload, tick: Callable[[], None]) -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=-1,
        max_epochs=-1,
        accumulate_grad_batches=workload.microbatches,
        callbacks=[_Tick(tick, workload.microbatches)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=False,
    )
    trainer.fit(_Module(workload), Endless(workload.micro_data()))
