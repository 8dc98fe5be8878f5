"""The Trainer of Hugging Face's transformers: ``resume_from_checkpoint``, and ``compute_loss_func``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from bench.peers.legs import Leg, Params, Step, Way, batch_trained, hooks
from bench.peers.problem import BATCH, IGNORED, LR, Network, cross_entropy, step_data, train_data, val_data

__all__ = ["ADAPTER"]


class _Model(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.network = Network(dropout)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = {"logits": self.network(inputs)}
        return outputs if labels is None else {"loss": cross_entropy(outputs["logits"], labels), **outputs}


class _OwnEvalLoader(Trainer):
    """With a loader for evaluation that has a generator of its own."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(self.eval_dataset, BATCH, shuffle=True, generator=generator, collate_fn=self.data_collator)


class _Kill(TrainerCallback):
    def __init__(self, leg: Leg) -> None:
        self.leg = leg

    def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
        batch_trained(self.leg)


class _Reads(TrainerCallback):
    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        sum(float(tensor.detach().norm()) for tensor in keywords["model"].parameters())


def _logger() -> TrainerCallback:
    """A callback that logs the name of every hook, but of those of checkpoints and of set-up."""

    def logging(name: str) -> Any:
        return lambda *arguments, **keywords: hooks.append(name)

    names = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in ("on_save", "on_init_end")]
    return type("Logs", (TrainerCallback,), {name: logging(name) for name in names})()


def _rows(inputs: Tensor, labels: Tensor) -> Sequence[dict[str, Tensor]]:
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def _total(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """As the documentation of ``compute_loss_func`` gives it: a sum, over the targets of all microbatches."""
    total = F.cross_entropy(outputs["logits"], labels, ignore_index=IGNORED, reduction="sum")
    return total / num_items_in_batch


def _arguments(leg: Leg, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=leg.folder or tempfile.gettempdir(),
        use_cpu=True,
        seed=0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        **settings,
    )


class HuggingFaceTrainer:
    name = "Hugging Face Trainer"
    packages = ("transformers", "accelerate")
    ways = (Way("its own loaders"),)
    step_ways = (Way("the loss of the model"), Way("compute_loss_func", style="compute_loss_func"))

    def train(self, leg: Leg) -> Params:
        model = _Model()
        callbacks: list[TrainerCallback] = [_Kill(leg)]
        if leg.observe:
            callbacks.append(_Reads())
        if leg.log:
            callbacks.append(_logger())
        evaluation = {None: "no", "epoch": "epoch"}.get(leg.evaluate, "steps")  # type: ignore[call-overload]
        arguments = _arguments(
            leg,
            num_train_epochs=leg.epochs,
            per_device_train_batch_size=BATCH // leg.accumulate,
            gradient_accumulation_steps=leg.accumulate,
            learning_rate=LR,
            eval_strategy=evaluation,
            eval_steps=leg.evaluate if evaluation == "steps" else None,
            save_strategy="no" if leg.kill_after is None else "steps",
            save_steps=leg.kill_after or 500,
        )
        trainer = (_OwnEvalLoader if leg.generators else Trainer)(
            model=model,
            args=arguments,
            train_dataset=_rows(*train_data().tensors),
            eval_dataset=_rows(*val_data().tensors),
            callbacks=callbacks,
        )
        trainer.train(resume_from_checkpoint=True if leg.resume else None)
        return dict(model.named_parameters())

    def step(self, step: Step) -> Params:
        model = _Model(0.0)
        data = _rows(*step_data(step))
        size = 4 if step.split else len(data)
        trainer = Trainer(
            model=model,
            args=_arguments(
                Leg(),
                num_train_epochs=1,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=-(-len(data) // size),
                train_sampling_strategy="sequential",
                max_grad_norm=0.0,
                save_strategy="no",
            ),
            train_dataset=data,
            compute_loss_func=_total if step.style else None,
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        )
        trainer.train()
        return dict(model.named_parameters())


ADAPTER = HuggingFaceTrainer()
