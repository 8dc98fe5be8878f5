"""Small models that have what algorithms look for: attention, residual blocks, normalization of each kind, images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop.algorithms import alibi_bias, alibi_slopes
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

    def by_hand(self, x: Tensor, causal: bool) -> Tensor:
        """With linear biases."""
        query, key, value = self.heads(x)
        bias = alibi_bias(alibi_slopes(4), x.shape[1], x.shape[1], causal=causal)
        weights = (query @ key.transpose(-1, -2) / 2**0.5 + bias).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(-2)


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
        out: Tensor = self.head(self.attention(x)).transpose(1, 2)
        return out


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

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
            nn.Conv2d(3, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            Residual(4),
            Residual(4),
            nn.Dropout(0.1),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.Flatten(2),
            nn.LayerNorm(36),
            nn.TransformerEncoderLayer(36, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(288, 3),
        )


def deep() -> nn.Module:
    """Five layers that own parameters, one of them a BatchNorm."""
    with seeded(0):
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        return nn.Sequential(*layers)


def plus(count: int = 4) -> nn.Module:
    """Blocks that add 1, and a linear layer."""
    with seeded(0):
        return nn.Sequential(*(Plus() for _ in range(count)), nn.Linear(4, 3))


class Pixels(nn.Module):
    """A linear layer of pixels (n, 3, 9, 9), bytes or floats, with weights of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(243, 3)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        scale = 1 if pixels.is_floating_point() else 255
        out: Tensor = self.layer(pixels.flatten(1) / scale)
        return out


def pooled(channels: int = 1, classes: int = 3) -> nn.Module:
    """Of images of any size."""
    with seeded(0):
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def pictures(batches: int = 2, size: int = 8, dtype: torch.dtype = torch.uint8) -> list[Any]:
    """Pixels (n, 3, 9, 9) as bytes, or as floats from 0 to 1."""
    g = noise()
    found = []
    for _ in range(batches):
        pixels = torch.randint(256, (size, 3, 9, 9), generator=g, dtype=torch.uint8)
        found.append(
            (pixels if dtype is torch.uint8 else pixels.to(dtype) / 255, torch.randint(3, (size,), generator=g))
        )
    return found
