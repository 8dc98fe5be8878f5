"""What a step costs: every loop on every workload, in turns, as ratios to the loop by hand.

The loops take turns of a few dozen milliseconds each, so that a change in the machine's speed meets all of them alike;
a figure is the median over the turns of a loop's CPU time a step divided by that of the hand-written loop in the same
turn.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bench.performance.loops import BASE
from bench.performance.peers import UnmeasurableError, quiet
from bench.performance.turns import Turns
from bench.performance.workloads import Workload

__all__ = ["Competitor", "cpu_seconds", "in_turns", "measure", "paired"]

WARM_STEPS, WARM_SECONDS = 20, 0.5


class Competitor(Protocol):
    """A loop of ours or of a peer."""

    @property
    def name(self) -> str: ...

    def turns(self, workload: Workload) -> Turns: ...


def measure(
    workload: Workload, competitors: Sequence[Competitor], turns: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """For each loop microseconds a step (median and least), the ratio, and what its first step cost; or why not."""
    loops: dict[str, Turns] = {}
    found: dict[str, dict[str, Any]] = {}
    for each in competitors:
        begin, wall = cpu_seconds(), time.perf_counter()
        try:
            with quiet():
                loop = each.turns(workload)
                loop.run(1)
        except UnmeasurableError as error:
            found[each.name] = {"missing": str(error)}
            continue
        found[each.name] = {
            "first_cpu_seconds": cpu_seconds() - begin,
            "first_wall_seconds": time.perf_counter() - wall,
        }
        loops[each.name] = loop
    times = in_turns(loops, turns, seconds)
    ratios = paired(times, BASE)
    for name, values in times.items():
        found[name] |= {"us": statistics.median(values), "least_us": min(values), "ratio": ratios[name]}
    with quiet():
        for loop in loops.values():
            loop.close()
    return found


def in_turns(loops: Mapping[str, Turns], turns: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds a step of each loop, turn by turn; a turn of any of them is as many steps as the first makes."""
    for loop in loops.values():
        steps, used = 0, 0.0
        while steps < WARM_STEPS and used < WARM_SECONDS:
            more, done = loop.run(1)
            steps, used = steps + done, used + more
    used, done = next(iter(loops.values())).run(10)
    steps = max(2, int(seconds / (used / done)))
    # What libraries keep for ever is not traversed in a turn.
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in loops}
    try:
        names = list(loops)
        shuffle = random.Random(0).shuffle
        for _ in range(turns):
            # Who comes after a memory-hungry one finds none of its own in the cache: in another order each time, and
            # with a step that isn't counted.
            shuffle(names)
            for name in names:
                loops[name].run(1)
                used, done = loops[name].run(steps)
                times[name].append(used / done * 1e6)
    finally:
        gc.unfreeze()
    return times


def paired(times: Mapping[str, Sequence[float]], base: str) -> dict[str, float]:
    """Medians over the turns of each loop's time divided by the base's in the same turn."""
    return {
        name: statistics.median(one / other for one, other in zip(values, times[base], strict=True))
        for name, values in times.items()
    }


def cpu_seconds() -> float:
    """Of this process until now, and of its children."""
    # A compiler's processes are children, and count when they have ended.
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
