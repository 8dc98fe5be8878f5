"""``make bench``: a table of ratios, and benchmark.json.

The loops take turns, a few dozen milliseconds each, so that a change in the machine's speed meets all of
them alike; a figure is the median over the turns of a loop's CPU time a step divided by that of the
hand-written loop in the same turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.benchmarks.loops import LOOPS
from tests.benchmarks.workloads import WORKLOADS, Workload

BASE = next(iter(LOOPS))


def measure(workload: Workload, turns: int, seconds: float) -> dict[str, dict[str, float]]:
    """For each loop: microseconds a step (median and least), and the ratio to the hand-written loop."""
    loops = {name: make(workload) for name, make in LOOPS.items()}
    for loop in loops.values():
        for _ in range(20):
            next(loop)
    begin = time.process_time()
    for _ in range(10):
        next(loops[BASE])
    steps = max(2, int(seconds / ((time.process_time() - begin) / 10)))
    found: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(turns):
        # Another order each turn: whoever comes after a memory-hungry one pays for its cache.
        names = list(loops)[turn % len(loops) :] + list(loops)[: turn % len(loops)]
        for name in names:
            begin = time.process_time()
            for _ in range(steps):
                next(loops[name])
            found[name].append((time.process_time() - begin) / steps * 1e6)
    return {
        name: {
            "us": statistics.median(times),
            "least_us": min(times),
            "ratio": statistics.median(t / base for t, base in zip(times, found[BASE], strict=True)),
        }
        for name, times in found.items()
    }


def import_seconds(statement: str, runs: int = 7) -> float:
    """CPU seconds that a statement takes in a new process where torch is imported already; the least of some runs."""
    code = f"import torch, time; t = time.process_time(); {statement}; print(time.process_time() - t)"
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(runs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.05, help="CPU time of one turn of one loop")
    parser.add_argument("--only", nargs="*", help="names of workloads")
    parser.add_argument("--output", type=Path, default=Path("benchmark.json"))
    parser.add_argument("--check", action="store_true", help="exit with 1 where a ratio is above its limit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, object] = {"torch": torch.__version__, "threads": 1}
    failed = []
    chosen = [w for w in WORKLOADS if not options.only or w.name in options.only]
    print(f"{'':34s}" + "".join(f"{w.name:>9s}" for w in chosen))
    table = {w.name: measure(w, options.turns, options.seconds) for w in chosen}
    for name in LOOPS:
        print(f"{name:34s}" + "".join(f"{table[w.name][name]['ratio']:9.2f}" for w in chosen))
    print(f"{'hand-written, microseconds':34s}" + "".join(f"{table[w.name][BASE]['us']:9.0f}" for w in chosen))
    for workload in chosen:
        ratio = table[workload.name]["pl.fit, every event"]["ratio"]
        if workload.limit is not None and ratio > workload.limit:
            failed.append(f"{workload.name}: {ratio:.2f}, the limit is {workload.limit}")
    seconds = import_seconds("import pure_loop")
    print(f"\nimport pure_loop adds {seconds:.3f} s to importing torch")
    if seconds > 0.15:
        failed.append(f"import: {seconds:.3f} s, the limit is 0.15")
    results |= {"workloads": table, "import_seconds": seconds}
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    for line in failed:
        print("above the limit:", line)
    return int(bool(failed) and options.check)


if __name__ == "__main__":
    raise SystemExit(main())
