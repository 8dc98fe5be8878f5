"""Models and batches for tests that need no more."""

from __future__ import annotations

import torch
from torch import nn

FEATURES, CLASSES = 4, 3


def mlp() -> nn.Module:
    """Dropout draws random numbers, BatchNorm keeps buffers."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES))


def plain() -> nn.Module:
    """Nothing whose result depends on how a batch is split."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


class Tied(nn.Module):
    """A weight used in two places, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(FEATURES, CLASSES)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.decode(torch.relu(self.encode(x)))))
        return out


def batches(sizes: tuple[int, ...], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, FEATURES, generator=generator), torch.randint(CLASSES, (n,), generator=generator))
        for n in sizes
    ]
