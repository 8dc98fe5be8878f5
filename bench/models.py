"""Small models, their batches and their losses, by name: what golden streams are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss

import pure_loop as pl

__all__ = ["BATCHES_OF", "MODELS", "batches", "loss_of", "model_of"]

FEATURES, CLASSES, WORDS, LENGTH = 4, 3, 7, 5


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES))


def drops() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 6), nn.Linear(6, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.GroupNorm(2, 6), nn.GELU(), nn.Linear(6, CLASSES))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def double() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES)).bfloat16()


def wide() -> nn.Module:
    """More numbers than small models have, of which gradients are added up in another way."""
    return nn.Sequential(nn.Linear(FEATURES, 520), nn.ReLU(), nn.Linear(520, 512), nn.Linear(512, CLASSES))


class Tied(nn.Module):
    """A weight in two places, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(FEATURES, CLASSES)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.decode(torch.relu(self.encode(x)))))
        return out


class Unused(nn.Module):
    """A parameter that no loss reaches, one of shape (), and a buffer that each forward counts up."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        out: Tensor = self.used(x) * self.scale
        return out


class Sometimes(nn.Module):
    """Of two heads one is there for batches of even sizes, the other for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads[len(x) % 2](x)
        return out


class Words(nn.Module):
    """Tokens in, classes out."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES, sparse=sparse)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids).mean(1))
        return out


def sparse() -> nn.Module:
    return Words(sparse=True)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(ids))[:, -1])
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.layer = nn.LSTM(FEATURES, 3, batch_first=True)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(ids))[0][:, -1])
        return out


class Named(nn.Module):
    """Takes and gives mappings, draws by a function, and has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"scores": self.head(dropout(self.embed(batch["ids"]).mean(1), 0.2, self.training))}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs["scores"], batch["labels"])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "mlp": mlp,
    "drops": drops,
    "normed": normed,
    "conv": conv,
    "tied": Tied,
    "unused": Unused,
    "sometimes": Sometimes,
    "words": Words,
    "sparse": sparse,
    "transformer": Transformer,
    "recurrent": Recurrent,
    "named": Named,
    "double": double,
    "half": half,
    "wide": wide,
}

BATCHES_OF = {
    **dict.fromkeys(("plain", "mlp", "drops", "normed", "tied", "unused", "sometimes", "wide"), "vectors"),
    **dict.fromkeys(("words", "sparse", "transformer", "recurrent"), "tokens"),
    "conv": "images",
    "named": "named",
    "double": "doubles",
    "half": "halves",
}
"""The kind of batches that a model takes."""


def model_of(name: str, seed: int) -> nn.Module:
    """The model, with the same parameters for the same seed."""
    with pl.random.seeded(seed):
        return MODELS[name]()


def batches(model: str, sizes: list[int], seed: int, *, nan: int | None = None, ignored: bool = False) -> list[Any]:
    """Batches of these sizes; that of the number ``nan`` has no finite inputs, or an infinite weight of its loss."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, n in enumerate(sizes):
        inputs, targets = _batch(BATCHES_OF[model], n, generator)
        if nan == number and inputs.is_floating_point():
            inputs = inputs * float("nan")
        if ignored and n > 1:
            targets = targets.clone()
            targets[0] = -100
        made.append({"ids": inputs, "labels": targets} if model == "named" else (inputs, targets))
    return made


def _batch(kind: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    classes = torch.randint(CLASSES, (n,), generator=generator)
    if kind in ("tokens", "named"):
        return torch.randint(WORDS, (n, LENGTH), generator=generator), classes
    if kind == "images":
        return torch.rand(n, 1, 6, 6, generator=generator), classes
    inputs = torch.randn(n, FEATURES, generator=generator)
    if kind == "halves":
        return inputs.bfloat16(), classes
    if kind == "doubles":
        return inputs.double(), torch.randn(n, 2, generator=generator).double()
    return inputs, classes


class Parts:
    """A loss with parts."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        entropy = cross_entropy(outputs, targets)
        return {"total": entropy + 0.1 * outputs.square().mean(), "entropy": entropy}


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own that is a mean, written with a sum."""
    return mse_loss(outputs, targets, reduction="sum") / len(outputs)


class Unsized:
    """Batches without a length."""

    def __init__(self, made: list[Any]) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made)


def loss_of(name: str) -> Any:
    """The loss of this name, as ``fit`` takes it."""
    if name in ("task", "counted"):
        number: Callable[[Tensor], Any] = int if name == "counted" else Tensor.float
        return pl.Task(
            forward=lambda model, batch: model(batch[0]) * 1.0,
            loss=lambda outputs, batch: cross_entropy(outputs, batch[1]),
            weight=lambda batch: 1 + number(batch[1].sum()),
            tokens=lambda batch: 2 * len(batch[0]),
        )
    return {"entropy": cross_entropy, "parts": Parts(), "mse": mse_loss, "summed": summed, "own": None}[name]
