"""The peak of memory with default settings, alone and with something attached, beside a loop by hand that does as much.

By allocation, as :mod:`bench.performance.memory` says; in steps at which nothing is saved or recorded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pure_loop as pl
from bench.performance.hand import hand_written
from bench.performance.loops import BASE, ours
from bench.performance.memory import peaks
from bench.performance.turns import OfGenerator, Steps
from bench.performance.workloads import LARGE, WORKLOADS, Workload
from pure_loop.callbacks import CheckpointSaver, GradMonitor

__all__ = ["AVERAGED", "measure"]

AVERAGED = f"{BASE}, and an average"
SMOOTHING = 0.99
NEVER = "1000000ba"
# In which the checks of the first events are made.
FIRST = 4


def _loops(folder: str) -> dict[str, tuple[Callable[[Workload], Steps], str]]:
    """Each loop by its name, and that of the loop by hand that does the same."""
    average = {"algorithms": [pl.algorithms.ema(smoothing=SMOOTHING)]}
    variants: dict[str, tuple[dict[str, Any], str]] = {
        "pl.fit": ({}, BASE),
        "pl.fit, donate=True": ({"donate": True}, BASE),
        "pl.fit, ema": (average, AVERAGED),
        "pl.fit, GradMonitor": ({"callbacks": [GradMonitor(NEVER)]}, BASE),
        "pl.fit, CheckpointSaver": ({"callbacks": [CheckpointSaver(folder, interval=NEVER)]}, BASE),
    }
    hand = {BASE: hand_written(fused=True), AVERAGED: hand_written(fused=True, smoothing=SMOOTHING)}
    return {name: (loop, name) for name, loop in hand.items()} | {
        name: (ours(**options), beside) for name, (options, beside) in variants.items()
    }


def measure(workloads: Sequence[Workload] = (WORKLOADS[4], LARGE[1])) -> dict[str, dict[str, dict[str, float]]]:
    """For each workload and loop the peak of the first steps and of those after them, in MB, and as a ratio."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for workload in workloads:
        cells = found[workload.name] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, (loop, beside) in _loops(folder).items():
                first, later = peaks(partial(_turns, loop, workload), FIRST)
                cells[name] = {"first_mb": first / 1e6, "mb": later / 1e6}
                cells[name]["ratio"] = cells[name]["mb"] / cells[beside]["mb"]
    return found


def _turns(loop: Callable[[Workload], Steps], workload: Workload) -> OfGenerator:
    return OfGenerator(loop(workload))
