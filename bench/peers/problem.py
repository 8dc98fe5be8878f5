"""What every library trains: a network with dropout, 40 samples, 3 epochs of 5 batches; and a record of what it did.

The record holds, for each forward in training, which samples went through the model and a digest of the dropout mask.
Where two runs differ, it says in what.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bench.peers.legs import Leg, Step

__all__ = ["BATCH", "EPOCHS", "IGNORED", "LR", "Network", "cross_entropy", "loaders", "record", "recorded", "samples"]
__all__ += ["step_batches", "step_data", "train_data", "val_data"]

SAMPLES, FEATURES, CLASSES = 40, 5, 3
BATCH, EPOCHS, LR = 8, 3, 0.01
IGNORED = -100

# (samples, digest of the dropout mask) of each forward in training.
recorded: list[tuple[list[int], str]] = []


def record(inputs: Tensor, hidden: Tensor) -> None:
    """Record a forward in training. The first feature of a sample is its number; ``tanh`` is zero nowhere else."""
    mask = (hidden.detach() != 0).numpy().tobytes()
    recorded.append(((inputs[:, 0] * SAMPLES).round().int().tolist(), hashlib.sha256(mask).hexdigest()[:12]))


class Network(nn.Module):
    """A linear layer, tanh, dropout, a linear layer; its weights depend on nothing that was drawn before."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(inputs)))
        if self.training:
            record(inputs, hidden)
        return self.last(hidden)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs ``(count, 5)``, whose first column is the number of the sample, and targets ``(count,)``."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    inputs[:, 0] = torch.arange(count) / SAMPLES
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def train_data() -> TensorDataset:
    return TensorDataset(*samples(SAMPLES, seed=1))


def val_data() -> TensorDataset:
    return TensorDataset(*samples(16, seed=2))


def loaders(leg: Leg, workers: int = 0) -> tuple[DataLoader, DataLoader]:
    """The loaders of training and of evaluation; both shuffle. With accumulation a batch is one microbatch."""
    kind = DataLoader
    if leg.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as kind  # noqa: N813

    def made(data: TensorDataset, size: int, seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed) if leg.generators else None
        return kind(data, batch_size=size, shuffle=True, generator=generator, num_workers=workers)

    return made(train_data(), BATCH // leg.accumulate, 3), made(val_data(), BATCH, 4)


def step_data(step: Step) -> tuple[Tensor, Tensor]:
    """Six samples; or eight, of which three of the first four have ignored targets."""
    inputs, targets = samples(8 if step.ignored else 6, seed=5)
    if step.ignored:
        targets[:3] = IGNORED
    return inputs, targets


def step_batches(step: Step) -> DataLoader:
    """All samples at once, or four at a time."""
    return DataLoader(TensorDataset(*step_data(step)), batch_size=4 if step.split else 8)
