"""The workloads: real models at sizes where the loop's own cost shows (W1, W4) and where it should not (W2, W3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["WORKLOADS", "Workload"]


@attrs.frozen
class Workload:
    """A model, a batch, and in how many microbatches it runs."""

    name: str
    describe: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    microbatches: int = 1
    limit: float | None = None

    def data(self) -> list[Any]:
        torch.manual_seed(1)
        return [self.batch() for _ in range(8)]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


class _Block(nn.Module):
    """One residual block of the 300-tensor MLP: six small tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def _many_tensors() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), *[_Block(32) for _ in range(48)], nn.Linear(32, 10))


class _GPT(nn.Module):
    """A causal transformer: 4 layers, width 128."""

    def __init__(self, vocabulary: int = 256, width: int = 128, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.project = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.heads = 4

    def forward(self, ids: Tensor) -> Tensor:
        n, length = ids.shape
        x = self.token(ids) + self.position.weight[:length]
        for index, attend in enumerate(self.attention):
            parts = attend(self.norms[2 * index](x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.project[index](mixed.transpose(1, 2).reshape(n, length, -1))
            x = x + self.down[index](F.gelu(self.up[index](self.norms[2 * index + 1](x))))
        out: Tensor = self.head(x).transpose(1, 2)
        return out


def _classes(n: int, *shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(n, *shape), torch.randint(10, (n,)))


def _tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(256, (8, 129))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


WORKLOADS = [
    Workload("W1", "MLP 64-128-10, batch 32", _mlp, _classes(32, 64), limit=1.2),
    Workload("W1a4", "the same in 4 microbatches", _mlp, _classes(32, 64), microbatches=4),
    Workload("W2", "conv-BN twice, two linear, 8x8, batch 64", _convolutions, _classes(64, 1, 8, 8)),
    Workload("W3", "GPT, 4 layers of 128, 128 tokens, batch 8", _GPT, _tokens),
    Workload("W4", "48 residual blocks, 292 tensors, batch 16", _many_tensors, _classes(16, 64), limit=1.15),
]
