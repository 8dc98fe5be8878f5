"""Whether a step costs the same after many: time of a step of W1, and memory in use, along one run."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch

from tests.benchmarks.alone import resident_megabytes
from tests.benchmarks.loops import ours
from tests.benchmarks.startup import output
from tests.benchmarks.turns import OfGenerator
from tests.benchmarks.workloads import WORKLOADS

__all__ = ["measure"]


def measure(longest: int) -> list[dict[str, Any]]:
    """At 1000, 10 000, ... steps: microseconds a step of the next 1000, objects and megabytes in use.

    In a process of its own, where nothing else is in use.
    """
    found: list[dict[str, Any]] = json.loads(output("-m", "tests.benchmarks.length", str(longest)))
    return found


def _measure(longest: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    loop = OfGenerator(ours()(WORKLOADS[0]))
    found, done, at = [], 0, 1000
    while at <= longest:
        done += loop.run(at - done)[1]
        gc.collect()
        row = {"steps": done, "python_blocks": sys.getallocatedblocks(), "resident_mb": resident_megabytes()}
        # Ten stretches and the least: another process that disturbs one doesn't disturb all.
        stretches = [loop.run(100) for _ in range(10)]
        done += sum(steps for _, steps in stretches)
        found.append(row | {"us": min(seconds / steps for seconds, steps in stretches) * 1e6})
        at *= 10
    loop.close()
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
