"""Composer's Trainer: ``save_interval`` and ``load_path``, ``device_train_microbatch_size``."""

from __future__ import annotations

from typing import Any

import torch
from composer import Callback, ComposerModel, Evaluator, Trainer
from composer.core import DataSpec, Event, State
from composer.utils.dist import get_sampler
from torch import Tensor
from torch.utils.data import DataLoader

from bench.peers.legs import Leg, Params, Step, Way, batch_trained, hooks
from bench.peers.problem import BATCH, IGNORED, LR, Network, cross_entropy, loaders, step_batches

__all__ = ["ADAPTER"]


class _Model(ComposerModel):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.network = Network(dropout)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.network(batch[0])

    def eval_forward(self, batch: tuple[Tensor, Tensor], outputs: Any = None) -> Tensor:
        return self.network(batch[0])

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(outputs, batch[1])


class _Kill(Callback):
    def __init__(self, leg: Leg) -> None:
        self.leg = leg

    def batch_start(self, state: State, logger: Any) -> None:
        batch_trained(self.leg)


class _Reads(Callback):
    def batch_end(self, state: State, logger: Any) -> None:
        sum(float(tensor.detach().norm()) for tensor in state.model.parameters())


class _Log(Callback):
    def run_event(self, event: Event, state: State, logger: Any) -> None:
        if event not in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD):
            hooks.append(event.name)


_QUIET: dict[str, Any] = {
    "device": "cpu",
    "progress_bar": False,
    "log_to_console": False,
    "auto_log_hparams": False,
    "seed": 0,
}


class Composer:
    name = "Composer"
    packages = ("mosaicml",)
    ways = (
        Way("DataLoader"),
        Way("DataLoader with a generator", generators=True),
        Way("dist.get_sampler", style="sampler"),
    )
    step_ways = (
        Way("device_train_microbatch_size"),
        Way("accumulate_train_batch_on_tokens", style="tokens"),
    )

    def train(self, leg: Leg) -> Params:
        train, val = loaders(Leg(generators=leg.generators))
        if leg.style == "sampler":
            train = DataLoader(train.dataset, BATCH, sampler=get_sampler(train.dataset, shuffle=True))
        model = _Model()
        callbacks: list[Callback] = [_Kill(leg)]
        if leg.observe:
            callbacks.append(_Reads())
        if leg.log:
            callbacks.append(_Log())
        saves: dict[str, Any] = {}
        if leg.kill_after is not None:
            ended = leg.kill_after in (5, 10)
            interval = f"{leg.kill_after // 5}ep" if ended else f"{leg.kill_after}ba"
            saves = {"save_folder": leg.folder, "save_interval": interval, "save_filename": "checkpoint.pt"}
        interval = f"{leg.evaluate}ba" if isinstance(leg.evaluate, int) else "1ep"
        evaluator = Evaluator(label="val", dataloader=val, metric_names=[])
        Trainer(
            **_QUIET,
            **saves,
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=LR),
            train_dataloader=train,
            eval_dataloader=evaluator if leg.evaluate else None,
            eval_interval=interval,
            max_duration=f"{leg.epochs}ep",
            device_train_microbatch_size=BATCH // leg.accumulate,
            load_path=f"{leg.folder}/checkpoint.pt" if leg.resume else None,
            callbacks=callbacks,
        ).fit()
        return dict(model.named_parameters())

    def step(self, step: Step) -> Params:
        model = _Model(0.0)
        (batch,) = step_batches(Step(split=False, ignored=step.ignored))

        def tokens(batch: tuple[Tensor, Tensor]) -> dict[str, int]:
            return {"total": len(batch[1]), "loss_generating": int((batch[1] != IGNORED).sum())}

        Trainer(
            **_QUIET,
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=DataSpec([batch], get_num_tokens_in_batch=tokens if step.style else None),
            max_duration="1ba",
            device_train_microbatch_size=4 if step.split else len(batch[0]),
            accumulate_train_batch_on_tokens=bool(step.style),
        ).fit()
        return dict(model.named_parameters())


ADAPTER = Composer()
