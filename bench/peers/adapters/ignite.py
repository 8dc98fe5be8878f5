"""Ignite: ``create_supervised_trainer(deterministic=True)``, and ``Checkpoint`` of model, optimizer and trainer."""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.utils import manual_seed

from bench.peers.legs import Leg, Params, Step, Way, batch_trained, hooks
from bench.peers.problem import LR, Network, cross_entropy, loaders, step_batches

__all__ = ["ADAPTER"]


class Ignite:
    name = "Ignite"
    packages = ("pytorch-ignite",)
    ways = (
        Way("deterministic=True", style="deterministic"),
        Way("deterministic=True, generators", style="deterministic", generators=True),
        Way("Engine"),
        Way("deterministic=True, num_workers=2", style="deterministic workers"),
    )
    step_ways = (Way("gradient_accumulation_steps"),)

    def train(self, leg: Leg) -> Params:
        manual_seed(0)
        train, val = loaders(leg, workers=2 if "workers" in leg.style else 0)
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        trainer = create_supervised_trainer(
            model,
            optimizer,
            cross_entropy,
            deterministic="deterministic" in leg.style,
            gradient_accumulation_steps=leg.accumulate,
        )
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: batch_trained(leg))
        if leg.log:
            _log(trainer)
        if leg.observe:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: [float(x.norm()) for x in _read(model)])
        if leg.evaluate:
            evaluator = create_supervised_evaluator(model)
            event = Events.EPOCH_COMPLETED
            if isinstance(leg.evaluate, int):
                event = Events.ITERATION_COMPLETED(every=leg.evaluate * leg.accumulate)
            trainer.add_event_handler(event, lambda: evaluator.run(val))
        saved = {"model": model, "optimizer": optimizer, "trainer": trainer}
        if leg.kill_after is not None:
            handler = Checkpoint(saved, DiskSaver(leg.folder, require_empty=False), filename_pattern="checkpoint.pt")
            event = Events.ITERATION_COMPLETED(once=leg.kill_after)
            if leg.kill_after in (5, 10):
                event = Events.EPOCH_COMPLETED(once=leg.kill_after // 5)
            trainer.add_event_handler(event, handler)
        if leg.resume:
            Checkpoint.load_objects(saved, torch.load(f"{leg.folder}/checkpoint.pt", weights_only=False))
        trainer.run(train, max_epochs=leg.epochs)
        return dict(model.named_parameters())

    def step(self, step: Step) -> Params:
        model = Network(dropout=0.0)
        batches = step_batches(step)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_supervised_trainer(model, optimizer, cross_entropy, gradient_accumulation_steps=len(batches))
        trainer.run(batches, max_epochs=1)
        return dict(model.named_parameters())


def _read(model: Any) -> Any:
    return [tensor.detach() for tensor in model.parameters()]


def _log(trainer: Engine) -> None:
    def logging(name: str) -> Any:
        return lambda *arguments: hooks.append(name)

    for event in Events:
        if event not in (Events.EXCEPTION_RAISED, Events.TERMINATE, Events.INTERRUPT):
            trainer.add_event_handler(event, logging(event.name))


ADAPTER = Ignite()
