"""What frozen layers save: steps with half of the layers in ``State.frozen`` against a loop by hand without them.

The loop by hand has ``requires_grad=False`` in the same layers and gives the optimizer the others alone. What that
saves is 1; ``python -m bench.performance.freezing``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event

__all__ = ["measure"]

WIDTH, LAYERS, SAMPLES, ROUNDS, STEPS = 512, 8, 256, 15, 6
cross_entropy = nn.functional.cross_entropy


def model() -> nn.Sequential:
    """Layers of one size, of which the first half is frozen."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


BATCH = (torch.randn(SAMPLES, WIDTH), torch.randint(WIDTH, (SAMPLES,)))
FROZEN = frozenset(name for name, _ in model().named_parameters() if int(name.split(".")[0]) < LAYERS)


def ours(frozen: frozenset[str]) -> Callable[[], None]:
    freeze = pl.Algorithm("freeze", {Event.FIT_START: lambda state: state.replace(frozen=frozen)})

    def endless() -> Iterator[Any]:
        while True:
            yield BATCH

    stream = pl.fit(
        *(model(), endless()),
        loss=cross_entropy,
        optimizer=pl.optim.sgd(lr=0.01),
        max_duration="100000ba",
        algorithms=[freeze],
        watch={Event.BATCH_END},
    )
    return lambda: void(next(stream))


def void(_: Any) -> None:
    """Let go of what was observed, so that the next step may write to it."""


def by_hand(frozen: frozenset[str]) -> Callable[[], None]:
    module = model()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(module(BATCH[0]), BATCH[1]).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begun) / STEPS


def measure() -> dict[str, float]:
    """Milliseconds a step of each, and the share of the saving by hand that ``State.frozen`` saves."""
    torch.set_num_threads(1)
    loops = {
        "by hand": by_hand(frozenset()),
        "by hand, half frozen": by_hand(FROZEN),
        "ours": ours(frozenset()),
        "ours, half frozen": ours(FROZEN),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, step in loops.items():
            times[name].append(seconds(step))
    result = {name: statistics.median(rounds[2:]) * 1e3 for name, rounds in times.items()}
    saved = (result["ours"] - result["ours, half frozen"]) / (result["by hand"] - result["by hand, half frozen"])
    return {**result, "saved, of what is saved by hand": saved}


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:34}{value:8.3f}{'' if 'saved' in name else ' ms'}")
