"""What ``fit(verify=)`` costs: a run with it beside the same run without, in turns; ratios of CPU time.

python -m bench.performance.verify                    # W1 and W3, every 10th and 100th batch, and none that comes
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch

from bench.performance.loops import ours
from bench.performance.turns import OfGenerator
from bench.performance.workloads import WORKLOADS, Workload
from pure_loop import Event

__all__ = ["measure"]

# As many steps a turn as there are between two due batches of the rarest, so that each turn has one.
STEPS = 100


def measure(workload: Workload, intervals: Sequence[str], turns: int) -> tuple[float, dict[str, float]]:
    """Milliseconds a step without ``verify=``, and for each interval the median ratio to it over the turns."""
    watch = {Event.BATCH_END}
    plain = OfGenerator(ours(watch=watch)(workload))
    loops = {interval: OfGenerator(ours(watch=watch, verify=interval)(workload)) for interval in intervals}
    for loop in (plain, *loops.values()):
        loop.run(STEPS)
    ratios: dict[str, list[float]] = {interval: [] for interval in intervals}
    base = []
    for _ in range(turns):
        seconds, steps = plain.run(STEPS)
        base.append(seconds / steps)
        for interval, loop in loops.items():
            used, done = loop.run(STEPS)
            ratios[interval].append(used / done / base[-1])
    for loop in (plain, *loops.values()):
        loop.close()
    return 1000 * statistics.median(base), {interval: statistics.median(values) for interval, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["W1", "W3"], help="names of workloads")
    parser.add_argument("--intervals", nargs="+", default=["10ba", "100ba", "1000000ba"])
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for workload in WORKLOADS:
        if workload.name in options.only:
            milliseconds, ratios = measure(workload, options.intervals, options.turns)
            shown = ", ".join(f"{interval} {ratio:.3f}" for interval, ratio in ratios.items())
            print(f"{workload.name}: {milliseconds:.3f} ms a step; with verify, times that: {shown}", flush=True)


if __name__ == "__main__":
    main()
