"""Accelerate: ``save_state``, ``load_state``, ``skip_first_batches`` or stateful loaders, and ``accumulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.nn import functional as F

from bench.peers.legs import Leg, NotOfferedError, Params, Step, Way, batch_trained
from bench.peers.problem import IGNORED, LR, Network, cross_entropy, loaders, step_batches

__all__ = ["ADAPTER"]


class Accelerate:
    name = "Accelerate"
    packages = ("accelerate", "torchdata")
    ways = (
        Way("skip_first_batches"),
        Way("skip_first_batches, generators", generators=True),
        Way("skip_first_batches, use_seedable_sampler", style="seedable"),
        Way("use_stateful_dataloader", stateful=True),
        Way("use_stateful_dataloader, use_seedable_sampler", stateful=True, style="seedable"),
        Way("use_stateful_dataloader, generators", stateful=True, generators=True),
        Way("skip_first_batches, use_seedable_sampler, generators", generators=True, style="seedable"),
        Way("use_stateful_dataloader, use_seedable_sampler, generators", True, True, "seedable"),
    )
    step_ways = (Way("accumulate"), Way("the guide for samples of variable size", style="variable"))

    def train(self, leg: Leg) -> Params:
        if leg.log:
            raise NotOfferedError("the loop is the user's; it has no events")
        set_seed(0)
        configuration = DataLoaderConfiguration(
            use_stateful_dataloader=leg.stateful, use_seedable_sampler=leg.style == "seedable"
        )
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        train, val = loaders(Leg(generators=leg.generators))
        model = Network()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR)
        model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
        epoch = skipped = 0
        if leg.resume:
            accelerator.load_state(f"{leg.folder}/state")
            epoch, skipped = divmod(int(Path(leg.folder, "batches").read_text()), len(train))
        batches = epoch * len(train) + skipped
        for epoch in range(epoch, leg.epochs):  # noqa: B020
            if hasattr(train, "set_epoch"):
                train.set_epoch(epoch)
            # A stateful loader begins where it was; another one skips what was seen.
            left = train if leg.stateful or not skipped else accelerator.skip_first_batches(train, skipped)
            skipped = 0
            for inputs, targets in left:
                batch_trained(leg)
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
                if leg.observe:
                    sum(float(tensor.detach().norm()) for tensor in model.parameters())
                if batches == leg.kill_after and batches % len(train):
                    _save(accelerator, leg, batches)
            if batches == leg.kill_after and not batches % len(train):  # after the loop, as in the examples
                _save(accelerator, leg, batches)
            if leg.evaluate:
                model.eval()
                with torch.no_grad():
                    sum(cross_entropy(model(inputs), targets) for inputs, targets in val)
                model.train()
        return dict(accelerator.unwrap_model(model).named_parameters())

    def step(self, step: Step) -> Params:
        batches = step_batches(step)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(batches))
        model = Network(dropout=0.0)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches)
        # The guide counts the targets of the microbatches of a step, and divides their sums by it.
        taken = list(loader)
        count = sum((targets != IGNORED).sum() for _, targets in taken)
        for inputs, targets in taken if step.style else loader:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                if step.style:
                    loss = F.cross_entropy(outputs, targets, reduction="sum") * len(batches) / count
                else:
                    loss = cross_entropy(outputs, targets)
                accelerator.backward(loss)
                if not step.style:
                    optimizer.step()
                    optimizer.zero_grad()
        if step.style:
            optimizer.step()
        return dict(accelerator.unwrap_model(model).named_parameters())


def _save(accelerator: Accelerator, leg: Leg, batches: int) -> None:
    accelerator.save_state(f"{leg.folder}/state")
    Path(leg.folder, "batches").write_text(str(batches))


ADAPTER = Accelerate()
