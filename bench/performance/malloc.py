"""What it costs that freed memory goes back to the system: glibc's malloc as it is, and told to keep what it has."""

from __future__ import annotations

import json
import statistics

from bench.performance.startup import output

__all__ = ["KEPT", "measure"]

# What glibc reads when a process starts, in bytes. It takes no more than 32 MiB for the second.
KEPT = {"MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "33554432"}
_STEPS = {"W2": 200, "W3": 15, "W5": 30}
_LOOPS = {"hand-written, fused AdamW": "hand", "pl.fit, every event": "ours"}


def measure(runs: int = 5) -> dict[str, dict[str, float]]:
    """For each loop, what a step takes with :data:`KEPT` of what it takes without, by workload.

    Each is a process of its own, because all loops of a process share what is kept. They take turns; medians.
    """
    found: dict[str, dict[str, list[float]]] = {name: {each: [] for each in _STEPS} for name in _LOOPS}
    for _ in range(runs):
        for workload, steps in _STEPS.items():
            for name, what in _LOOPS.items():
                command = ("-m", "bench.performance.alone", what, str(steps), workload)
                without, kept = json.loads(output(*command)), json.loads(output(*command, **KEPT))
                found[name][workload].append(kept["us"] / without["us"])
    return {
        name: {workload: statistics.median(ratios) for workload, ratios in ratios_of.items()}
        for name, ratios_of in found.items()
    }
