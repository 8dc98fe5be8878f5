"""How a step's cost grows: with parameters, tensors, microbatches, and with algorithms and callbacks attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

import pure_loop as pl
from bench.performance.hand import hand_written
from bench.performance.loops import ours
from bench.performance.steps import in_turns
from bench.performance.turns import OfGenerator
from bench.performance.workloads import WORKLOADS, Workload, mlp, residual_blocks
from pure_loop import Event

__all__ = ["measure"]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 64), torch.randint(10, (32,))


def _width(width: int) -> tuple[Workload, dict[str, Any]]:
    return Workload("width", "", lambda: mlp(width), _batch), {}


def _blocks(blocks: int) -> tuple[Workload, dict[str, Any]]:
    return Workload("blocks", "", lambda: residual_blocks(blocks), _batch), {}


def _microbatches(count: int) -> tuple[Workload, dict[str, Any]]:
    return attrs.evolve(WORKLOADS[0], microbatches=count), {}


def _algorithms(count: int) -> tuple[Workload, dict[str, Any]]:
    def named(number: int) -> Any:
        def same(state: pl.State) -> pl.State:
            return state.replace(loss=state.loss)

        same.__name__ = f"same_{number}"
        return pl.algorithm(Event.AFTER_LOSS)(same)

    return WORKLOADS[0], {"algorithms": [named(number) for number in range(count)]}


class _Looks(pl.Callback):
    def batch_end(self, state: pl.State, logger: pl.Logger) -> None:
        pass


def _callbacks(count: int) -> tuple[Workload, dict[str, Any]]:
    return WORKLOADS[0], {"callbacks": [_Looks() for _ in range(count)]}


GROWTH: dict[str, tuple[Callable[[int], tuple[Workload, dict[str, Any]]], tuple[int, ...], Callable[[int], int]]] = {
    "parameters": (_width, (64, 128, 256, 512, 1024), lambda width: 75 * width + 10),
    "tensors": (_blocks, (4, 8, 16, 32, 48), lambda blocks: 6 * blocks + 4),
    "microbatches": (_microbatches, (1, 2, 4, 8, 16), lambda count: count),
    "algorithms at AFTER_LOSS": (_algorithms, (0, 1, 2, 4, 8), lambda count: count),
    "callbacks at BATCH_END": (_callbacks, (0, 1, 2, 4, 8), lambda count: count),
}


def measure(turns: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    """For each kind of growth and each size: the least microseconds a step of the hand-written loop, and of ours."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, (make, sizes, count) in GROWTH.items():
        loops = {}
        for size in sizes:
            workload, options = make(size)
            loops[f"hand {size}"] = OfGenerator(hand_written(fused=True)(workload))
            loops[f"ours {size}"] = OfGenerator(ours(**options)(workload))
        times = {key: min(values) for key, values in in_turns(loops, turns, seconds).items()}
        for loop in loops.values():
            loop.close()
        found[name] = [
            {"size": count(size), "hand_us": times[f"hand {size}"], "us": times[f"ours {size}"]} for size in sizes
        ]
    return found
