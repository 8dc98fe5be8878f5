"""The run that tests change: ``fit(**changes)``, five models, three kinds of data, and the loop by hand beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from bench.models import Tied
from pure_loop.random import seeded
from pure_loop.testing.problems import PROBLEMS

__all__ = [
    "CLASSES",
    "FEATURES",
    "LR",
    "MODELS",
    "by_hand",
    "close",
    "convnet",
    "cross_entropy",
    "fit",
    "images",
    "mlp",
    "noise",
    "noisy",
    "points",
    "run",
    "tied",
    "transformer",
    "words",
]

FEATURES, CLASSES, LR = 4, 3, 0.1
cross_entropy = functional.cross_entropy
Data = list[tuple[Tensor, Tensor]]


# Three kinds of data: lists of batches (inputs, targets). ``size`` is the samples of each batch, or of one batch each.


def points(batches: int = 3, size: int | tuple[int, ...] = 4, seed: int = 0) -> Data:
    """Inputs (n, 4), one of three classes; for ``mlp``, ``noisy`` and ``tied``."""
    return _batches(batches, size, seed, lambda n, g: torch.randn(n, FEATURES, generator=g))


def images(batches: int = 3, size: int | tuple[int, ...] = 4, seed: int = 0) -> Data:
    """Inputs (n, 3, 12, 12), one of three classes; for ``convnet``."""
    return _batches(batches, size, seed, lambda n, g: torch.randn(n, 3, 12, 12, generator=g))


def words(batches: int = 3, size: int = 4, seed: int = 0) -> Data:
    """Inputs and targets (n, 4), numbers of five words; for ``transformer``."""
    return PROBLEMS["transformer"].batches([size] * batches, seed)  # type: ignore[return-value]


def _batches(
    batches: int, size: int | tuple[int, ...], seed: int, inputs: Callable[[int, torch.Generator], Tensor]
) -> Data:
    generator = noise(seed)
    sizes = [size] * batches if isinstance(size, int) else size
    return [(inputs(n, generator), torch.randint(CLASSES, (n,), generator=generator)) for n in sizes]


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Five models; torch's generator stays as it was.


def mlp(seed: int = 0) -> nn.Module:
    """No result depends on how a batch is split."""
    with seeded(seed):
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def noisy(seed: int = 0) -> nn.Module:
    """Dropout draws random numbers, and BatchNorm keeps buffers."""
    with seeded(seed):
        return nn.Sequential(
            nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES)
        )


def tied(seed: int = 0) -> nn.Module:
    """A weight used in two places, and a parameter that is frozen."""
    with seeded(seed):
        return Tied()


def convnet(seed: int = 0) -> nn.Module:
    """Convolutions, BatchNorm and dropout."""
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 8, 3, stride=2, padding=1),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(72, CLASSES),
        )


def transformer(seed: int = 0) -> nn.Module:
    """One layer of causal attention; the words' embedding is the output layer, too."""
    return PROBLEMS["transformer"].model(seed)


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Data]]] = {
    "mlp": (mlp, points),
    "noisy": (noisy, points),
    "tied": (tied, points),
    "convnet": (convnet, images),
    "transformer": (transformer, words),
}
"""Each model with its data: what a property over models is parametrised with."""


# The run


def fit(model: Any = None, data: Any = None, algorithms: Any = (), **changes: Any) -> pl.Stream:
    """``pl.fit`` of ``mlp()`` on ``points()`` for two epochs of SGD, strict and without times; the rest as given.

    ``model`` may be a name in ``MODELS``, whose data is the default then.
    """
    make_model, make_data = MODELS[model if isinstance(model, str) else "mlp"]
    settings: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.sgd(lr=LR),
        "max_duration": "2ep",
        "strict": True,
        "clock": lambda: 0.0,
    }
    return pl.fit(
        make_model() if model is None or isinstance(model, str) else model,
        make_data() if data is None else data,
        algorithms=algorithms,
        **settings | changes,
    )


def run(model: Any = None, data: Any = None, algorithms: Any = (), **changes: Any) -> pl.State:
    """The last State of :func:`fit`."""
    return pl.run(fit(model, data, algorithms, **changes))


def by_hand(
    model: nn.Module,
    data: Data,
    gradient: Callable[[nn.Module, Tensor, Tensor], None],
    epochs: int = 2,
    momentum: float = 0.0,
    after: Callable[[nn.Module], None] = lambda module: None,
) -> dict[str, Tensor]:
    """Parameters after a loop over torch's own SGD; ``gradient`` fills ``.grad``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            gradient(model, inputs, targets)
            optimizer.step()
            after(model)
    return {name: p.detach() for name, p in model.named_parameters()}


def close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    """Two mappings of tensors are equal up to the tolerance, absolute and relative."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
