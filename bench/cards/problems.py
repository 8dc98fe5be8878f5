"""Two real problems that train in seconds on a CPU: handwritten digits, and the standard library's own text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl

__all__ = ["PROBLEMS", "Block", "CardProblem"]

BATCH = 64
CONTEXT = 64


class Block(nn.Module):
    """A residual block of two convolutions, or of linear layers."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(images + self.layers(images))


def convolutions(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """A residual network for images of any size; 41,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), norm(32), nn.ReLU(), Block(32, norm), nn.MaxPool2d(2)),
        *(Block(32, norm), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(8, channels)


class Reader(nn.Module):
    """A causal transformer that reads characters; 75,000 parameters."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(96, size)
        self.positions = nn.Embedding(CONTEXT, size)
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(size, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        places = torch.arange(length, device=tokens.device)
        features = self.layers(self.characters(tokens) + self.positions(places), mask=mask, is_causal=True)
        logits: Tensor = self.head(features)
        return logits.transpose(1, 2)


@functools.cache
def digits() -> tuple[list[Any], list[Any]]:
    """Batches of 360 images of 8 by 8 pixels from 0 to 1 to train on, and of 1437 to test with."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    targets = torch.tensor(labels, dtype=torch.int64)[order]
    return _batches(inputs[:360], targets[:360]), _batches(inputs[360:], targets[360:], 512)


@functools.cache
def text() -> tuple[list[Any], list[Any]]:
    """Windows of 64 characters of Python's help texts, and of texts at their end that no window of training has."""
    from pydoc_data.topics import topics

    content = "\n".join(topics[name] for name in sorted(topics))
    codes = torch.tensor([ord(letter) - 32 if 32 <= ord(letter) < 127 else 95 for letter in content])
    end = int(0.9 * len(codes))
    starts = torch.randint(end - CONTEXT - 1, (120 * 32,), generator=torch.Generator().manual_seed(0))
    later = torch.arange(end, len(codes) - CONTEXT - 1, CONTEXT)[:256]
    return tuple(  # type: ignore[return-value]
        _batches(*(torch.stack([codes[i + shift : i + shift + CONTEXT] for i in places]) for shift in (0, 1)), 32)
        for places in (starts.tolist(), later.tolist())
    )


def _batches(inputs: Tensor, targets: Tensor, size: int = BATCH) -> list[Any]:
    return list(zip(inputs.split(size), targets.split(size), strict=True))


@attrs.frozen
class CardProblem:
    """A problem of the cards.

    Attributes:
        title: what it is, in words.
        model: makes the model.
        data: batches to train on, and to test with.
        metric: what is compared, by the name of an evaluator's metric; ``better`` says which way.
        max_duration: of one run.
    """

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[list[Any], list[Any]]]
    metric: str
    better: str
    max_duration: str

    def settings(self) -> dict[str, Any]:
        """Arguments of ``fit``."""
        _, test = self.data()
        metrics = {"loss": pl.metrics.loss()}
        if self.metric == "accuracy":
            metrics["accuracy"] = pl.metrics.accuracy()
        return {
            "loss": functional.cross_entropy,
            "optimizer": pl.optim.adamw(lr=pl.schedules.cosine(self.max_duration, peak=3e-3), weight_decay=0.01),
            "max_duration": self.max_duration,
            "evaluators": {"val": pl.Evaluator(test, metrics=metrics)},
            "eval_interval": self.max_duration,
        }


_DIGITS = "40 epochs of scikit-learn's digits (360 images to train on, 1437 to test with), "
PROBLEMS = {
    "digits": CardProblem(
        _DIGITS + "a residual network of 41,000 parameters", convolutions, digits, "accuracy", "higher", "40ep"
    ),
    "digits, group norms": CardProblem(
        _DIGITS + "a residual network with group norms",
        *(functools.partial(convolutions, group_norm), digits, "accuracy", "higher", "40ep"),
    ),
    "digits, an ensemble": CardProblem(
        "16 epochs of scikit-learn's digits (360 images to train on, 1437 to test with), 8 networks of 4,800 "
        "parameters with SGD at rates from 0.001 to 1",
        *(layers, digits, "accuracy", "higher", "16ep"),
    ),
    "text": CardProblem(
        "2 epochs of 120 batches of Python's help texts, a causal transformer of 75,000 parameters over characters",
        *(Reader, text, "loss", "lower", "2ep"),
    ),
}
