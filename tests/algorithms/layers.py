"""Small models that have what algorithms look for: attention, residual blocks, normalization of each kind, images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop.random import seeded
from tests.support.problem import noise


class Attention(nn.Module):
    """Scaled dot product attention of 4 heads over (n, length, 8), whose mask is given as ``how`` says."""

    def __init__(self, how: str = "none") -> None:
        super().__init__()
        self.how, self.project = how, nn.Linear(8, 24)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.project(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        lower = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        masks = {"bool": lower, "float": torch.zeros(lower.shape).masked_fill(~lower, -math.inf)}
        causal = self.how == "causal"
        out = functional.scaled_dot_product_attention(*self.heads(x), masks.get(self.how), is_causal=causal)
        return out.transpose(1, 2).flatten(-2)


class Positions(nn.Module):
    """Nine words, two embeddings of six positions, causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(9, 8), nn.Embedding(6, 8)
        self.attention, self.head = Attention("causal"), nn.Linear(8, 9)
        self.learned = nn.Parameter(torch.ones(1, 6, 8))

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        x = self.words(words) + self.positions(torch.arange(length)) + self.learned[:, :length]
        return self.head(self.attention(x)).transpose(1, 2)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Plus(nn.Module):
    """x to x + 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def residual() -> nn.Module:
    """Of images (n, 3, 12, 12): what each algorithm that changes models can change."""
    with seeded(0):
        return nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), Residual(), Residual(), nn.Dropout(0.1)),
            *(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Flatten(2), nn.LayerNorm(36)),
            nn.TransformerEncoderLayer(36, 2, 16, dropout=0.0, batch_first=True),
            *(nn.Flatten(), nn.Linear(288, 3)),
        )


def plus(count: int = 4) -> nn.Module:
    """Blocks that add 1, and a linear layer."""
    with seeded(0):
        return nn.Sequential(*(Plus() for _ in range(count)), nn.Linear(4, 3))


class Pixels(nn.Sequential):
    """A linear layer, with weights of 0, of pixels (n, 3, 9, 9): bytes, or floats from 0 to 1."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(243, 3))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, pixels: Tensor) -> Any:
        return super().forward(pixels if pixels.is_floating_point() else pixels / 255)


def pooled(channels: int = 1) -> nn.Module:
    """Of images of any size."""
    with seeded(0):
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))


def pictures(batches: int = 2, size: int = 8, dtype: torch.dtype = torch.uint8) -> list[Any]:
    """Pixels (n, 3, 9, 9) as bytes, or as floats from 0 to 1."""
    g = noise()
    pixels = torch.randint(256, (batches, size, 3, 9, 9), generator=g, dtype=torch.uint8)
    given = pixels if dtype is torch.uint8 else pixels.to(dtype) / 255
    return list(zip(given, torch.randint(3, (batches, size), generator=g), strict=True))
