"""Lightning's Trainer: ``ModelCheckpoint``, ``fit(ckpt_path=...)``, ``accumulate_grad_batches``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from bench.peers.legs import Leg, Params, Step, Way, batch_trained, hooks
from bench.peers.problem import LR, Network, cross_entropy, loaders, step_batches

__all__ = ["ADAPTER"]


class _Module(LightningModule):
    def __init__(self, dropout: float = 0.3, optimizer: Any = None) -> None:
        super().__init__()
        self.network = Network(dropout)
        self.made = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=LR))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.made(self.parameters())


class _Kill(Callback):
    def __init__(self, leg: Leg) -> None:
        self.leg = leg

    def on_train_batch_start(self, *arguments: Any) -> None:
        batch_trained(self.leg)


class _Reads(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        sum(float(tensor.detach().norm()) for tensor in module.parameters())


class _KeepsRandomState(Callback):
    """What Lightning's checkpoints lack, through the hooks that it has for more state."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.random = checkpoint["random"]

    def on_train_batch_start(self, *arguments: Any) -> None:
        random, self.random = getattr(self, "random", None), None
        if random is not None:
            torch.set_rng_state(random)


def _logger() -> Callback:
    """A callback that logs the name of every hook, but of those of checkpoints and of set-up."""

    def logging(name: str) -> Any:
        return lambda *arguments, **keywords: hooks.append(name)

    names = [name for name in dir(Callback) if name.startswith("on_") and "checkpoint" not in name]
    return type("Logs", (Callback,), {name: logging(name) for name in names})()


_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Lightning:
    name = "Lightning"
    packages = ("lightning", "torchdata")
    ways = (
        Way("DataLoader"),
        Way("DataLoader with a generator", generators=True),
        Way("StatefulDataLoader", stateful=True),
        Way("StatefulDataLoader with a generator", stateful=True, generators=True),
        Way("StatefulDataLoader, and a callback that keeps torch's random state", True, style="random", beyond=True),
    )
    step_ways = (Way("accumulate_grad_batches"),)

    def train(self, leg: Leg) -> Params:
        train, val = loaders(leg)
        module = _Module()
        callbacks: list[Callback] = [_Kill(leg)]
        if leg.style == "random":
            callbacks.append(_KeepsRandomState())
        if leg.observe:
            callbacks.append(_Reads())
        if leg.log:
            callbacks.append(_logger())
        if leg.kill_after is not None:
            saves: dict[str, Any] = {"every_n_train_steps": leg.kill_after}
            if leg.kill_after in (5, 10):
                saves = {"every_n_epochs": leg.kill_after // 5, "save_on_train_epoch_end": True}
            callbacks.append(ModelCheckpoint(leg.folder, "checkpoint", save_top_k=-1, **saves))
        # An interval in batches is one of the loader's, which are microbatches.
        interval = leg.evaluate * leg.accumulate if isinstance(leg.evaluate, int) else 1.0
        trainer = Trainer(
            **_QUIET,
            max_epochs=leg.epochs,
            callbacks=callbacks,
            enable_checkpointing=leg.kill_after is not None,
            accumulate_grad_batches=leg.accumulate,
            val_check_interval=interval,
            num_sanity_val_steps=0,
        )
        path = f"{leg.folder}/checkpoint.ckpt" if leg.resume else None
        trainer.fit(module, train, val if leg.evaluate else None, ckpt_path=path)
        return dict(module.named_parameters())

    def step(self, step: Step) -> Params:
        module = _Module(0.0, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        batches = step_batches(step)
        Trainer(**_QUIET, max_epochs=1, enable_checkpointing=False, accumulate_grad_batches=len(batches)).fit(
            module, batches
        )
        return dict(module.named_parameters())


ADAPTER = Lightning()
