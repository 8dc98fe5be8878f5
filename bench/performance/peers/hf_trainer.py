"""The Trainer of Hugging Face's transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from bench.performance.workloads import Endless, Workload

__all__ = ["train"]


class _Model(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model()
        self.loss = workload.loss

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.model(inputs)
        return {"loss": self.loss(outputs, labels), "logits": outputs}


class _Tick(TrainerCallback):
    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.tick()


class _Trainer(Trainer):
    """Over batches that are there already."""

    batches: Any = None

    def get_train_dataloader(self) -> Any:
        return self.batches


def train(workload: Workload, tick: Callable[[], None]) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=10**9,
            gradient_accumulation_steps=workload.microbatches,
            optim="adamw_torch_fused",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        model = _Model(workload)
        trainer = _Trainer(model=model, args=arguments, callbacks=[_Tick(tick)], train_dataset=_Nothing())
        trainer.batches = Endless([{"inputs": x, "labels": y} for x, y in workload.micro_data()])
        trainer.train()


class _Nothing(torch.utils.data.IterableDataset[Any]):
    """The Trainer wants a dataset, and asks it nothing where the loader is given."""

    def __iter__(self) -> Any:
        return iter(())
