"""Whether a step costs the same after many: time of a step of W1 beside the loop by hand's, and memory in use.

Over the minutes of a long run a machine changes its speed, so the loop by hand, which stands still meanwhile, takes
turns with it at each of these points.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from typing import Any

import torch

from bench.performance.alone import resident_megabytes
from bench.performance.loops import HAND, ours
from bench.performance.startup import output
from bench.performance.turns import OfGenerator
from bench.performance.workloads import WORKLOADS

__all__ = ["measure"]


def measure(longest: int) -> list[dict[str, Any]]:
    """At 1000, 10 000, ... steps: microseconds a step of the next 1000, ratio, objects and megabytes in use.

    In a process of its own, where nothing else is in use.
    """
    found: list[dict[str, Any]] = json.loads(output("-m", "bench.performance.length", str(longest)))
    return found


def _measure(longest: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    loop, by_hand = OfGenerator(ours()(WORKLOADS[0])), HAND[0].turns(WORKLOADS[0])
    found, done, at = [], 0, 1000
    by_hand.run(at)
    while at <= longest:
        done += loop.run(at - done)[1]
        gc.collect()
        row = {"steps": done, "python_blocks": sys.getallocatedblocks(), "resident_mb": resident_megabytes()}
        turns = [(loop.run(100), by_hand.run(100)) for _ in range(20)]
        done += sum(steps for (_, steps), _ in turns)
        times = [(ours / steps, theirs / others) for (ours, steps), (theirs, others) in turns]
        ratio = statistics.median(mine / other for mine, other in times)
        found.append(row | {"us": statistics.median(mine for mine, _ in times) * 1e6, "ratio": ratio})
        at *= 10
    loop.close()
    by_hand.close()
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
