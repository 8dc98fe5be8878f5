"""Small models and data, trained by ``pl.fit`` and by a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl

cross_entropy = functional.cross_entropy
Data = list[tuple[Tensor, Tensor]]
LR = 0.1


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(batches: int = 3, size: int = 5, seed: int = 0) -> Data:
    g = noise(seed)
    return [(torch.randn(size, 4, generator=g), torch.randint(3, (size,), generator=g)) for _ in range(batches)]


def images(batches: int = 3, size: int = 4, seed: int = 0) -> Data:
    g = noise(seed)
    return [(torch.randn(size, 3, 12, 12, generator=g), torch.randint(3, (size,), generator=g)) for _ in range(batches)]


def mlp(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def convnet(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 8, 3, stride=2, padding=1),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(72, 3),
        )


def train(model: Any, data: Any, algorithms: Any = (), **options: Any) -> pl.State:
    return pl.run(stream(model, data, algorithms, **options))


def stream(model: Any, data: Any, algorithms: Any = (), **options: Any) -> Any:
    settings: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.sgd(lr=LR),
        "max_duration": "2ep",
        "strict": True,
        "clock": lambda: 0.0,
    }
    return pl.fit(model, data, algorithms=algorithms, **{**settings, **options})


def by_hand(
    model: nn.Module,
    data: Data,
    gradient: Callable[[nn.Module, Tensor, Tensor], None],
    epochs: int = 2,
    momentum: float = 0.0,
    after: Callable[[nn.Module], None] = lambda module: None,
) -> dict[str, Tensor]:
    """Parameters after a loop over torch's own optimizer; ``gradient`` fills ``.grad``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            gradient(model, inputs, targets)
            optimizer.step()
            after(model)
    return {name: p.detach() for name, p in model.named_parameters()}


def close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or (x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all()))


def equal(a: Any, b: Any) -> None:
    """Bitwise, leaf by leaf; NaN equals NaN."""
    paths, left, spec = optree.tree_flatten_with_path(a, none_is_leaf=True, namespace="pure_loop")
    right, other = optree.tree_flatten(b, none_is_leaf=True, namespace="pure_loop")
    assert spec == other
    for path, x, y in zip(paths, left, right, strict=True):
        same = _equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        assert same, f"{path}: {x} != {y}"
