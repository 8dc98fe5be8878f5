"""The workloads: real models at sizes where the loop's own cost shows (W1, W4) and where it should not (W2, W3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    *("GPT", "LARGE", "SCALED", "SCALED_MICROBATCHES", "WORKLOADS", "Endless", "Workload"),
    *("gpt", "mlp", "residual_blocks", "wide"),
]


@attrs.frozen
class Workload:
    """A model, a batch, and in how many microbatches it runs."""

    name: str
    describe: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    microbatches: int = 1

    def data(self) -> list[Any]:
        torch.manual_seed(1)
        return [self.batch() for _ in range(8)]

    def micro_data(self) -> list[Any]:
        """The batches in the pieces that go through the model at once, for loops that are given those."""
        return [
            piece
            for inputs, targets in self.data()
            for piece in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        ]


class Endless:
    """A loader that never ends, of batches that are there already."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


def mlp(width: int = 128) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


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


def residual_blocks(blocks: int, width: int = 32) -> nn.Module:
    """Six small tensors a block, and four."""
    return nn.Sequential(nn.Linear(64, width), *[_Block(width) for _ in range(blocks)], nn.Linear(width, 10))


class _Residual(nn.Module):
    """A ResNet's basic block."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def _resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(_Residual(16, 16, 1), _Residual(16, 32, 2), _Residual(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


class _GPT(nn.Module):
    """A causal transformer: 4 layers, width 128; the head's weight may be that of the embedding."""

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 128,
        layers: int = 4,
        length: int = 128,
        heads: int = 4,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.project = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            nn.init.normal_(self.token.weight, std=0.02)  # as logits are to begin with
            self.head.weight = self.token.weight
        self.heads = heads

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


def _tokens(samples: int = 8, length: int = 128, vocabulary: int = 256) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocabulary, (samples, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


WORKLOADS = [
    Workload("W1", "MLP 64-128-10, batch 32", mlp, _classes(32, 64)),
    Workload("W1a4", "the same in 4 microbatches", mlp, _classes(32, 64), microbatches=4),
    Workload("W2", "two convolutions with BatchNorm, 8x8 pixels, batch 64", _convolutions, _classes(64, 1, 8, 8)),
    Workload("W3", "GPT, 4 layers of 128, 128 tokens, batch 8", _GPT, _tokens),
    Workload("W4", "MLP of 48 residual blocks, 292 tensors, batch 16", lambda: residual_blocks(48), _classes(16, 64)),
    Workload("W5", "ResNet-8 with BatchNorm, 32x32 pixels, batch 32", _resnet, _classes(32, 3, 32, 32)),
]


def wide(width: int) -> nn.Module:
    """Six layers of one width, and two more."""
    inside = [module for _ in range(6) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *inside, nn.Linear(width, 10))


# Of which a step is mostly the optimizer's, and memory for gradients.
LARGE = [
    Workload("6M", "MLP of 6 million parameters, batch 32", lambda: wide(1024), _classes(32, 64)),
    Workload("25M", "MLP of 25 million parameters, batch 32", lambda: wide(2048), _classes(32, 64)),
]

# For memory: 25 million parameters, and a batch so small that activations are nothing beside them.
SCALED = Workload(
    "W3 scaled", "GPT, 8 layers of 512, 25 million parameters", lambda: _GPT(width=512, layers=8), lambda: _tokens(1, 8)
)
SCALED_MICROBATCHES = attrs.evolve(SCALED, batch=lambda: _tokens(4, 8), microbatches=4)


def gpt(layers: int, width: int, length: int, vocabulary: int, samples: int) -> tuple[Callable[[], nn.Module], Any]:
    """A GPT with a tied head and heads of 64, and what makes batches of it."""
    heads = max(width // 64, 1)
    return (
        lambda: _GPT(vocabulary, width, layers, length, heads, tied=True),
        lambda: _tokens(samples, length, vocabulary),
    )


# For a GPU: 12 layers of 768.
GPT = Workload("GPT", "GPT of 124 million parameters, batch of 8 x 1024 tokens", *gpt(12, 768, 1024, 50304, 8))
