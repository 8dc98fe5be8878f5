"""The loop that tutorials show: what it saves is the model, the optimizer and where it is."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from bench.peers.legs import Leg, NotOfferedError, Params, Step, Way, batch_trained
from bench.peers.problem import LR, Network, cross_entropy, loaders, step_batches

__all__ = ["ADAPTER"]


class ByHand:
    name = "loop by hand"
    packages = ("torch",)
    ways = (Way("DataLoader"), Way("DataLoader with a generator", generators=True))
    step_ways = (Way("loss / accumulation"),)

    def train(self, leg: Leg) -> Params:
        if leg.log:
            raise NotOfferedError("it has no events")
        (train, val), path = loaders(leg), Path(leg.folder) / "checkpoint.pt"
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        epoch = skipped = 0
        if leg.resume:
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            epoch, skipped = divmod(saved["batches"], len(train))
        batches = epoch * len(train) + skipped
        for _ in range(epoch, leg.epochs):
            for inputs, targets in itertools.islice(train, skipped, None):
                batch_trained(leg)
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                batches += 1
                if leg.observe:
                    sum(float(tensor.detach().norm()) for tensor in model.parameters())
                if batches == leg.kill_after:
                    torch.save(
                        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches}, path
                    )
            skipped = 0
            if leg.evaluate:
                model.eval()
                with torch.no_grad():
                    sum(cross_entropy(model(inputs), targets) for inputs, targets in val)
                model.train()
        return dict(model.named_parameters())

    def step(self, step: Step) -> Params:
        model = Network(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = step_batches(step)
        for inputs, targets in batches:
            (cross_entropy(model(inputs), targets) / len(batches)).backward()
        optimizer.step()
        return dict(model.named_parameters())


ADAPTER = ByHand()
