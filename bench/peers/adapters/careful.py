"""A loop by hand whose author knows the laws: it saves random states, and weighs microbatches by their targets."""

from __future__ import annotations

import itertools
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.peers.legs import Leg, NotOfferedError, Params, Step, Way, batch_trained
from bench.peers.problem import IGNORED, LR, Network, cross_entropy, loaders, step_batches

__all__ = ["ADAPTER"]


class Careful:
    name = "careful loop by hand"
    packages = ("torch",)
    ways = (Way("saves the global state and the loader's generator", generators=True),)
    step_ways = (Way("sum / number of targets in the batch"),)

    def train(self, leg: Leg) -> Params:
        if leg.log:
            raise NotOfferedError("it has no events")
        (train, val), path = loaders(attrs.evolve(leg, generators=True)), Path(leg.folder) / "checkpoint.pt"
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        epoch, skipped, restored = 0, 0, None
        if leg.resume:
            restored = torch.load(path)
            model.load_state_dict(restored["model"])
            optimizer.load_state_dict(restored["optimizer"])
            epoch, skipped = divmod(restored["batches"], len(train))
            train.generator.set_state(restored["shuffling"])

        def save(batches: int, shuffling: Tensor) -> None:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches}
            torch.save(saved | {"random": torch.get_rng_state(), "shuffling": shuffling}, path)

        for epoch in range(epoch, leg.epochs):  # noqa: B020
            # Of the start of the epoch: the permutation is drawn again, and the batches that were seen are skipped.
            shuffling = train.generator.get_state()
            for index, (inputs, targets) in enumerate(itertools.islice(train, skipped, None), skipped + 1):
                batch_trained(leg)
                if restored is not None:  # after the batches that were skipped
                    torch.set_rng_state(restored["random"])
                    restored = None
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                if leg.observe:
                    sum(float(tensor.detach().norm()) for tensor in model.parameters())
                if epoch * len(train) + index == leg.kill_after and index < len(train):
                    save(leg.kill_after, shuffling)
            skipped = 0
            # After the loop, not after its last batch: torch's sampler draws once more where it ends.
            if (epoch + 1) * len(train) == leg.kill_after:
                save(leg.kill_after, train.generator.get_state())
            if leg.evaluate:
                model.eval()
                with torch.no_grad():
                    sum(cross_entropy(model(inputs), targets) for inputs, targets in val)
                model.train()
        return dict(model.named_parameters())

    def step(self, step: Step) -> Params:
        model = Network(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = list(step_batches(step))
        count = sum((targets != IGNORED).sum() for _, targets in batches)
        for inputs, targets in batches:
            (F.cross_entropy(model(inputs), targets, reduction="sum") / count).backward()
        optimizer.step()
        return dict(model.named_parameters())


ADAPTER = Careful()
