"""What users meet and the workloads lack: data that is made when asked for, parameters that are looked at, or many.

And torch's optimizers. Each figure is a ratio to a loop by hand that does the same.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import pure_loop as pl
from bench.performance.hand import hand_written
from bench.performance.loops import BASE, EPOCH, ours
from bench.performance.startup import output
from bench.performance.steps import in_turns, paired
from bench.performance.turns import OfGenerator
from bench.performance.workloads import LARGE, WORKLOADS, Workload

__all__ = ["LOADERS", "measure"]

_STEPS = {"6M": 60, "25M": 20}


class _Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are looked up one by one."""

    def __init__(self, workload: Workload) -> None:
        data = workload.data()
        pairs = [data[index % len(data)] for index in range(EPOCH)]
        self.inputs, self.targets = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class _Generated:
    """Batches of a generator, an epoch at each pass."""

    def __init__(self, workload: Workload) -> None:
        data = workload.data()
        self.data = [data[index % len(data)] for index in range(EPOCH)]

    def __iter__(self) -> Iterator[Any]:
        yield from self.data


def _shuffled(workload: Workload) -> Any:
    samples = _Samples(workload)
    return DataLoader(samples, batch_size=len(samples) // EPOCH, shuffle=True)


LOADERS: dict[str, Callable[[Workload], Any]] = {
    "W1, a DataLoader that shuffles": _shuffled,
    "W1, a generator of batches": _Generated,
}


def measure(turns: int, seconds: float) -> dict[str, dict[str, float]]:
    """For each cost CPU microseconds of a step by hand and of ours, system time included, and their ratio."""
    found = {}
    for name, loader in LOADERS.items():
        loops = hand_written(fused=True, loader=loader), ours(loader=loader)
        found[name] = _beside(WORKLOADS[0], *loops, turns, seconds)
    loops = hand_written(fused=True), ours(read=True)
    found["W1, state.params is read at each batch"] = _beside(WORKLOADS[0], *loops, turns, seconds)
    for workload in LARGE:
        found[workload.describe] = _alone(workload.name, max(turns // 5, 3))
    # As torch has it by default, which is no fused kernel.
    kind = torch.optim.AdamW
    loops = hand_written(optimizer=kind), ours(optimizer=pl.optim.from_torch(kind, lr=1e-3))
    name = "MLP of 6 million parameters, from_torch(torch.optim.AdamW)"
    return {**found, name: _beside(LARGE[0], *loops, turns, 4 * seconds)}


def _beside(workload: Workload, hand: Any, loop: Any, turns: int, seconds: float) -> dict[str, float]:
    times = in_turns(
        {BASE: OfGenerator(hand(workload)), "ours": OfGenerator(loop(workload))}, turns=turns, seconds=seconds
    )
    us = {name: statistics.median(each) for name, each in times.items()}
    return {"hand_us": us[BASE], "us": us["ours"], "ratio": paired(times, BASE)["ours"]}


def _alone(workload: str, runs: int) -> dict[str, float]:
    """In processes that take turns, because what malloc keeps for one loop serves the other one."""
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    for _ in range(runs):
        for what, found in times.items():
            command = ("-m", "bench.performance.alone", what, str(_STEPS[workload]), workload)
            found.append(json.loads(output(*command))["mean_us"])
    hand, us = (statistics.median(found) for found in times.values())
    return {"hand_us": hand, "us": us, "ratio": us / hand}
