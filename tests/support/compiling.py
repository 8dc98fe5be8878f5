"""What tests of ``compile=`` share: a model with everything, its runs, and how near the eager numbers have to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema, gradient_clipping, label_smoothing
from tests.support.models import CLASSES, FEATURES, batches, plain
from tests.support.streams import leaves

EPOCHS = {Event.EPOCH_END}
BATCHES = {Event.BATCH_END}
INSIDE = [Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD]
SHORT: dict[str, Any] = {"model": plain, "data": batches((8,) * 5, 1)}
# None has two samples: of two, a BatchNorm makes 1 and -1, and the gradient of that is rounding error.
MICROBATCHES: dict[str, Any] = {"microbatch_size": 4, "data": batches((8, 8, 7), 1)}
WITH_NAN = [(x * float("nan") if i == 1 else x, y) for i, (x, y) in enumerate(batches((8, 8, 8), 1))]


def mlp() -> nn.Module:
    # No bias before the BatchNorm: its gradient is rounding error, which Adam makes into whole steps.
    return nn.Sequential(
        nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES)
    )


class Parts:
    """A loss with parts."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        entropy = cross_entropy(outputs, targets)
        return {"total": entropy + 0.1 * outputs.square().mean(), "entropy": entropy}


class Named(nn.Module):
    """Takes mappings, and draws by a functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"scores": self.head(dropout(self.embed(batch["ids"]), 0.2, self.training))}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs["scores"], batch["labels"])


def named_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "ids": torch.randint(7, (6,), generator=generator),
            "labels": torch.randint(CLASSES, (6,), generator=generator),
        }
        for _ in range(3)
    ]


class Pair(nn.Module):
    """One output is another one without its graph, and a third is a function of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, CLASSES), nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.one(x).tanh()
        return {"out": out, "target": out.detach(), "more": self.two(out), "mean": out.mean(0, True).expand_as(out)}


class Unused(nn.Module):
    """A parameter that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x[:, None].expand(-1, 3, -1))[:, -1])
        return out


class Sometimes(nn.Module):
    """Of two heads one is there for batches of eight, and one for others."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads[len(x) == 8](x)
        return out


class Recurrent(nn.Module):
    """A recurrent layer of this class over the features."""

    def __init__(self, cls: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = cls(1, 3, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(3 * (1 + self.layer.bidirectional), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        sequence = x[:, :, None] if self.layer.batch_first else x.t()[:, :, None]
        states, _ = self.layer(sequence)
        out: Tensor = self.head(states[:, -1] if self.layer.batch_first else states[-1])
        return out


class Steps(nn.Module):
    """A recurrent layer over seven steps, an odd number."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer(2, 3)
        out = (self.layer.proj_size or 3) * (1 + self.layer.bidirectional)
        self.before, self.head = nn.Linear(4, 14), nn.Linear(out, 3)

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.layer.parameters()).dtype
        sequence = self.before(x).reshape(len(x), 7, 2).to(dtype)
        states, _ = self.layer(sequence if self.layer.batch_first else sequence.transpose(0, 1))
        out: Tensor = self.head(states.mean(1 if self.layer.batch_first else 0).to(x.dtype))
        return out


def stream(model: Callable[[], nn.Module] = mlp, **settings: Any) -> Iterator[tuple[Event, pl.State]]:
    with pl.random.seeded(3):
        module = model()
    given: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.adamw(lr=pl.schedules.linear(1e-2, 1e-3, "2ep")),
        "max_duration": "2ep",
        "watch": EPOCHS,
    }
    data = settings.pop("data", None)
    return pl.fit(module, batches((8, 8, 5), 1) if data is None else data, **(given | settings))


def fit(model: Callable[[], nn.Module] = mlp, **settings: Any) -> list[tuple[Event, pl.State]]:
    return list(stream(model, **settings))


def assert_close(given: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    """Equal but for rounding, which is measured against the size of numbers of order 1."""
    assert wanted, "nothing that this test watches was yielded"
    assert [event for event, _ in given] == [event for event, _ in wanted]
    for (event, one), (_, other) in zip(given, wanted, strict=True):
        a, b = leaves(one), leaves(other)
        assert a.keys() == b.keys(), event
        for path, value in a.items():
            where = f"{path} at {event.name}, batch {one.timestamp.batch}"
            if isinstance(value, Tensor):
                assert (value.shape, value.dtype) == (b[path].shape, b[path].dtype), where
                torch.testing.assert_close(
                    value.double(), b[path].double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=where
                )
            else:
                assert value == b[path] or value == pytest.approx(b[path]), where


def several() -> list[Any]:
    return [label_smoothing(0.1), ema(half_life="4ba"), gradient_clipping("norm", 1.0)]


@pl.algorithm(Event.AFTER_LOSS, when="3ba")
def every_third(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * 2)
