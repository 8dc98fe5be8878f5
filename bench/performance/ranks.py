"""``make bench-ranks``: two ranks with gloo, against hand-written loops with torch's own engines, as ratios in one run.

The loops take turns on the same two processes; a figure is the median over the turns of a loop's wall-clock time a
step divided by that of its hand-written loop in the same turn. Memory is that of one rank: the peak of parameters,
gradients and optimizer state of a GPT with 25 million parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pure_loop as pl
from bench.performance.memory import peaks
from bench.performance.turns import OfGenerator
from bench.performance.workloads import SCALED, WORKLOADS, Workload
from pure_loop.distributed.shard import repeated_layers
from pure_loop.testing.ranks import Pool

RANKS = 2
CHOSEN = ("W3", "W4")
COMPILED: dict[str, Any] = {"compile": True, "watch": {pl.Event.BATCH_END}}
# Of the peak of memory, relative to the loop by hand: sharded, the module has parameters in parts, and the State has;
# compiled, a rank has the whole model for a while.
MEMORY = {
    'pl.fit, parallel="replicate"': 1.02,
    'pl.fit, parallel="replicate", compiled': 1.02,
    'pl.fit, parallel="shard"': 1.25,
    'pl.fit, parallel="shard", compiled': 1.25,
}
LIMITS = {("W3", "replicate"): 1.10, ("W4", "replicate"): 1.25, ("W3", "shard"): 1.10, ("W4", "shard"): 1.10}


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, workload: Workload, data: list[Any]) -> Iterator[None]:
    for inputs, targets in cycle(data):
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        yield


def plain_ddp(workload: Workload, rank: int) -> Iterator[None]:
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.model())
    return _steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), workload, _part(workload, rank))


def plain_fsdp2(workload: Workload, rank: int) -> Iterator[None]:
    torch.manual_seed(0)
    model = workload.model()
    for layer in repeated_layers(model):
        fully_shard(layer)
    fully_shard(model)
    return _steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3), workload, _part(workload, rank))


def _whole(workload: Workload) -> list[Any]:
    torch.manual_seed(1)
    batches = [[workload.batch() for _ in range(RANKS)] for _ in range(8)]
    return [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in batches]


def _part(workload: Workload, rank: int) -> list[Any]:
    return [tuple(each.chunk(RANKS)[rank] for each in batch) for batch in _whole(workload)]


def ours(kind: Any, **options: Any) -> Callable[[Workload, int], Iterator[None]]:
    def loop(workload: Workload, rank: int) -> Iterator[None]:
        torch.manual_seed(0)
        stream = pl.fit(
            workload.model(),
            _whole(workload) * 1000,
            loss=workload.loss,
            optimizer=pl.optim.adamw(lr=1e-3),
            max_duration="1000000ba",
            parallel=kind,
            **options,
        )
        return (None for event, _ in stream if event is pl.Event.BATCH_END)

    return loop


LOOPS: dict[str, tuple[str, Callable[[Workload, int], Iterator[None]]]] = {
    "hand-written, DDP, fused AdamW": ("replicate", plain_ddp),
    'pl.fit, parallel="replicate"': ("replicate", ours("replicate")),
    'pl.fit, parallel="replicate", compiled': ("replicate", ours("replicate", **COMPILED)),
    "hand-written, fully_shard, AdamW": ("shard", plain_fsdp2),
    'pl.fit, parallel="shard"': ("shard", ours("shard")),
    'pl.fit, parallel="shard", compiled': ("shard", ours("shard", **COMPILED)),
}


def measure(name: str, turns: int, seconds: float) -> Callable[[int], dict[str, list[float]]]:
    """A program for every rank: seconds a step of each loop, turn by turn."""

    def program(rank: int) -> dict[str, list[float]]:
        workload = next(each for each in WORKLOADS if each.name == name)
        loops = {key: make(workload, rank) for key, (_, make) in LOOPS.items()}
        for loop in loops.values():
            for _ in range(5):
                next(loop)
        begin = time.perf_counter()
        for _ in range(5):
            next(loops["hand-written, DDP, fused AdamW"])
        # The same on all ranks, or they would wait for ever.
        steps = torch.tensor(max(2, int(seconds / ((time.perf_counter() - begin) / 5))))
        dist.broadcast(steps, 0)
        found: dict[str, list[float]] = {key: [] for key in loops}
        for turn in range(turns):
            names = list(loops)[turn % len(loops) :] + list(loops)[: turn % len(loops)]
            for key in names:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(int(steps)):
                    next(loops[key])
                found[key].append((time.perf_counter() - begin) / int(steps))
        for loop in loops.values():
            loop.close()  # type: ignore[attr-defined]
        return found

    return program


def _peak(make: Callable[[Workload, int], Iterator[None]]) -> Callable[[int], int]:
    """A program for every rank: bytes alive at once in the steps after the first two."""

    def program(rank: int) -> int:
        _, later = peaks(lambda: OfGenerator(1 for _ in make(SCALED, rank)))
        return later

    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3, help="wall-clock time of one turn of one loop")
    parser.add_argument("--output", type=Path, default=Path("benchmark-ranks.json"))
    parser.add_argument("--check", action="store_true", help="exit with 1 where a ratio is above its limit")
    options = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "ranks": RANKS}
    failed = []
    with Pool(RANKS, timeout=1800, checked=False) as pool:
        for name in CHOSEN:
            found = pool.run(measure(name, options.turns, options.seconds))[0]
            results[name] = {}
            print(f"\n{name}, {RANKS} ranks{'':26s}ratio   ms a step")
            bases = {kind: key for key, (kind, _) in reversed(LOOPS.items())}
            for key, (kind, _) in LOOPS.items():
                pairs = zip(found[key], found[bases[kind]], strict=True)
                ratio = statistics.median(one / base for one, base in pairs)
                milliseconds = statistics.median(found[key]) * 1e3
                results[name][key] = {"ratio": ratio, "ms": milliseconds}
                print(f"{key:40s}{ratio:6.2f}{milliseconds:10.2f}")
                if not key.startswith("hand-written") and ratio > LIMITS[name, kind]:
                    failed.append(f"{name}, {kind}: {ratio:.2f}, the limit is {LIMITS[name, kind]}")
        results["memory"] = {}
        print(f"\n25 million parameters, {RANKS} ranks{'':13s}ratio  MB of a rank")
        bases = {}
        for key, (kind, make) in LOOPS.items():
            peak = max(pool.run(_peak(make)))
            ratio = peak / bases.setdefault(kind, peak)
            results["memory"][key] = {"ratio": ratio, "mb": peak / 1e6}
            print(f"{key:40s}{ratio:6.2f}{peak / 1e6:10.0f}")
            if ratio > MEMORY.get(key, ratio):
                failed.append(f"memory, {key}: {ratio:.2f}, the limit is {MEMORY[key]}")
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    for line in failed:
        print("above the limit:", line)
    return int(bool(failed) and options.check)


if __name__ == "__main__":
    raise SystemExit(main())
