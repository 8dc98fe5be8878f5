"""A process with one loop in it: ``python -m bench.performance.alone WHAT STEPS [WORKLOAD]``.

``WHAT`` is ``hand``, ``ours`` or a module of :mod:`peers`. Nothing is imported that the loop doesn't need.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from typing import Any

__all__ = ["peak_megabytes", "resident_megabytes"]

# Steps after the first in which `fit` still compares States by value, once a run: no part of what a step costs.
_CHECKED = 3


def resident_megabytes() -> float:
    return _kilobytes("VmRSS") / 1e3


def peak_megabytes() -> float:
    """The process's own peak; what ``getrusage`` says begins with that of the process that started it."""
    return _kilobytes("VmHWM") / 1e3


def _kilobytes(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:")) * 1024 // 1000


def _turns(what: str, name: str) -> Any:
    import torch

    torch.set_num_threads(1)
    from bench.performance.turns import InThread, OfGenerator
    from bench.performance.workloads import LARGE, WORKLOADS

    workload = next(each for each in [*WORKLOADS, *LARGE] if each.name == name)
    if what == "hand":
        from bench.performance.hand import hand_written

        return OfGenerator(hand_written(fused=True)(workload))
    if what == "ours":
        from bench.performance.loops import ours

        return OfGenerator(ours()(workload))
    from bench.performance.operators import let_torchvision_be_imported

    let_torchvision_be_imported()
    module = importlib.import_module(f"bench.performance.peers.{what}")
    if hasattr(module, "train"):
        return InThread(lambda tick: module.train(workload, tick))
    return OfGenerator(module.steps(workload))


def main() -> None:
    turns = _turns(sys.argv[1], *sys.argv[3:] or ["W1"])
    turns.run(1)
    found = {"first_step_cpu_seconds": time.process_time()}
    count = int(sys.argv[2]) - 1
    if count:
        turns.run(_CHECKED)
        later = [seconds / steps for seconds, steps in (turns.run(1) for _ in range(count))]
        found["us"] = 1e6 * statistics.median(later)
        found["mean_us"] = 1e6 * statistics.mean(later)
    print(json.dumps(found | {"peak_mb": peak_megabytes()}))
    turns.close()


if __name__ == "__main__":
    main()
